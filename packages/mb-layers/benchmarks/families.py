"""Every MoE family of transformers that can be built tiny: our experts and blocks against eager.

    python packages/mb-layers/benchmarks/families.py            # all, a table in Markdown
    python packages/mb-layers/benchmarks/families.py olmoe dbrx

For each causal language model whose experts are stacked, a random two-layer model in fp32:

- logits, gradients: largest difference of `mb_layers.transformers.use` from transformers' eager;
- path: "fused", or "steps" where the fused op cannot compute the experts;
- generation: whether four tokens generated with a cache are eager's, after `use` (and after
  `swap_blocks`, where it knows the block);
- swap: largest difference of the logits after `swap_blocks` from eager; "-": a block unknown to it;
- round trip: whether swap, save_pretrained, from_pretrained and swap, restore_blocks give the
  weights bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import mb_layers.transformers as mb
import torch
import transformers
from mb_layers.transformers import experts
from mb_layers.transformers.block_routing import BLOCKS
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# What a config may call its sizes; each is set where the config has it.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "unpadded_vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 16, "shared_intermediate_size": 32, "intermediate_size_mlp": 32,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "first_k_dense_replace": 0, "num_dense_layers": 0,
    "moe_layer_start_index": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 64,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_n_groups": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "interleave_moe_layer_step": 1, "d_model": 32, "n_heads": 2,
    "router_jitter_noise": 0.0, "router_aux_loss_coef": 0.0, "sliding_window": 32,
    "moe_shared_expert_intermediate_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": 16,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "topk_method": "greedy"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "beam": {"num_hidden_layers": 4},
    "flint": {"num_hidden_layers": 4},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "cohere2_moe": {"shared_expert_combination_strategy": "sum"},
    "nemotron_h": {"layers_block_type": ["attention", "moe"], "mlp_hidden_act": "relu2"},
}
# One with a gate of its own, and those whose routers no test of swap_blocks has.
SMOKE = ["olmoe", "gpt_oss", "lfm2_moe", "cohere2_moe", "laguna"]


def build(kind: str) -> nn.Module:
    """A tiny random model of the family, in fp32 and on transformers' eager experts."""
    default = transformers.AutoConfig.for_model(kind)
    names = {name for name in SIZES if getattr(default, name, None) is not None}
    config = transformers.AutoConfig.for_model(
        kind, **({name: SIZES[name] for name in names} | OWN.get(kind, {}))
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):  # its size before its memory
        parameters = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    if parameters > 5_000_000:
        raise ValueError(f"{parameters:,} parameters with these sizes")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                tensor.zero_()
            if tensor.is_floating_point() and not tensor.any():  # zero at first: make it matter
                tensor.normal_(std=0.1)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients on fixed tokens."""
    tokens = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 7].sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def generate(model: nn.Module) -> list[list[int]] | None:
    """Tokens that a cache helped to generate; None if the model has no attention to cache."""
    tokens = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(6))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": True}
    try:
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).tolist()
    except ValueError as error:
        if "get_seq_length" in str(error):
            return None
        raise


def relative(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Largest difference over the largest value, or over `least` if that is larger."""
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=least)).item()


def round_trip(model: nn.Module) -> bool:
    """Whether the weights survive both ways back, bit for bit."""
    swapped = copy.deepcopy(model)
    mb.swap_blocks(swapped)
    with tempfile.TemporaryDirectory() as folder:
        swapped.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).state_dict()
    mb.restore_blocks(swapped)
    return all(
        torch.equal(loaded[name], tensor) and torch.equal(swapped.state_dict()[name], tensor)
        for name, tensor in model.state_dict().items()
    )


def measure(kind: str) -> dict[str, Any]:
    """One row of the table."""
    model = build(kind).eval()
    logits, grads = run(model)
    ours = copy.deepcopy(model)
    paths = []
    fused = experts.fused_activation
    experts.fused_activation = lambda module: paths.append(fused(module)) or paths[-1]
    try:
        moved = mb.use(ours)
        our_logits, our_grads = run(ours)
    finally:
        experts.fused_activation = fused
    # A gradient that is zero but for rounding is compared with what the others are.
    least = 1e-3 * max(grad.abs().max().item() for grad in grads.values())
    row: dict[str, Any] = {
        "family": kind,
        "experts": len(moved),
        "logits": relative(our_logits, logits),
        "gradients": max(relative(our_grads[name], grad, least) for name, grad in grads.items()),
        "path": "steps" if None in paths else "fused",
    }
    generated = generate(model)
    row["generation"] = None if generated is None else generate(ours) == generated
    if any(type(m).__name__ in BLOCKS for m in model.modules()):
        swapped = copy.deepcopy(model)
        mb.swap_blocks(swapped)
        row["swap"] = relative(run(swapped)[0], logits)
        if generated is not None:
            row["generation"] &= generate(swapped) == generated
        row["round trip"] = round_trip(model)
    return row


def families() -> list[str]:
    """Causal language models of transformers whose source has experts to move."""
    root = Path(transformers.__file__).parent / "models"
    known = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for file in root.glob(f"{kind.replace('-', '_').removesuffix('_text')}/modeling_*.py"):
            text = file.read_text()
            if "use_experts_implementation" in text or kind in ("llama4_text", "dbrx"):
                known.append(kind)
    return sorted(set(known) | {"longcat_flash"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="which; all by default")
    parser.add_argument("--smoke", action="store_true", help="a family of each kind, for the tests")
    chosen = parser.parse_args()
    names = SMOKE if chosen.smoke else chosen.families or families()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows, failed = [], {}
    print("| family | logits | gradients | path | generation | swap | round trip |")
    print("|---|---|---|---|---|---|---|")
    for kind in names:
        try:
            row = measure(kind)
        except Exception as error:  # another library's models: say which cannot be built, go on
            failed[kind] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            continue
        rows.append(row)
        swap = f"{row['swap']:.1e}" if "swap" in row else "-"
        trip = {True: "exact", False: "differs", None: "-"}[row.get("round trip")]
        same = {True: "same", False: "differs", None: "-"}[row["generation"]]
        print(
            f"| {kind} | {row['logits']:.1e} | {row['gradients']:.1e} | {row['path']} | "
            f"{same} | {swap} | {trip} |",
            flush=True,
        )
    for kind, why in failed.items():
        print(f"not measured: {kind}: {why}")
    print(json.dumps({"transformers": transformers.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
