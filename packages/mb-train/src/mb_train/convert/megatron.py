"""Checkpoints of Megatron-LM (2023) and its MegaBlocks fork: `iter_*/mp_rank_*`.

    mp_rank_TT, mp_rank_TT_PPP             tensor and pipeline ranks
    mp_rank_TT_DDD, mp_rank_TT_DDD_PPP     with expert parallelism: a data-parallel rank's experts

Each holds model_optim_rng.pt, or model_rng.pt beside a distributed optimizer: pickled arguments and
the rank's share of the model. The shares are joined and renamed; the optimizer's are left out. Rows
of the fused projection are [heads][q, k, v][head size], as ours are.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from mb_layers.compat import from_megablocks
from mb_layers.state_dicts import Rule, translate
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert import safe_pickle
from mb_train.convert.architectures import imported_config
from mb_train.convert.hugging_face import check_shapes, refuse_run, shapes_of, write_run
from mb_train.folder.run_folder import LATEST, iteration_folder
from mb_train.tasks.architecture import transformer_config

_GPT2 = "GPT2BPETokenizer"
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
_FILES = ("model_optim_rng.pt", "model_rng.pt")
# What ranks may differ by, relative to a tensor that all of them hold: kernels that add in no fixed
# order round otherwise on each.
_DRIFT = 0.05
# How the shares of tensor-parallel ranks join: rows (0) or columns (1); all else is held by all.
_JOINED = (
    (r"word_embeddings(_for_head)?\.weight", 0),
    (r"query_key_value\.(weight|bias)", 0),
    (r"dense_h_to_4h\.(weight|bias)", 0),
    (r"(attention|mlp)\.(dense|dense_4h_to_h)\.weight", 1),
)
_LAYER = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
    "attention.qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense",
}  # fmt: skip
_MLP = {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}


def is_megatron(folder: Path) -> bool:
    """Whether a folder is such a checkpoint, or a save folder with one."""
    return any(folder.glob("mp_rank_*")) or any(folder.glob("*/mp_rank_*"))


def read_megatron(
    folder: Path, *, tokenizer: str | None = None
) -> tuple[TrainConfig, dict[str, Tensor]]:
    """The configuration and the weights of a GPT, by our names.

    Args:
        folder: iter_XXXXXXX, or the folder that it is in.
        tokenizer: by name or file; None is GPT-2's, if that is what the checkpoint names.

    Raises:
        ValueError: another model, or another tokenizer than GPT-2's and none is given; ranks that
            are missing, a damaged file, tensors left over or missing.
    """
    folder = _iteration(folder)
    try:
        return _read(folder, tokenizer)
    except AttributeError as error:
        raise ValueError(f"The arguments in {folder} lack {error.name}.") from None
    except KeyError as error:
        raise ValueError(f"{folder} lacks {error}, in a rank at least.") from None
    except (TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{folder} has a value that it should not have: {error}.") from None


def _read(folder: Path, tokenizer: str | None) -> tuple[TrainConfig, dict[str, Tensor]]:
    ranks = _read_ranks(folder)
    first = next(iter(ranks.values()))
    args, version = first["args"], first.get("checkpoint_version", 0)
    if version < 2:
        raise ValueError(f"Expected {folder} of checkpoint version 2 or later, got {version}.")
    kind = getattr(args, "tokenizer_type", None) or _GPT2
    if tokenizer is None and kind != _GPT2:
        raise ValueError(
            f"Expected --tokenizer, for {folder} was trained with a {kind}, whose files it does "
            "not hold. Give their name or folder."
        )
    fields = _fields(args)
    try:
        config = imported_config(fields, args.padded_vocab_size, tokenizer=tokenizer or "gpt2")
    except ValueError as error:
        raise ValueError(
            f"The arguments in {folder} are of no model that is known: {error}"
        ) from None
    wholes = _whole_models(ranks, args, folder)
    layers = {name.split(".")[1] for name in wholes[0] if name.startswith("layers.")}
    if len(layers) != args.num_layers:
        raise ValueError(f"Expected {args.num_layers} layers in {folder}, got {len(layers)}.")
    weights = _renamed(wholes, config, args.padded_vocab_size)
    check_shapes(weights, shapes_of(config, args.padded_vocab_size), folder)
    return config, weights


def import_megatron(
    source: Path, target: Path, *, tokenizer: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Make a run folder of such a checkpoint: to evaluate, generate from, or `--finetune`.

    Raises:
        ValueError: as `read_megatron`; a target that holds a run.
    """
    refuse_run(target)
    config, weights = read_megatron(source, tokenizer=tokenizer)
    write_run(target, config, weights, say=say)


