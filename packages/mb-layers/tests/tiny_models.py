"""Tiny random models of transformers' MoE families, shared by the tests."""

from __future__ import annotations

import torch
import transformers

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "deepseek_v3": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    # Beyond the five: experts without a gate, and a gate that is not SiLU.
    "nemotron_h": {
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "layers_block_type": ["attention", "moe"],
        "mlp_hidden_act": "relu2",
        "head_dim": 16,
    },
    "granitemoe": {
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    # DeepSeek-V3's block behind Llama's attention.
    "glm4_moe": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    # Names of their own for router, bias and shared expert.
    "afmoe": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "num_dense_layers": 0,
        "route_scale": 1.5,
        "head_dim": 16,
    },
    "ernie4_5_moe": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "hunyuan_v1_moe": {
        "intermediate_size": 16,
        "num_experts": 6,
        "moe_topk": 2,
        "head_dim": 16,
    },
    "gemma_gate": {"intermediate_size": 16, "num_experts": 9, "hidden_act": "gelu_pytorch_tanh"},
}
FAMILIES["nemotron_3"] = {**FAMILIES["nemotron_h"], "moe_latent_size": 20}
BLOCKS = [
    *("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"),
    *("granitemoe", "afmoe", "ernie4_5_moe", "hunyuan_v1_moe", "gpt_oss"),
    *("nemotron_h", "nemotron_3"),
]


def build(family: str, **overrides: object) -> torch.nn.Module:
    kind = {"gemma_gate": "olmoe", "nemotron_3": "nemotron_h"}.get(family, family)
    config = transformers.AutoConfig.for_model(kind, **(COMMON | FAMILIES[family] | overrides))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Zero-initialised in transformers; a test needs them to matter.
            if name.endswith(("_bias", "router.bias", "gate.weight", "router.weight")):
                tensor.normal_(std=0.2)
    model.set_experts_implementation("eager")
    return model


def llama4(top_k: int) -> torch.nn.Module:
    config = transformers.Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=top_k,
        interleave_moe_layer_step=1,
        attention_chunk_size=32,
        initializer_range=0.2,
        pad_token_id=0,
    )
    model = transformers.Llama4ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.feed_forward.experts.gate_up_proj, std=0.2)
        torch.nn.init.normal_(layer.feed_forward.experts.down_proj, std=0.2)
    return model


def longcat(top_k: int) -> torch.nn.Module:
    config = transformers.LongcatFlashConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=1,
        num_attention_heads=2,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=top_k,
        num_experts_per_tok=top_k,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        head_dim=16,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LongcatFlashForCausalLM(config)


def moe_block(model: torch.nn.Module) -> torch.nn.Module:
    last = model.model.layers[1]
    return next(m for n, m in last.named_children() if n in ("block_sparse_moe", "mlp", "mixer"))


def outputs_and_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
    outputs.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": outputs.logits.detach()} | grads
