"""Models of Megatron-LM of 2023 and of its MegaBlocks fork: names, shapes and arguments.

    mp_rank_TT, mp_rank_TT_PPP             tensor and pipeline ranks
    mp_rank_TT_DDD, mp_rank_TT_DDD_PPP     with expert parallelism: a data-parallel rank's experts

Rows of the fused projection are [heads][q, k, v][head size], as ours are. In checkpoints of version
0 a tensor rank has [q, k, v][heads][head size], in those of version 1 [heads][head size][q, k, v].
Of tensor-parallel ranks each has the experts whole.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mb_layers.compat import from_megablocks
from mb_layers.on_demand import Changed, Picked
from mb_layers.state_dicts import Rule, Translation
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert.megatron.layout import Layout
from mb_train.convert.new_run import imported_config
from mb_train.tasks.architecture import transformer_config

_EXPERTS = ".mlp.moe."
# What a data-parallel rank alone has; the router and the layer's bias are held by all.
_OWN = r"\.mlp\.moe\.(.+\.)?(w1|v1|w2)$"
# Arguments that make another model of the same tensors, or of other ones.
_REFUSED = {
    "moe_use_megatron_switch": "whose experts are not MegaBlocks'",
    "uniform_expert_assignment": "whose router is not asked",
    "num_experts": "whose experts are not MegaBlocks'",
    "group_query_attention": "which the fork has not",
    "swiglu": "whose gates are cut by tensor-parallel ranks",
    "squared_relu": "which the fork has not",
    "use_rotary_position_embeddings": "whose queries and keys turn",
    "apply_layernorm_1p": "whose norms multiply by 1 more than their weights",
    "untie_embeddings_and_output_weights": "whose head is its own",
}
_FUSED = r"query_key_value\.(weight|bias)"
# Versions of checkpoints with other rows of it, which `reordered` knows.
OLDER = (0, 1)
# How the shares of tensor-parallel ranks join: rows (0) or columns (1); all else is held by all.
_JOINED = (
    (r"word_embeddings(_for_head)?\.weight", 0),
    (_FUSED, 0),
    (r"dense_h_to_4h\.(weight|bias)", 0),
    (r"(attention|mlp)\.(dense|dense_4h_to_h)\.weight", 1),
)
_LAYER = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attention.qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense",
}  # fmt: skip
# What of a nested name only says where a layer is.
_CONTAINERS = ("language_model", "encoder", "transformer")
_MLP = {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}


def _is_expert_parallel(args: Namespace) -> bool:
    return bool(getattr(args, "moe_expert_model_parallelism", False))


def _sizes(args: Namespace) -> tuple[int, int, int]:
    return (
        args.tensor_model_parallel_size,
        args.data_parallel_size if _is_expert_parallel(args) else 1,
        args.pipeline_model_parallel_size,
    )


def _rank(numbers: Sequence[int], args: Namespace) -> tuple[int, int, int]:
    tensor, *rest = numbers
    data = rest.pop(0) if _is_expert_parallel(args) and rest else 0
    return tensor, data, rest[0] if rest else 0


def _fields(args: Namespace) -> dict[str, Any]:
    for name, meaning in _REFUSED.items():
        if getattr(args, name, False):
            raise ValueError(f"Expected a model without --{name.replace('_', '-')}, {meaning}.")
    positions = getattr(args, "position_embedding_type", "learned_absolute")
    if positions not in ("learned_absolute", "absolute"):
        raise ValueError(f"Expected a model with learned positions, got {positions}.")
    experts = getattr(args, "moe_num_experts", None)
    capacity = float(getattr(args, "moe_capacity_factor", None) or 0)
    gated = bool(getattr(args, "glu", False)) or getattr(args, "mlp_type", None) == "glu"
    if gated and (experts is None or capacity):
        raise ValueError(
            "Expected a model without --glu, which dense layers and experts with a capacity ignore."
        )
    # MegaBlocks takes whatever of its own settings the arguments have, though the fork has no flag.
    norm = getattr(args, "moe_normalize_expert_weights", None) if experts is not None else None
    tanh = getattr(args, "bias_gelu_fusion", True) or getattr(args, "openai_gelu", False)
    # MegaBlocks' experts have the tanh form whatever the dense layers are told.
    plain = "gelu_tanh" if experts is not None or tanh else "gelu"
    return {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "kv_channels": args.kv_channels,
        "ffn_hidden_size": args.ffn_hidden_size,
        "max_position_embeddings": args.max_position_embeddings,
        "layernorm_epsilon": args.layernorm_epsilon,
        "activation": "geglu_tanh" if gated else plain,
        "attention_dropout": args.attention_dropout,
        "hidden_dropout": args.hidden_dropout,
        "apply_residual_connection_post_layernorm": getattr(
            args, "apply_residual_connection_post_layernorm", False
        ),
        "moe_num_experts": experts,
        "moe_top_k": getattr(args, "moe_top_k", None) or 1,
        "moe_capacity_factor": capacity,
        "moe_loss_weight": getattr(args, "moe_loss_weight", None) or 0.0,
        "moe_jitter_eps": getattr(args, "moe_jitter_eps", None) or 0.0,
        "moe_output_bias": experts is not None,
        **({"moe_renormalize": True, "moe_renormalize_p": float(norm)} if norm else {}),
    }


def _config(args: Namespace, _: Collection[str], tokenizer: str) -> TrainConfig:
    return imported_config(_fields(args), args.padded_vocab_size, tokenizer=tokenizer)


def _flat(model: Any, _: Namespace, __: int) -> dict[str, Tensor]:
    """Nested dicts as dotted names, without the parts that only say where a layer is."""
    if not isinstance(model, dict) or "language_model" not in model:
        raise ValueError(
            "Expected a GPT in every rank, a language_model or Megatron Core's decoder, found none."
        )
    found: dict[str, Tensor] = {}

    def walk(value: Any, prefix: str) -> None:
        for key, item in value.items():
            if isinstance(item, Tensor):
                name = f"{prefix}{key}".replace(".attention.", ".self_attention.")
                if name in found:
                    raise ValueError(f"Expected one tensor {name} of a rank's layers, got two.")
                found[name] = item
            elif isinstance(item, dict):
                walk(item, prefix if key in _CONTAINERS else f"{prefix}{key}.")

    walk(model, "")
    return {name: t for name, t in found.items() if not name.endswith("_extra_state")}


def reordered(whole: Mapping[str, Tensor], args: Namespace, version: float) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint of an older version with today's rows of fused projections."""
    ranks, heads, size = args.tensor_model_parallel_size, args.num_attention_heads, args.kv_channels
    rows, q_k_v = ((ranks, 3, -1, size), 1) if version == 0 else ((1, heads, size, 3), 3)

    def today(name: str, tensor: Tensor) -> Tensor:
        if not re.search(_FUSED + "$", name):
            return tensor
        return tensor.unflatten(0, rows).movedim(q_k_v, 2).flatten(0, 3)

    return Changed(whole, today)


