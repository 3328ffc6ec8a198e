"""Flags of Megatron's scripts that set a field of another name here, most of them Megatron Core's.

Those about something that is no choice here are in `settled`, those that ask for something that
does not exist here in `refused`. What scripts leave unsaid is in `megatron_defaults`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mb_train.config import TrainConfig, flag_name
from mb_train.flags.refused import refusal
from mb_train.flags.settled import OVERRIDING, SETTLED, settled_note
from mb_train.flags.together import (
    KEPT,
    QUICK_GEGLU,
    ROUTERS_DTYPE,
    TOGETHER,
    done_otherwise,
    number,
    read_together,
)

# Flag -> the field that it sets. The flag is the weight of every layer's loss, the field the weight
# of their mean.
OF_EVERY_LAYER: Mapping[str, str] = {
    "--moe-aux-loss-coeff": "moe_loss_weight",
    "--moe-z-loss-coeff": "moe_z_loss_weight",
}


def _recomputed(modules: Sequence[str]) -> Mapping[str, Any]:
    """--recompute-modules: attention is what selective recompute is of; experts have a switch."""
    experts = {"moe_recompute": True}
    known: dict[str, Mapping[str, Any]] = {"core_attn": {}, "moe": experts, "moe_act": experts}
    known |= {name: {} for name in KEPT}
    found: dict[str, Any] = {}
    for name in modules:
        if name not in known:
            raise ValueError(
                f"Expected --recompute-modules of {', '.join(known)}, got {name!r}. "
                "--recompute-granularity full recomputes whole layers."
            )
        found |= known[name]
    return found


_MOMENTS: Mapping[str, Mapping[str, Any]] = {
    dtype: {"optimizer_state_dtype": dtype} for dtype in ("fp32", "bf16")
}
_BY_SCORE = {"moe_router_type": "topk"}  # also where a run of Sinkhorn's goes on
# Flag -> those of its values that have a meaning here, and the fields that they set.
_VALUES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "--moe-router-load-balancing-type": {
        "aux_loss": {"moe_balance_over": "micro_batch", **_BY_SCORE},
        "seq_aux_loss": {"moe_balance_over": "sequence", **_BY_SCORE},
        "global_aux_loss": {"moe_balance_over": "global_batch", **_BY_SCORE},
        "none": {"moe_loss_weight": 0.0, **_BY_SCORE},
        "sinkhorn": {"moe_router_type": "sinkhorn"},
    },
    "--moe-token-dispatcher-type": {
        "allgather": {"moe_dispatcher": "all_gather"},
        "alltoall": {"moe_dispatcher": "all_to_all"},
        "alltoall_seq": {"moe_dispatcher": "all_to_all"},
        "flex": {"moe_dispatcher": "auto"},
    },
    "--moe-token-drop-policy": {
        "probs": {"moe_drop_policy": "probability"},
        "position": {"moe_drop_policy": "position"},
    },
    ROUTERS_DTYPE: {"fp32": {"moe_router_fp32": True}, "fp64": {"moe_router_fp32": True}},
    "--exp-avg-dtype": _MOMENTS,
    "--exp-avg-sq-dtype": _MOMENTS,
    "--main-params-dtype": {"fp32": {}},
    "--megatron-fsdp-main-params-dtype": {"fp32": {}},
    "--exit-signal": {"SIGTERM": {}},
    "--data-parallel-sharding-strategy": {
        "no_shard": {},
        "optim": {"zero_stage": 1},
        "optim_grads": {"zero_stage": 2},
        "optim_grads_params": {"zero_stage": 3},
    },
    # Here there is only this choice, which a script may name.
    "--outer-dp-sharding-strategy": {"no_shard": {}},
    "--expert-outer-dp-sharding-strategy": {"no_shard": {}},
    "--train-mode": {"pretrain": {}},
    # Its layers say what a model is.
    "--export-model-type": {"GPTModel": {}, "MambaModel": {}, "HybridModel": {}},
    # Megatron's own files, in AMD's port and in Alibaba's.
    "--dataset": {"LLama-Pretrain-Idxmap": {}, "MMAP": {}},
    "--tokenizer-library": {
        "sentencepiece": {"tokenizer_type": "GPTSentencePieceTokenizer"},
        "huggingface": {"tokenizer_type": "HuggingFaceTokenizer"},
    },
    "--muon-scale-mode": {"spectral": {}},
    "--muon-tp-mode": {"duplicated": {}, "distributed": {}},
    "--muon-scalar-optimizer": {"adam": {}},
}
# Flag -> the number that it asks for nothing with, mostly Megatron's default. Why no other can be
# honoured is said in `refused`.
_IDLE: Mapping[str, float] = {
    "--encoder-tensor-model-parallel-size": 0,
    "--encoder-pipeline-model-parallel-size": 0,
    "--activation-offload-fraction": 1,
    "--delta-offload-bytes-across-pp-ranks": 0,
    "--relative-attention-num-buckets": 32,
    "--relative-attention-max-distance": 128,
    "--attention-sink-k": 0,
    "--extra-vocab-size": 0,
    "--head-lr-mult": 1,
    "--lr-scale-gate": 1,
    "--mid-level-dataset-surplus": 0.005,
    "--mlp-chunks-for-training": 1,
    "--moe-n-hash-layers": 0,
    "--moe-upcycling-granularity": 1,
    "--most-recent-k": -1,
    "--num-residual-streams": 1,
}
_NOTHING_SHARED = (
    " Replicas share nothing: leave --num-distributed-optimizer-instances out for none."
)
_INSTEAD: Mapping[str, str] = {
    "--outer-dp-sharding-strategy": _NOTHING_SHARED,
    "--expert-outer-dp-sharding-strategy": _NOTHING_SHARED,
    "--dataset": " --data-path reads the files of mb-data preprocess, and Megatron's.",
    "--tokenizer-library": " See --tokenizer-type.",
    "--muon-scale-mode": " Muon does not know which side of a matrix is its input's.",
    "--muon-tp-mode": " Muon iterates on whole matrices.",
}


def _one_of(flag: str, said: str | Sequence[str]) -> Mapping[str, Any]:
    values, value = _VALUES[flag], _alone(flag, said)
    if value not in values:
        known = f"one of {', '.join(values)}" if len(values) > 1 else next(iter(values))
        raise ValueError(f"Expected {flag} to be {known}, got {value!r}.{_INSTEAD.get(flag, '')}")
    return values[value]


def _nothing(flag: str, word: str) -> Mapping[str, Any]:
    if number(flag, word) != _IDLE[flag]:
        raise ValueError(f"{flag} {word} cannot be honoured: {refusal(flag)}.")
    return {}


def _alone(flag: str, said: str | Sequence[str]) -> str:
    """The only value of a flag that may have several in Megatron."""
    if isinstance(said, str):
        return said
    if len(said) > 1:
        raise ValueError(f"Expected one {flag}, for one balancing loss, got {' '.join(said)}.")
    return said[0]


def _capacity_factor(word: str) -> Mapping[str, Any]:
    factor = number("--moe-expert-capacity-factor", word)
    return {"moe_capacity_factor": max(factor, 0.0)}  # below 0 is none, there as here 0


def _room(word: str) -> Mapping[str, Any]:
    """Of a rank, over an even share; Core too runs a step again that needs more."""
    factor = number("--moe-expert-rank-capacity-factor", word)
    return {"moe_row_policy": "budget", "moe_row_budget": factor}


def _weight(flag: str, said: str | Sequence[str]) -> Mapping[str, Any]:
    return {OF_EVERY_LAYER[flag]: number(flag, _alone(flag, said))}


def _gate(numbers: Mapping[str, float]) -> Mapping[str, Any]:
    """Core's quick GELU is gate sigmoid(1.702 gate)."""
    inside = {"alpha": 1.702, **{name: value for name, value in numbers.items() if value}}
    return {"activation": f"swiglu({', '.join(f'{name}={v}' for name, v in inside.items())})"}


