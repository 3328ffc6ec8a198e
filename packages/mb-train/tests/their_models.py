"""Random models of Hugging Face's, for tests of the conversion, and ours from their folders."""

import os

import pytest
import torch
from mb_train.convert import read_model
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 77, "max_position_embeddings": 24,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "initializer_range": 0.2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 6, "num_hidden_layers": 3, "n_shared_experts": 2,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16}  # of which 8 channels are turned
GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 5,
    "num_hidden_layers": 3, "initializer_range": 0.2, "swiglu_limit": 0.7, "hidden_size": 64,
}  # fmt: skip
HUNYUAN = {
    **EXPERTS, "moe_intermediate_size": 16, "num_shared_experts": 2, "head_dim": 16,
    "initializer_range": 0.2, "num_hidden_layers": 3,
}  # fmt: skip
MINIMAX = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8,
    "initializer_range": 0.2,
}  # fmt: skip
MINIMAX_M3 = {
    **MINIMAX, "num_hidden_layers": 3, "dense_intermediate_size": 40, "swiglu_limit": 0.7,
    "shared_intermediate_size": 24, "partial_rotary_factor": 0.5,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
# Its padding would be a token whose vector is zero and has no gradient.
ERNIE = {
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "initializer_range": 0.2, "pad_token_id": None,
}  # fmt: skip
# Layers 0, 1 and 3 have windows and positions, layer 2 neither; layer 0 is dense.
EXAONE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "sliding_window": 5,
    "num_hidden_layers": 4, "num_shared_experts": 2, "initializer_range": 0.2,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
}  # fmt: skip
# Layers 0, 1 and 3 have a state, of three value heads for each key head.
QWEN_NEXT = {
    **EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "head_dim": 16,
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 10, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
    "initializer_range": 0.1, "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4,
    "logits_scaling": 6.0, "pad_token_id": None,
}  # fmt: skip
# Speeds for all three cases: 8192 tokens are many turns, a few, and less than one.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 2e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# Of four turned pairs one is not slowed, one by some, and two by the whole factor.
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Queries do not grow within 32 tokens.
MISTRAL4 = {
    **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GRANITE_HYBRID = {
    **GRANITE, "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 3,
    "shared_intermediate_size": 24, "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8, "mamba_d_state": 10, "mamba_d_conv": 3,
}  # fmt: skip
# Layers 1 and 2 have windows, layer 2 has no positions.
SWA = {
    "num_hidden_layers": 4, "sliding_window": 5, "layer_rope_theta": [300.0, 300.0, 0.0, 300.0],
    "layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
}  # fmt: skip
# Layer 1 attends.
LFM2 = {
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
    "initializer_range": 0.1, "pad_token_id": None,
}  # fmt: skip
NEMOTRON_H = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "head_dim": 10,
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 10,
    "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24,
    "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "pad_token_id": None,
}  # fmt: skip
DBRX = {
    "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 24, "pad_token_id": None,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 300.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 5, "moe_top_k": 3},
    "initializer_range": 0.2,
}  # fmt: skip
# Of four turned pairs one is not slowed; alike in texts of any length.
LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.3, 2.0, 4.0],
    "long_factor": [1.0, 1.3, 2.0, 4.0], "short_mscale": 1.25, "long_mscale": 1.25,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Layers 1 and 3 have experts, layer 3 has no positions. Of 19 tokens queries do not grow.