def _iteration(folder: Path) -> Path:
    if any(folder.glob("mp_rank_*")):
        return folder
    latest = folder / LATEST
    name = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    found = folder / (iteration_folder(int(name)) if name.isdecimal() else name)
    if not name or not any(found.glob("mp_rank_*")):
        raise ValueError(
            f"Expected {latest} to name a checkpoint, got {name[:40]!r}. Give the folder that the "
            "mp_rank_* are in."
        )
    return found


def _read_ranks(folder: Path) -> dict[tuple[int, int, int], Any]:
    """Contents by (tensor, data, pipeline) rank."""
    contents: dict[tuple[int, int, int], Any] = {}
    first: tuple[Path, Any] | None = None
    for path in sorted(folder.glob("mp_rank_*")):
        if not re.fullmatch(r"mp_rank(_\d+){1,3}", path.name):  # a copy that somebody keeps
            continue
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:  # a data-parallel rank's share of a distributed optimizer
            continue
        content = safe_pickle.load(file)
        args = content.get("args") if isinstance(content, dict) else None
        if not isinstance(args, Namespace):
            raise ValueError(f"Expected {file} to hold Megatron's arguments, found none.")
        tensor, *rest = map(int, path.name.removeprefix("mp_rank_").split("_"))
        experts = bool(getattr(args, "moe_expert_model_parallelism", False))
        data = rest.pop(0) if experts and rest else 0
        contents[tensor, data, rest[0] if rest else 0] = content
        parallel = (
            args.tensor_model_parallel_size,
            args.data_parallel_size if experts else 1,
            args.pipeline_model_parallel_size,
        )
        about = (*parallel, content.get("iteration"))
        first = first or (path, about)
        if about != first[1]:  # left there by another run, or copied from another iteration
            raise ValueError(
                f"Expected all ranks in {folder} to be of one checkpoint, but by {first[0].name} "
                f"(tensor, data, pipeline ranks, iteration) are {first[1]}, by {path.name} {about}."
            )
    if first is None:
        raise ValueError(f"Expected mp_rank_* with {' or '.join(_FILES)} in {folder}, found none.")
    parallel = first[1][:3]
    for tensor in range(parallel[0]):
        for data in range(parallel[1]):
            for stage in range(parallel[2]):
                if (tensor, data, stage) not in contents:
                    raise ValueError(
                        f"Expected tensor, data and pipeline ranks {parallel} in {folder}, but "
                        f"rank {(tensor, data, stage)} is missing."
                    )
    return contents


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


