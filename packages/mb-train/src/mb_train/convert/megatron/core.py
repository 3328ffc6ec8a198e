"""Models of Megatron Core: names and shapes, and the ranks of its format torch.

    mp_rank_TT[_PPP][_EEE]    tensor, pipeline and expert ranks, the latter where there are several

Norms are tensors of their own (local layers) or of the map behind them (Transformer Engine's). The
experts of a layer are modules (`local_experts.K`), the numbered weights of one (`weightK`), or two
tensors (`weight1`, `weight2`). Rows of linear_qkv are [groups][q heads, k, v][head size], with
gates behind the q heads, as ours are; those of a gated linear_fc1 are gate over up, in each rank.
Maps of latent attention have our rows too, but for the rotated ones (`rotated_rows`); those down to
a latent are on each rank, or, in local layers, a share of their rows. Layers with a state have one
map, in_proj, in whose rows queries, keys, values, z, beta and alpha of a rank's heads follow each
other, and a convolution of the first three; ours are by key head. Those of Mamba-2 are a `mixer`,
with z, x, B, C and dt, and a convolution of x, B and C; ours are by head and by group. Modules for
further tokens are mtp.layers.K on the last stage.

Letters: E experts of a rank, D hidden, F expert ffn width in a rank, P 2 with a gate, else 1.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from mb_layers.on_demand import Picked
from mb_layers.state_dicts import Rule, Translation
from torch import Tensor

from mb_train.config import TrainConfig, whole
from mb_train.convert.grouped_rows import by_group
from mb_train.convert.megatron.core_arguments import config_of
from mb_train.convert.megatron.layout import Layout
from mb_train.convert.megatron.safe_pickle import Opaque
from mb_train.convert.new_run import shapes_of
from mb_train.convert.rotated_rows import in_halves
from mb_train.models.config import MambaSizes

# Names of the several kinds of layers, and the one of each tensor here.
_NAMES = (
    (r"^decoder\.", ""),
    (r"^final_norm\.", "final_layernorm."),
    (r"^(mtp\.layers\.\d+\.)(transformer_layer|mtp_model_layer)\.", r"\1"),
    (r"^(mtp\.layers\.\d+\.|)(layers\.\d+)\.norm\.", r"\1\2.input_layernorm."),
    (
        r"(?:self_attention|mixer)\.(?:linear_qkv|in_proj)\.layer_norm_(weight|bias)$",
        r"input_layernorm.\1",
    ),
    (r"(self_attention|mixer)\.out_proj\.", r"\1.linear_proj."),
    (r"mixer\.conv1d_", "mixer.conv1d."),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"self_attention\.linear_(kv|q)_up_proj\.layer_norm_", r"self_attention.\1_layernorm."),
    (r"mlp\.experts\.local_experts\.", "mlp.experts."),
    (r"mlp\.experts\.(linear_fc\d\.(?:weight|bias))(\d+)$", r"mlp.experts.\2.\1"),
)
_JOINED = (
    (r"(word_embeddings|output_layer)\.weight", 0),
    (r"linear_(qkv|gate|up)\.(weight|bias)", 0),
    (r"linear_(q|q_up|kv_up|q_down|kv_down)_proj\.weight", 0),
    (r"linear_(proj|fc2)\.weight", 1),
    (r"eh_proj\.weight", 0),
    (r"core_attention\.softmax_offset", 0),
    (r"(in_proj|conv1d)\.(weight|bias)\.\w+", 0),
    (r"(self_attention|mixer)\.(A_log|dt_bias|D)", 0),
    (r"mixer\.norm\.weight", 0),
)
# Ours, and what it is there; then those of a layer.
_TOP = {
    "embedding.tokens": "embedding.word_embeddings", "stack.norm": "final_layernorm",
    "embedding.positions": "embedding.position_embeddings", "head": "output_layer",
}  # fmt: skip
_LAYER = {
    "norm_1": "input_layernorm", "norm_2": "pre_mlp_layernorm",
    "attention": "self_attention.core_attention", "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "attention.norm_q": "self_attention.q_layernorm",
    "attention.norm_k": "self_attention.k_layernorm",
    "attention.q": "self_attention.linear_q_proj",
    "attention.q_down": "self_attention.linear_q_down_proj",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.q_up": "self_attention.linear_q_up_proj",
    "attention.kv_down": "self_attention.linear_kv_down_proj",
    "attention.kv_norm": "self_attention.kv_layernorm",
    "attention.kv_up": "self_attention.linear_kv_up_proj",
    "attention.qkvz": "self_attention.in_proj", "attention.ba": "self_attention.in_proj",
    "attention.conv": "self_attention.conv1d", "attention.gates": "self_attention",
    "attention.norm": "self_attention.out_norm",
    "mlp.gate": "mlp.linear_gate", "mlp.up": "mlp.linear_up", "mlp.down": "mlp.linear_fc2",
    "mlp.router": "mlp.router", "mlp.experts": "mlp.experts.{}",
    "mlp.shared_expert": "mlp.shared_experts",
    "mlp.latent_down": "mlp.fc1_latent_proj", "mlp.latent_up": "mlp.fc2_latent_proj",
}  # fmt: skip
# What is otherwise in a layer of Mamba-2.
_MAMBA = {
    "attention.xz": "mixer.in_proj", "attention.bc": "mixer.in_proj",
    "attention.dt": "mixer.in_proj", "attention.conv": "mixer.conv1d",
    "attention.conv_bc": "mixer.conv1d", "attention.gates": "mixer", "attention.norm": "mixer.norm",
    "attention.out": "mixer.linear_proj",
}  # fmt: skip
# Of a module for further tokens, besides its layer.
_BEHIND = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "stack.norm": "final_layernorm",
}  # fmt: skip
# Of these the last rows are rotated: of each head's, or the one key that all heads share.
_ROTATED = {"attention.q": True, "attention.q_up": True, "attention.kv_down": False}
# What these have for each head, or group of heads, of tensors that hold it kind by kind, in this
# order: of key heads; of heads and of groups of Mamba-2.
_OF_HEADS = {
    "attention.qkvz": ("query", "key", "value", "z"), "attention.ba": ("beta", "alpha"),
    "attention.conv": ("query", "key", "value"),
}  # fmt: skip
_OF_MAMBA_HEADS = {"attention.xz": ("x", "z"), "attention.dt": ("dt",), "attention.conv": ("x",)}
_OF_MAMBA_GROUPS = {"attention.bc": ("B", "C"), "attention.conv_bc": ("B", "C")}
_CONVOLVED = ("query", "key", "value", "x", "B", "C")
_BY_THEMSELVES = {
    "balancing_bias": "expert_bias", "gate": "gate_weight", "sinks": "softmax_offset",
}  # fmt: skip


def _sizes(args: Namespace) -> tuple[int, int, int]:
    tensor, experts = args.tensor_model_parallel_size, _expert_ranks(args)
    of_experts = getattr(args, "expert_tensor_parallel_size", None) or tensor
    if getattr(args, "num_experts", None) and of_experts != tensor:
        raise ValueError(
            f"Expected --expert-tensor-parallel-size to be --tensor-model-parallel-size, {tensor}, "
            f"got {of_experts}. Write the checkpoint with equal ones."
        )
    return tensor, experts, args.pipeline_model_parallel_size


def _expert_ranks(args: Namespace) -> int:
    return getattr(args, "expert_model_parallel_size", None) or 1


def _rank(numbers: Sequence[int], args: Namespace) -> tuple[int, int, int]:
    tensor, *rest = numbers
    stage = rest.pop(0) if args.pipeline_model_parallel_size > 1 and rest else 0
    return tensor, rest[0] if rest else 0, stage


def _flat(model: Any, args: Namespace, rank: int) -> dict[str, Tensor]:
    """Tensors by names that all kinds of layers have, experts by their numbers in the model."""
    found: dict[str, Tensor] = {}
    experts = (getattr(args, "num_experts", None) or 0) // _expert_ranks(args)
    for name, tensor in _one_by_one(model, experts):
        name = re.sub(
            r"(?<=mlp\.experts\.)\d+",
            lambda k: str(int(k[0]) + rank * experts),
            common_name(name),
            count=1,
        )
        parts = _parts(name, tensor, args)
        if twice := found.keys() & parts.keys():
            raise ValueError(f"Expected one tensor {min(twice)} of a layer's kinds, got two.")
        found |= parts
    return found


def _parts(name: str, tensor: Tensor, args: Namespace) -> dict[str, Tensor]:
    """What a rank's tensor of a common name holds, by the names that a distributed checkpoint has.

    There those of a layer with a state are tensors of their own.
    """
    match = re.search(r"\.(in_proj|conv1d)\.(?:weight|bias)$", name)
    if match is None:
        names = names_within(name, args)
        return dict(zip(names, tensor.chunk(len(names)), strict=True))
    rows = _rows_of_mamba(args) if ".mixer." in name else _rows_of_states(args)
    if match[1] == "conv1d":
        rows = {kind: count for kind, count in rows.items() if kind in _CONVOLVED}
    sizes = [count // args.tensor_model_parallel_size for count in rows.values()]
    split = zip(rows, tensor.split(sizes), strict=True)
    return {f"{name}.{part}": own for part, own in split}


def _rows_of_states(args: Namespace) -> dict[str, int]:
    """How many rows of each kind the map of a layer with a state has."""
    heads, keys = args.linear_num_value_heads, args.linear_num_key_heads * args.linear_key_head_dim
    values = heads * args.linear_value_head_dim
    kinds = {"query": keys, "key": keys, "value": values}
    return kinds | {"z": values, "beta": heads, "alpha": heads}


def _rows_of_mamba(args: Namespace) -> dict[str, int]:
    """The same of a layer of Mamba-2."""
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    wide, common = heads * args.mamba_head_dim, args.mamba_num_groups * args.mamba_state_dim
    return {"z": wide, "x": wide, "B": common, "C": common, "dt": heads}


def common_name(name: str) -> str:
    """The name that a tensor has whatever kind its layer is of."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def names_within(name: str, args: Namespace) -> list[str]:
    """What a tensor of a common name holds, one above the other.

    Of a linear_fc1 that is a gate, if the model has gates, and what it gates.
    """
    if ".linear_fc1." not in name:
        return [name]
    gated = getattr(args, "swiglu", False) or getattr(args, "quick_geglu", False)
    parts = ("gate", "up") if gated else ("up",)
    return [name.replace("linear_fc1", f"linear_{part}") for part in parts]