# Megatron takes a balancing type and a weight for each of several losses.
_SEVERAL = {"--moe-router-load-balancing-type": "+", "--moe-aux-loss-coeff": "+"}
# Flag -> whether a value follows ("+": some), and the fields that it sets. Where two set the same
# field, the first in this table wins: a balancing type "none" has no loss, whatever its weight.
TRANSLATED: Mapping[str, tuple[bool | str, Callable[[Any], Mapping[str, Any]]]] = {
    "--recompute-activations": (False, lambda _: {"recompute_granularity": "selective"}),
    "--checkpoint-activations": (False, lambda _: {"recompute_granularity": "full"}),
    "--activations-checkpoint-method": (
        True,
        lambda method: {"recompute_granularity": "full", "recompute_method": method},
    ),
    **{flag: (_SEVERAL.get(flag, True), partial(_one_of, flag)) for flag in _VALUES},
    **{flag: (_SEVERAL.get(flag, True), partial(_weight, flag)) for flag in OF_EVERY_LAYER},
    **{flag: (True, partial(_nothing, flag)) for flag in _IDLE},
    "--moe-router-pre-softmax": (False, lambda _: {}),
    QUICK_GEGLU: (False, _gate),
    **{flag: (valued, lambda _: {}) for flag, valued in TOGETHER.items()},
    "--moe-router-force-load-balancing": (
        False,
        lambda _: {"moe_uniform_expert_assignment": True},
    ),
    "--moe-expert-capacity-factor": (True, _capacity_factor),
    "--moe-expert-rank-capacity-factor": (True, _room),
    "--moe-layer-recompute": (False, lambda _: {"moe_recompute": True}),
    "--recompute-modules": ("+", _recomputed),
    "--torch-fsdp2-no-reshard-after-forward": (False, lambda _: {"zero_stage": 2}),
    "--use-torch-fsdp2": (False, lambda _: {"zero_stage": 3}),
}