def _whole_models(
    ranks: Mapping[tuple[int, int, int], Any], args: Namespace, folder: Path
) -> list[dict[str, Tensor]]:
    """Flat state dicts, layers by their number in the model: embedding.*, layers.N.*, ...

    The first holds all, further ones what each further data-parallel rank has of the experts.
    """
    tensors, datas, stages = (range(max(rank[i] for rank in ranks) + 1) for i in range(3))
    chunks = args.virtual_pipeline_model_parallel_size or 1
    wholes: list[dict[str, Tensor]] = [{} for _ in datas]
    first_layer = 0
    for chunk, stage in product(range(chunks), stages):
        key = "model" if chunks == 1 else f"model{chunk}"
        numbers: set[str] = set()  # none in a stage that has the embedding alone
        for data, whole in enumerate(wholes):
            shares = [_flat(ranks[tensor, data, stage][key], folder) for tensor in tensors]
            for name, joined in _joined(shares, folder).items():
                numbered = _numbered(name, first_layer)
                if data == 0 or _EXPERTS in name:
                    whole[numbered] = joined
                if data == 0 or re.search(_OWN, name):
                    continue
                of_first = wholes[0].get(numbered)
                if of_first is None or _differ(joined, of_first):
                    raise ValueError(
                        f"Expected data ranks 0 and {data} in {folder} to hold the same "
                        f"{numbered}, got others: they are of no one model."
                    )
            numbers |= {name.split(".")[1] for name in shares[0] if name.startswith("layers.")}
        first_layer += len(numbers)
    whole = wholes[0]
    tied = whole.pop("word_embeddings_for_head.weight", None)
    if tied is not None and not torch.equal(tied, whole["embedding.word_embeddings.weight"]):
        raise ValueError(f"The head of {folder} differs from the embedding it is tied to.")
    return wholes


def _joined(shares: Sequence[Mapping[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """The tensors of a stage, of all its tensor-parallel ranks."""
    for tensor, share in enumerate(shares):
        if differing := share.keys() ^ shares[0].keys():
            raise ValueError(
                f"Expected the same tensors of tensor ranks 0 and {tensor} in {folder}, but "
                f"{min(differing)} is of one of them alone."
            )
    return {name: _join(name, shares, folder) for name in shares[0]}


def _join(name: str, shares: Sequence[Mapping[str, Tensor]], folder: Path) -> Tensor:
    """A tensor of all tensor-parallel ranks; each of them has the experts whole."""
    for pattern, dim in _JOINED:
        if re.search(pattern + "$", name):
            return torch.cat([share[name] for share in shares], dim=dim)
    first = shares[0][name]
    for tensor, share in enumerate(shares[1:], 1):
        if _differ(share[name], first):
            raise ValueError(
                f"Expected tensor ranks 0 and {tensor} in {folder} to hold the same {name}, got "
                "others: they are of no one model. Experts become so under --sequence-parallel."
            )
    return first


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two ranks' copies of a tensor are not of one model."""
    return one.shape != other.shape or bool(
        (one.float() - other.float()).norm() > _DRIFT * other.float().norm()
    )


def _numbered(name: str, first_layer: int) -> str:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"layers.{int(match[1]) + first_layer}.{match[2]}" if match else name


def _flat(model: Any, folder: Path) -> dict[str, Tensor]:
    """Nested dicts as dotted names, without the parts that only say where a layer is."""
    if not isinstance(model, dict) or "language_model" not in model:
        raise ValueError(f"Expected a GPT's language_model in {folder}, found none.")
    found: dict[str, Tensor] = {}

    def walk(value: Any, prefix: str) -> None:
        for key, item in value.items():
            if isinstance(item, Tensor):
                found[f"{prefix}{key}"] = item
            elif isinstance(item, dict):
                walk(item, prefix if key in _CONTAINERS else f"{prefix}{key}.")

    walk(model, "")
    renamed = {name.replace(".attention.", ".self_attention."): t for name, t in found.items()}
    return {name: t for name, t in renamed.items() if not name.endswith("_extra_state")}


_CONTAINERS = ("language_model", "encoder", "transformer")


def _renamed(
    wholes: Sequence[Mapping[str, Tensor]], config: TrainConfig, vocab_size: int
) -> dict[str, Tensor]:
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
    source = {name: tensor for name, tensor in wholes[0].items() if _EXPERTS not in name}
    plain = translate(source, rules, [rule.target for rule in rules])
    return {name: t.float().contiguous() for name, t in (plain | experts).items()}