def _one_by_one(model: Mapping[str, Any], experts: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rank, of two with all experts each expert's own."""
    for name, tensor in model.items():
        if name.endswith("_extra_state"):  # of FP8
            continue
        if not isinstance(tensor, Tensor):
            foreign = "an object of another library, as Transformer Engine's fp8 weights are"
            found = foreign if isinstance(tensor, Opaque) else f"a {type(tensor).__name__}"
            raise ValueError(
                f"Expected {name} to be a tensor of torch's, got {found}. Save the model's weights "
                "in bf16 or fp32."
            )
        match = re.fullmatch(r"(.+\.mlp\.experts\.)weight([12])", name)
        if match is None:
            yield name, tensor
            continue
        # weight1 has the shape [D, E P F] and is used as if it were [E, D, P F].
        hidden = tensor.shape[int(match[2]) - 1]
        shape = (experts, hidden, -1) if match[2] == "1" else (experts, -1, hidden)
        for expert, w in enumerate(tensor.reshape(shape)):
            yield f"{match[1]}{expert}.linear_fc{match[2]}.weight", w.t()


def _renamed(
    wholes: Sequence[Mapping[str, Tensor]], config: TrainConfig, vocab_size: int
) -> Mapping[str, Tensor]:
    source = Picked({name: (whole, name) for whole in wholes for name in whole})
    names = shapes_of(config, vocab_size)
    # As they lie there: a shard of a distributed checkpoint may hold those of all layers.
    place = {name: number for number, name in enumerate(source)}
    rules = [_rule(name, config, source) for name in names]
    rules.sort(key=lambda rule: place.get(rule.sources[0], 0))
    return Translation(source, rules, names)


def _rule(ours: str, config: TrainConfig, source: Collection[str]) -> Rule:
    prefix, module, kind = _place(ours, config)
    if module in _ROTATED:
        groups = whole(config.num_attention_heads) if _ROTATED[module] else 1
        rotated = config.qk_pos_emb_head_dim
        return Rule(ours, (f"{prefix}.{kind}",), lambda rows: in_halves(rows, groups, rotated))
    for parts, groups in _groups_of_rows(config, of_mamba=".mixer." in prefix):
        if module in parts:
            sources = tuple(f"{prefix}.{kind}.{part}" for part in parts[module])
            # Those of a convolution's weight are [rows, 1, taps].
            return Rule(ours, sources, lambda *rows, n=groups: _flat_rows(by_group(rows, n)))
    if kind not in ("w1", "w2", "b1", "b2"):
        return Rule(ours, (f"{prefix}.{_BY_THEMSELVES.get(kind, kind)}",))
    ups = ("gate", "up") if config.is_glu else ("up",)
    parts = [f"linear_{part}" for part in ups] if kind.endswith("1") else ["linear_fc2"]
    experts = range(whole(config.moe_num_experts)) if "{}" in prefix else range(1)
    theirs = "weight" if kind.startswith("w") else "bias"
    together = f"{prefix.replace('.{}', '')}.linear_fc{kind[1]}.{theirs}"
    if "{}" in prefix and together in source:  # of a distributed checkpoint, and laid out as ours
        return Rule(ours, (together,))
    sources = [f"{prefix.format(expert)}.{part}.{theirs}" for expert in experts for part in parts]
    return Rule(ours, tuple(sources), lambda *t: _stacked(t, len(parts)))


def _groups_of_rows(
    config: TrainConfig, *, of_mamba: bool
) -> list[tuple[Mapping[str, tuple[str, ...]], int]]:
    """What modules have for each group of heads, and how many groups there are."""
    if not of_mamba:
        return [(_OF_HEADS, config.linear_num_key_heads)]
    assert config.mamba_sizes is not None
    sizes = MambaSizes._make(config.mamba_sizes)
    return [(_OF_MAMBA_HEADS, sizes.heads), (_OF_MAMBA_GROUPS, sizes.groups)]


def _flat_rows(rows: Tensor) -> Tensor:
    return rows if rows.ndim == 1 else rows.flatten(1)


def _place(ours: str, config: TrainConfig) -> tuple[str, str, str]:
    """Of a tensor its module's name there, the module's name here within a layer, what it is."""
    behind = re.fullmatch(r"mtp\.(\d+)\.(.+)", ours)
    within = "layers" if behind is None else f"mtp.layers.{behind[1]}"
    name = ours if behind is None else behind[2]
    layer = re.fullmatch(r"stack\.blocks\.(\d+)\.(.+)", name)
    module, _, kind = (name if layer is None else layer[2]).rpartition(".")
    if layer is None:
        return (_TOP[module] if behind is None else f"{within}.{_BEHIND[module]}"), module, kind
    pattern, place = config.hybrid_layer_pattern or "", f".{layer[1]}"
    if behind is not None:  # a module has one layer, or those of a pattern
        place = f".layers{place}" if pattern else ""
        pattern = config.mtp_pattern or ""
    names = _LAYER | _MAMBA if pattern[int(layer[1]) :].startswith("M") else _LAYER
    return f"{within}{place}.{names[module]}", module, kind


def _stacked(tensors: Sequence[Tensor], parts: int) -> Tensor:
    """Of each expert `parts` tensors [F, ...], one above the other: [E, P F, ...]."""
    return torch.stack(tuple(tensors)).unflatten(0, (-1, parts)).flatten(1, 2)


LAYOUT = Layout(
    kind="expert", parts=("decoder.", "embedding."), sizes=_sizes, rank=_rank, flat=_flat,
    joined=_JOINED, or_whole=r"linear_(q|kv)_down_proj\.weight", own=r"\.mlp\.experts\.",
    kept=".mlp.experts.", head="output_layer.weight", config=config_of, renamed=_renamed,
)  # fmt: skip