class Understood(NamedTuple):
    """What a command line comes to once its settled and its translated flags are read.

    values: all else that was said, and the fields that translated flags set.
    of_every_layer: those weights of `values` that every layer's loss has, not their mean.
    notes: remarks to print.
    wrong: a sentence on each translated flag whose value means nothing here, and on settled flags
        beside one that says the opposite.
    """

    values: dict[str, Any]
    of_every_layer: list[str]
    notes: list[str]
    wrong: list[str]


def understood(said: Mapping[str, Any]) -> Understood:
    """Read what was said, by flag or field; a field's own flag wins over one that is translated."""
    settled = [name for name in SETTLED if name in said]
    values = {name: value for name, value in said.items() if name not in SETTLED}
    of_every_layer, notes = [], [settled_note(settled)] if settled else []
    notes += done_otherwise(values)
    values, wrong = read_together(values)
    for name, (_, meaning) in TRANSLATED.items():
        if name not in values:
            continue
        try:
            meant = meaning(values.pop(name))
        except ValueError as error:
            wrong.append(str(error))
            continue
        sums_layers = name in OF_EVERY_LAYER
        of_every_layer += [field for field in meant if sums_layers and field not in values]
        lost = [f for f in meant if f in said and (said[f] != meant[f] or sums_layers)]
        effect = "no" if len(lost) == len(meant) else "less"
        notes += [f"{effect} effect beside {flag_name(f)} {said[f]}: {name}" for f in lost]
        values = {**meant, **values}
    overriding = [name for name in settled if name in OVERRIDING.split()]
    if overriding and said.get("use_checkpoint_opt_param_scheduler"):
        wrong.append(
            f"Expected {overriding[0]} or --use-checkpoint-opt-param-scheduler, got both: with the "
            "first the schedules that are typed win, with the second those of --load."
        )
    return Understood(values, of_every_layer, notes, wrong)


def two_moments(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with two dtypes of Adam's moments, which have one here; empty for one."""
    dtypes = [values.get(name, "fp32") for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")]
    if len(set(dtypes)) == 1:
        return []
    return [
        "Expected one dtype of --exp-avg-dtype and --exp-avg-sq-dtype, got "
        f"{' and '.join(dtypes)}. Give both, or --optimizer-state-dtype."
    ]


def with_means(config: TrainConfig, of_every_layer: Iterable[str]) -> TrainConfig:
    """A configuration with weights of means of losses for those that it has of every layer's."""
    if not config.num_moe_layers:
        return config
    weights = {name: config.num_moe_layers * getattr(config, name) for name in of_every_layer}
    return dataclasses.replace(config, **weights)