LLAMA4 = {
    "head_dim": 12, "intermediate_size": 16, "intermediate_size_mlp": 40, "num_hidden_layers": 4,
    "num_local_experts": 5, "interleave_moe_layer_step": 2, "attention_chunk_size": 19,
    "floor_scale": 20, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
# Class, and its settings beside those of SIZES, by model type.
ALL = {
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 24, "n_inner": 80}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "dbrx": ("Dbrx", DBRX),
    "llama4_text": ("Llama4", LLAMA4),
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 12,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {**LONG},
            "initializer_range": 0.2,
        },
    ),
    "olmoe": ("Olmoe", EXPERTS),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**DEEPSEEK, "num_hidden_layers": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, **LATENT}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, **LATENT, "n_group": 4, "topk_group": 2}),
    "mistral4": (
        "Mistral4",
        {
            **DEEPSEEK,
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**MISTRAL4},
        },
    ),
    "dots1": (
        "Dots1",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "sliding_window": None},
    ),
    "solar_open": (
        "SolarOpen",
        {**DEEPSEEK, "first_k_dense_replace": 0, "head_dim": 16, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**DEEPSEEK, **LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v32": (
        "DeepseekV32",
        {**DEEPSEEK, **LATENT, **INDEXER, "n_group": 4, "topk_group": 2},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**DEEPSEEK, **LATENT, **INDEXER, "indexer_types": ["full", "shared", "full"]},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16, "pad_token_id": None}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "pad_token_id": None},
    ),
    "hy_v3": ("HYV3", HUNYUAN),
    "minimax_m2": ("MiniMaxM2", MINIMAX),
    "minimax_m3_vl_text": ("MiniMaxM3VL", MINIMAX_M3),
    "phi3": ("Phi3", {"pad_token_id": None}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "pad_token_id": None}),
    "ernie4_5_moe": ("Ernie4_5_Moe", ERNIE),
    "glm4": ("Glm4", {"head_dim": 12, "pad_token_id": None}),
    "olmo2": ("Olmo2", {"head_dim": 12, "pad_token_id": None}),
    "olmo3": (
        "Olmo3",
        {"head_dim": 12, "sliding_window": 5, "num_hidden_layers": 5, "pad_token_id": None},
    ),
    "mellum": (
        "Mellum",
        {
            **EXPERTS,
            "moe_intermediate_size": 16,
            "head_dim": 16,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
            "initializer_range": 0.2,
        },
    ),
    "flex_olmo": ("FlexOlmo", {**EXPERTS, "initializer_range": 0.2, "pad_token_id": None}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 3, "pad_token_id": None},
    ),
    "exaone_moe": ("ExaoneMoe", {**EXAONE, "n_group": 2, "topk_group": 1, "pad_token_id": None}),
    "afmoe": ("Afmoe", {**EXAONE, "route_scale": 2.5, "head_dim": 12}),
    "granite": ("Granite", GRANITE),
    "granitemoe": ("GraniteMoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            **GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
        },
    ),
    "granitemoehybrid": ("GraniteMoeHybrid", GRANITE_HYBRID),
    "granite_swa": ("GraniteSWA", {**GRANITE, **SWA}),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {
            **GRANITE,
            **SWA,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
        },
    ),
    "flint": (
        "Flint",
        {
            **EXPERTS,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "initializer_range": 0.2,
        },
    ),
    "nemotron_h": ("NemotronH", NEMOTRON_H),
    "lfm2": ("Lfm2", {**LFM2, "block_multiple_of": 8}),
    "lfm2_moe": (
        "Lfm2Moe",
        {**LFM2, **EXPERTS, "moe_intermediate_size": 16, "num_dense_layers": 1},
    ),
    "qwen3_next": ("Qwen3Next", QWEN_NEXT),
    "qwen3_5_moe_text": ("Qwen3_5Moe", QWEN_NEXT),
    # Experts that are asked for more than the clamp allows.
    "gpt_oss": ("GptOss", GPT_OSS),
}
# Of those that are written as another, which that is.
WRITTEN = {
    "dots1": "glm4_moe", "solar_open": "glm4_moe", "glm4_moe_lite": "deepseek_v3",
    "deepseek_v32": "deepseek_v3", "glm_moe_dsa": "deepseek_v3",
    "hy_v3": "glm4_moe", "seed_oss": "qwen2", "ernie4_5": "llama",
    "phi3": "llama", "qwen3_5_moe_text": "qwen3_next",
}  # fmt: skip
DEEP = "[" * 10**5  # more than can be read


def theirs(kind, **also):
    """A random model of theirs, no norm or bias of it one or zero, its router's neither."""
    torch.manual_seed(0)
    name, settings = ALL[kind]
    sizes = {"vocab_size": 77} if kind == "gpt2" else SIZES
    if kind == "nemotron_h":  # whose layers count themselves
        sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    if kind == "dbrx":  # which has names of its own for them
        sizes = {"vocab_size": 77}
    config = transformers.CONFIG_MAPPING[kind](**sizes | settings | also)
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    model = getattr(transformers, name + head)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("router.gate.weight"):  # AFMoE's is zero
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, bias in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias.normal_(std=0.3)
    return model.eval()


def logits_of(model):
    tokens_BS = torch.randint(0, 77, (3, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model.logits(tokens_BS) if isinstance(model, GPT) else model(tokens_BS).logits
    return out


def ours(folder):
    config, weights = read_model(folder)
    model = GPT(transformer_config(config, 77)).eval()
    model.load_state_dict(weights)
    return model