def _renamed(
    wholes: Sequence[Mapping[str, Tensor]], config: TrainConfig, vocab_size: int
) -> Mapping[str, Tensor]:
    built = transformer_config(config, vocab_size)
    rules = [
        Rule("embedding.tokens.weight", ("embedding.word_embeddings.weight",)),
        Rule("embedding.positions.weight", ("embedding.position_embeddings.weight",)),
    ]
    names = {"stack.norm": "final_layernorm"}
    experts: dict[str, Tensor] = {}
    for layer in range(built.num_layers):
        of_layer = _LAYER if built.moe is not None else _LAYER | _MLP
        names |= {f"stack.blocks.{layer}.{o}": f"layers.{layer}.{t}" for o, t in of_layer.items()}
        if built.moe is not None:
            prefix = f"layers.{layer}{_EXPERTS}"
            for name, tensor in from_megablocks(wholes, built.moe, prefix=prefix).items():
                experts[f"stack.blocks.{layer}.mlp.{name}"] = tensor
    rules += [
        Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",))
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    ]
    source = Picked({name: (wholes[0], name) for name in wholes[0] if _EXPERTS not in name})
    plain = Translation(source, rules, [rule.target for rule in rules])
    return Picked({name: (some, name) for some in (plain, experts) for name in some})


LAYOUT = Layout(
    kind="data", parts=("language_model",), sizes=_sizes, rank=_rank, flat=_flat, joined=_JOINED,
    own=_OWN, kept=_EXPERTS, head="word_embeddings_for_head.weight", config=_config,
    renamed=_renamed,
)  # fmt: skip
