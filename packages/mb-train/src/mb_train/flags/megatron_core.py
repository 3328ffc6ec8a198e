"""Flags of Megatron Core's scripts that set a field of another name here, and its defaults.

Those about something that is no choice here are in `settled`, those that ask for something that
does not exist here in `refused`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

TOPK = "--moe-router-topk"
NO_FUSED_GELU = "--no-bias-gelu-fusion"
# Transformer Engine's GELU is the approximation by tanh.
TE_ACTIVATION = "--use-te-activation-func"
TE_FUSED_MLP = "--use-transformer-engine-op-fuser"  # of dense models
# Flag -> the field that it sets. The flag is the weight of every layer's loss, the field the weight
# of their mean.
OF_EVERY_LAYER: Mapping[str, str] = {
    "--moe-aux-loss-coeff": "moe_loss_weight",
    "--moe-z-loss-coeff": "moe_z_loss_weight",
}


def _recomputed(modules: Sequence[str]) -> Mapping[str, Any]:
    """--recompute-modules: attention is what selective recompute is of; experts have a switch."""
    experts = {"moe_recompute": True}
    known = {"core_attn": {}, "layernorm": {}, "moe": experts, "moe_act": experts}
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
# Flag -> those of its values that have a meaning here, and the fields that they set.
_VALUES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "--moe-router-load-balancing-type": {
        "aux_loss": {},
        "seq_aux_loss": {"moe_balance_over": "sequence"},
        "global_aux_loss": {"moe_balance_over": "global_batch"},
        "none": {"moe_loss_weight": 0.0},
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
    "--moe-router-dtype": {"fp32": {"moe_router_fp32": True}},
    "--exp-avg-dtype": _MOMENTS,
    "--exp-avg-sq-dtype": _MOMENTS,
    "--main-params-dtype": {"fp32": {}},
    "--data-parallel-sharding-strategy": {
        "no_shard": {},
        "optim": {"zero_stage": 1},
        "optim_grads": {"zero_stage": 2},
        "optim_grads_params": {"zero_stage": 3},
    },
    # Here there is only this choice, which a script may name.
    "--outer-dp-sharding-strategy": {"no_shard": {}},
    "--context-parallel-size": {"1": {}},
    "--expert-tensor-parallel-size": {"1": {}},
    "--encoder-tensor-model-parallel-size": {"0": {}},
    "--encoder-pipeline-model-parallel-size": {"0": {}},
    "--cpu-offloading-num-layers": {"0": {}},
    "--mtp-num-layers": {"0": {}},
    "--softmax-type": {"vanilla": {}},
    "--rope-type": {"rope": {}},
    "--relative-attention-num-buckets": {"32": {}},
    "--relative-attention-max-distance": {"128": {}},
    "--glu-linear-offset": {"0.0": {}, "0": {}},
    "--train-mode": {"pretrain": {}},
    "--muon-momentum": {"0.95": {}},
    "--muon-num-ns-steps": {"5": {}},
    "--muon-scale-mode": {"spectral": {}},
    "--muon-extra-scale-factor": {"0.2": {}},
    "--muon-coefficient-type": {"simple": {}},
    "--muon-tp-mode": {"duplicated": {}, "distributed": {}},
    "--muon-scalar-optimizer": {"adam": {}},
}
_INSTEAD: Mapping[str, str] = {
    "--moe-router-load-balancing-type": " There is no Sinkhorn in a run.",
    "--context-parallel-size": " Long sequences: --sequence-parallel, recompute.",
    "--expert-tensor-parallel-size": " With more ranks than experts --expert-model-parallel-size "
    "cuts them.",
    "--cpu-offloading-num-layers": " Activations stay on the GPUs: see --recompute-granularity.",
    "--mtp-num-layers": " A model predicts the next token only.",
    "--rope-type": " See --use-rope-scaling and --rotary-seq-len-interpolation-factor.",
    "--glu-linear-offset": " Say --activation 'swiglu(offset=1)'.",
    "--muon-scale-mode": " Updates have the size of Adam's.",
    "--muon-extra-scale-factor": " Updates have the size of Adam's.",
    "--muon-tp-mode": " Muon iterates on whole matrices.",
}


def _one_of(flag: str, said: str | Sequence[str]) -> Mapping[str, Any]:
    values, value = _VALUES[flag], _alone(flag, said)
    if value not in values:
        known = f"one of {', '.join(values)}" if len(values) > 1 else next(iter(values))
        raise ValueError(f"Expected {flag} to be {known}, got {value!r}.{_INSTEAD.get(flag, '')}")
    return values[value]


def _alone(flag: str, said: str | Sequence[str]) -> str:
    """The only value of a flag that may have several in Megatron."""
    if isinstance(said, str):
        return said
    if len(said) > 1:
        raise ValueError(f"Expected one {flag}, for one balancing loss, got {' '.join(said)}.")
    return said[0]


def _number(flag: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"Expected {flag} to be a number, got {word}.") from None


def _capacity_factor(word: str) -> Mapping[str, Any]:
    factor = _number("--moe-expert-capacity-factor", word)
    return {"moe_capacity_factor": max(factor, 0.0)}  # below 0 is none, there as here 0


def _weight(flag: str, said: str | Sequence[str]) -> Mapping[str, Any]:
    return {OF_EVERY_LAYER[flag]: _number(flag, _alone(flag, said))}


# Megatron takes a balancing type and a weight for each of several losses.
_SEVERAL = {"--moe-router-load-balancing-type": "+", "--moe-aux-loss-coeff": "+"}
# Flag -> whether a value follows ("+": some), and the fields that it sets. Where two set the same
# field, the first in this table wins: a balancing type "none" has no loss, whatever its weight.
TRANSLATED: Mapping[str, tuple[bool | str, Callable[[Any], Mapping[str, Any]]]] = {
    **{flag: (_SEVERAL.get(flag, True), partial(_one_of, flag)) for flag in _VALUES},
    **{flag: (_SEVERAL.get(flag, True), partial(_weight, flag)) for flag in OF_EVERY_LAYER},
    "--moe-router-pre-softmax": (False, lambda _: {}),
    "--moe-router-force-load-balancing": (
        False,
        lambda _: {"moe_uniform_expert_assignment": True},
    ),
    "--moe-expert-capacity-factor": (True, _capacity_factor),
    "--moe-layer-recompute": (False, lambda _: {"moe_recompute": True}),
    "--recompute-modules": ("+", _recomputed),
    "--torch-fsdp2-no-reshard-after-forward": (False, lambda _: {"zero_stage": 2}),
    "--use-torch-fsdp2": (False, lambda _: {"zero_stage": 3}),
}

_NOT_TRANSLATED = """
    --expert-model-parallel-size --expert-tensor-parallel-size
    --moe-ffn-hidden-size --moe-layer-freq --moe-input-jitter-eps --moe-apply-probs-on-input
    --moe-router-score-function --moe-router-topk-scaling-factor --moe-router-num-groups
    --moe-router-group-topk --moe-router-enable-expert-bias --moe-router-bias-update-rate
    --moe-shared-expert-intermediate-size --moe-shared-expert-gate
    --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-router-fusion
    --moe-pad-expert-input-to-capacity --moe-per-layer-logging --moe-shared-expert-overlap
    --overlap-moe-expert-parallel-comm --moe-enable-deepep --moe-deepep-num-sms
    --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-hybridep-num-sms
    --moe-enable-mori --moe-mori-max-tokens-per-rank
    --moe-router-aux-loss-fusion --no-moe-router-aux-loss-fusion
"""
# A script without a top-k is taken for one of Core's if it has one of these, which Core alone has.
CORES = {*_NOT_TRANSLATED.split(), *(flag for flag in TRANSLATED if flag.startswith("--moe-"))}


def spelled_out(words: Sequence[str]) -> list[str]:
    """The command line with a number for `--moe-layer-freq`.

    Megatron Core also takes a list that says for each layer whether it has experts, such as
    "([0]*3+[1]*24)".

    Raises:
        ValueError: the list is not dense layers followed by experts in every n-th layer, or its
            length is not `--num-layers`.
    """
    found, last = list(words), True
    for place in reversed(range(len(found))):
        name, equals, value = found[place].partition("=")
        if name != "--moe-layer-freq":
            continue
        if not equals and place + 1 < len(found):
            value = found[place + 1]
        if "[" in value:
            # One that a later one replaces says nothing, of no layer.
            said = _as_numbers(value, words) if last else []
            found[place : place + (1 if equals else 2)] = said
        last = False
    return found


def _as_numbers(pattern: str, words: Sequence[str]) -> list[str]:
    dense, every, layers = _pattern(pattern)
    said = re.findall(r"(?<!\S)--num-layers[= ](\d+)", " ".join(words))[-1:]
    if said not in ([], [str(layers)]):
        raise ValueError(
            f"Expected --moe-layer-freq to be of --num-layers {said[0]}, got {pattern}, "
            f"which is of {layers}."
        )
    return [f"--moe-layer-freq={every}", f"--moe-first-k-dense={dense}"]


def _pattern(text: str) -> tuple[int, int, int]:
    """Number of dense layers at the start, n if every n-th layer has experts, number of layers."""
    layers = _layers(text)
    if 1 in layers:
        first = layers.index(1)
        for every in range(1, len(layers) + 1):
            for dense in {first, 0}:
                if layers == [int(i >= dense and i % every == 0) for i in range(len(layers))]:
                    return dense, every, len(layers)
    raise ValueError(
        f"Expected --moe-layer-freq to be dense layers and then experts in every n-th, as "
        f"([0]*3+[1]*24), got {text}. See --moe-first-k-dense."
    )


def _layers(text: str) -> list[int]:
    """The list that an expression makes, of sums and repetitions of lists of 0 and 1."""
    text = text.replace(" ", "")
    if not re.fullmatch(r"[\[\]()01,+*\d]+", text):
        return []
    # Innermost parentheses first: a repeated group becomes the list it stands for.
    group = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
    while (match := group.search(text)) is not None:
        inner = _sum(match[1]) * int(match[2] or 1)
        text = text[: match.start()] + str(inner).replace(" ", "") + text[match.end() :]
    return _sum(text)


def _sum(text: str) -> list[int]:
    layers: list[int] = []
    for term in text.split("+"):
        match = re.fullmatch(r"\[((?:[01],?)*)\](?:\*(\d+))?", term)
        if match is None:
            return []
        layers += [int(digit) for digit in match[1].replace(",", "")] * int(match[2] or 1)
    return layers


def defaults_beside(typed: Container[str], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Other defaults that fields have where certain flags of Megatron's are typed, as there.

    - The loss of a balancing type has weight 0 unless `--moe-aux-loss-coeff` is given.
    - A capacity factor drops an expert's least probable tokens.
    - `--num-experts` in a whole script: the balancing loss has weight 0, experts and routers have
      biases if linear maps have them, and a token has two experts if the script is one of Core's.
    - `--moe-router-topk` (Core's spelling): the weights of a token add up to 1, unless they are of
      a softmax over all experts; a group of experts is scored by as many of its best as a token
      could choose there.
    - `--disable-bias-linear` or `--no-bias-gelu-fusion` in a whole script: GELU is exact, for only
      the kernel that adds a bias before it approximates it. MegaBlocks' experts always do, and
      Transformer Engine does where a flag asks for its activation.

    Args:
        typed: flags of the command line.
        values: the fields that they set.
    """
    found: dict[str, Any] = {}
    if "--no-position-embedding" in typed:  # scripts have it beside rotary positions too
        found["position_embedding_type"] = "none"
    if "--moe-router-load-balancing-type" in typed:
        found["moe_loss_weight"] = 0.0
    if "--moe-expert-capacity-factor" in typed:
        found["moe_drop_policy"] = "probability"
    if "--moe-router-pre-softmax" in typed:
        found["moe_renormalize"] = False
    if _is_exact_gelu(typed, values):
        found["activation"] = "gelu"
    if _is_whole(values) and _has_experts(typed, values):
        found["moe_loss_weight"] = 0.0
        found["moe_mlp_bias"] = found["moe_router_bias"] = values.get("add_bias_linear", True)
    top_k = _core_top_k(typed, values)
    if top_k is None:
        return found
    found["moe_top_k"] = top_k
    if top_k > 1:
        sigmoid = values.get("moe_router_score_function") == "sigmoid"
        found["moe_renormalize"] = sigmoid or "--moe-router-pre-softmax" not in typed
    if groups := values.get("moe_router_group_topk"):
        found["moe_router_group_score_top"] = max(top_k // groups, 1)
    return found


def _is_whole(values: Mapping[str, Any]) -> bool:
    """Whether this is a whole script, not a few flags beside a recipe."""
    return "num_layers" in values and "recipe" not in values


def _has_experts(typed: Container[str], values: Mapping[str, Any]) -> bool:
    """Whether there are experts by Megatron's flag; 0 of them are none."""
    return "--num-experts" in typed and values.get("moe_num_experts") is not None


def _is_exact_gelu(typed: Container[str], values: Mapping[str, Any]) -> bool:
    named = any(values.get(name) for name in ("activation", "glu", "swiglu", "squared_relu"))
    others = ["--moe-num-experts", "--openai-gelu", "--config", TE_ACTIVATION]
    if not _has_experts(typed, values):
        others.append(TE_FUSED_MLP)
    unfused = any(name in typed for name in ("--disable-bias-linear", NO_FUSED_GELU))
    return unfused and _is_whole(values) and not named and not any(name in typed for name in others)


def _core_top_k(typed: Container[str], values: Mapping[str, Any]) -> int | None:
    """Experts of a token by Core's flag, or by Core's default; None for the flags of others."""
    if TOPK in typed:
        return values["moe_top_k"]
    megatrons = _is_whole(values) and _has_experts(typed, values)
    cores = megatrons and any(flag in typed for flag in CORES)
    return 2 if cores and "moe_top_k" not in values else None


def other_muon(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """A remark on a whole script with Muon that leaves to Megatron what is another number here."""
    nesterov = "--muon-nesterov" in typed or "--muon-use-nesterov" in typed
    if values.get("optimizer") != "muon" or not _is_whole(values):
        return []
    if nesterov and "--muon-extra-scale-factor" in typed:
        return []
    return [
        "Muon is Moonlight's, with Nesterov's momentum and steps of the size of Adam's: Megatron's "
        "has neither without --muon-nesterov and --muon-extra-scale-factor 0.2, and needs another "
        "--lr"
    ]


def other_balance(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """A remark on a balancing loss, of Core's flag, that counts other experts there."""
    chosen = values.get("moe_router_enable_expert_bias") or values.get("moe_router_group_topk")
    if not chosen or "--moe-aux-loss-coeff" not in typed or not values.get("moe_loss_weight"):
        return []
    return [
        "the balancing loss counts the experts that tokens visit: Megatron Core, since 2025, those "
        "that they would without bias and groups"
    ]


def summed_logits(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """What is wrong with groups of experts that Core scores by their logits; empty for others."""
    top_k, groups = _core_top_k(typed, values), values.get("moe_router_group_topk")
    scores = (
        "--moe-router-pre-softmax" in typed
        or values.get("moe_router_score_function") == "sigmoid"
        or "moe_router_group_score_top" in values
    )
    if top_k is None or not groups or top_k // groups < 2 or scores:
        return []
    return [
        f"Expected --moe-router-pre-softmax with {TOPK} {top_k} and --moe-router-group-topk "
        f"{groups}, or --moe-router-score-function sigmoid: without them Megatron scores a group "
        f"by the sum of its best {top_k // groups} logits. --moe-router-group-score-top "
        f"{top_k // groups} scores it by their probabilities."
    ]


def two_moments(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with two dtypes of Adam's moments, which have one here; empty for one."""
    dtypes = [values.get(name, "fp32") for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")]
    if len(set(dtypes)) == 1:
        return []
    return [
        "Expected one dtype of --exp-avg-dtype and --exp-avg-sq-dtype, got "
        f"{' and '.join(dtypes)}. Give both, or --optimizer-state-dtype."
    ]
