"""Flags of Megatron Core's scripts that have no field of their own.

They are of two kinds: settled flags ask about something that is no choice here (see `settled`),
translated ones set a field that has another name here. Flags that ask for something that does not
exist here are in `refused_flags`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

_FUSED = "fusion is the kernels' own matter"
_FSDP = "data parallelism is FSDP2"
_FORMAT = "checkpoints are torch's distributed format, each rank writes its own part"
_OVERLAP = "when communication runs is the library's own matter"
_DISPATCHER = "see --moe-dispatcher"
_LOADED = "--load always takes over what the run was started with"
_ATTENTION = "attention always takes the fastest kernel of torch"
_ONE_LOGGER = "it is a service of NVIDIA's"
_FAULTS = "a run is started again by who launched it: see --nan-limit for the rest"

TOPK = "--moe-router-topk"
# A script without a top-k is taken for one of Core's if it has one of these.
_CORES = (
    "--moe-router-load-balancing-type", "--moe-token-dispatcher-type", "--moe-grouped-gemm",
)  # fmt: skip
# Flag -> the field that it sets. The flag is the weight of every layer's loss, the field the weight
# of their mean.
OF_EVERY_LAYER: Mapping[str, str] = {
    "--moe-aux-loss-coeff": "moe_loss_weight",
    "--moe-z-loss-coeff": "moe_z_loss_weight",
}

# Flag -> how many values follow ("?": one or none, "+": some), and the answer.
SETTLED: Mapping[str, tuple[int | str, str]] = {
    "--attention-backend": (1, _ATTENTION),
    "--export-force-local-attention": (0, _ATTENTION),
    "--apply-query-key-layer-scaling": (0, "scores are computed in fp32, where it changes nothing"),
    "--no-create-attention-mask-in-dataloader": (0, "the data loader never makes one"),
    "--no-mmap-bin-files": (0, "data files are always memory-mapped"),
    "--num-dataset-builder-threads": (1, "indices are built by rank 0, and kept"),
    "--cross-entropy-loss-fusion": (0, "the loss is always fused with the head"),
    "--cross-entropy-fusion-impl": (1, "the loss is always fused with the head"),
    "--calculate-per-token-loss": (0, "a step's loss is always the mean over its tokens"),
    "--no-rope-fusion": (0, _FUSED),
    "--no-bias-swiglu-fusion": (0, _FUSED),
    "--moe-permute-fusion": (0, _FUSED),
    "--moe-router-fusion": (0, _FUSED),
    "--moe-use-legacy-grouped-gemm": (0, "the experts are always computed together"),
    "--moe-pad-expert-input-to-capacity": (0, "experts compute no empty slots"),
    "--moe-per-layer-logging": (0, "loads are logged for every layer"),
    "--moe-shared-expert-overlap": (0, _OVERLAP),
    "--moe-enable-deepep": (0, _DISPATCHER),
    "--moe-flex-dispatcher-backend": (1, _DISPATCHER),
    "--moe-deepep-num-sms": (1, _DISPATCHER),
    "--overlap-moe-expert-parallel-comm": (0, "see --moe-a2a-overlap-degree"),
    "--delay-wgrad-compute": (0, _OVERLAP),
    "--tp-comm-overlap": (0, _OVERLAP),
    "--no-overlap-p2p-communication": (0, _OVERLAP),
    "--overlap-p2p-communication-warmup-flush": (0, _OVERLAP),
    "--overlap-param-gather-with-optimizer-step": (0, _OVERLAP),
    "--no-align-grad-reduce": (0, _OVERLAP),
    "--no-align-param-gather": (0, _OVERLAP),
    "--defer-embedding-wgrad-compute": (0, _OVERLAP),
    "--wgrad-deferral-limit": (1, _OVERLAP),
    "--microbatch-group-size-per-virtual-pipeline-stage": (1, _OVERLAP),
    "--high-priority-stream-groups": ("+", _OVERLAP),
    "--nccl-ub": (0, _OVERLAP),
    "--use-sharp": (0, _OVERLAP),
    "--use-contiguous-parameters-in-local-ddp": (0, _FSDP),
    "--use-megatron-fsdp": (0, _FSDP),
    "--use-custom-fsdp": (0, _FSDP),
    "--ddp-bucket-size": (1, _FSDP),
    "--ddp-num-buckets": (1, _FSDP),
    "--ddp-pad-buckets-for-high-nccl-busbw": (0, _FSDP),
    "--ddp-average-in-collective": (0, _FSDP),
    "--grad-reduce-in-bf16": (0, "gradients are always summed in fp32"),
    "--main-grads-dtype": (1, "gradients are always summed in fp32"),
    "--enable-gloo-process-groups": (0, "the device decides: NCCL on GPUs, gloo on CPUs"),
    "--disable-gloo-process-groups": (0, "the device decides: NCCL on GPUs, gloo on CPUs"),
    "--use-precision-aware-optimizer": (0, "see --optimizer-state-dtype"),
    "--init-model-with-meta-device": (0, "how a model is built is the library's own matter"),
    "--enable-cuda-graph": (0, "see --cuda-graph, for one GPU"),
    "--external-cuda-graph": (0, "see --cuda-graph, for one GPU"),
    "--cuda-graph-scope": ("+", "see --cuda-graph, for one GPU"),
    "--cuda-graph-impl": (1, "see --cuda-graph, for one GPU"),
    "--cuda-graph-warmup-steps": (1, "see --cuda-graph, for one GPU"),
    "--te-rng-tracker": (0, "random numbers follow from the seed and the step"),
    "--inference-rng-tracker": (0, "random numbers follow from the seed and the step"),
    "--manual-gc": (0, "garbage is collected when Python does"),
    "--manual-gc-interval": (1, "garbage is collected when Python does"),
    "--check-for-nan-in-loss-and-grad": (0, "see --nan-limit"),
    "--no-check-for-nan-in-loss-and-grad": (0, "see --nan-limit"),
    "--rerun-mode": (1, _FAULTS),
    "--enable-ft-package": (0, _FAULTS),
    "--exit-signal-handler-for-dataloader": (0, "SIGTERM always saves and exits"),
    "--profile-ranks": ("+", "the profile is rank 0's"),
    "--use-pytorch-profiler": (0, "--profile is torch's profiler"),
    "--ckpt-format": (1, _FORMAT),
    "--dist-ckpt-format": (1, _FORMAT),
    "--use-dist-ckpt": (0, _FORMAT),
    "--auto-detect-ckpt-format": (0, _FORMAT),
    "--dist-ckpt-strictness": (1, "every tensor of a checkpoint has to fit, or it is an error"),
    "--dist-ckpt-optim-fully-reshardable": (0, _FORMAT),
    "--ckpt-fully-parallel-save": (0, _FORMAT),
    "--ckpt-fully-parallel-load": (0, _FORMAT),
    "--no-ckpt-fully-parallel-save": (0, _FORMAT),
    "--ckpt-assume-constant-structure": (0, _FORMAT),
    "--use-persistent-ckpt-worker": (0, "see --async-save"),
    "--async-strategy": (1, "see --async-save"),
    "--use-mp-args-from-checkpoint-args": (0, _LOADED),
    "--no-use-tokenizer-model-from-checkpoint-args": (0, "a tokenizer that is named is taken"),
    "--log-progress": (0, "what a run did is in its folder, log.jsonl"),
    "--logging-level": (1, "there is one level"),
    "--enable-one-logger": (0, _ONE_LOGGER),
    "--no-one-logger": (0, _ONE_LOGGER),
    "--one-logger-project": (1, _ONE_LOGGER),
    "--one-logger-run-name": (1, _ONE_LOGGER),
    "--app-tag-run-name": (1, _ONE_LOGGER),
    "--app-tag-run-version": (1, _ONE_LOGGER),
    "--enable-experimental": (0, "there is no such switch"),
    "--disable-msc": (0, "there is no such switch"),
    "--legacy-tokenizer": (0, "there is one kind of tokenizers"),
    "--max-padding-length": (1, "samples of text are never padded"),
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
        "optim": {"zero_stage": 1},
        "optim_grads": {"zero_stage": 2},
        "optim_grads_params": {"zero_stage": 3},
    },
    "--context-parallel-size": {"1": {}},
    "--expert-tensor-parallel-size": {"1": {}},
    "--softmax-type": {"vanilla": {}},
    "--train-mode": {"pretrain": {}},
}
_INSTEAD: Mapping[str, str] = {
    "--context-parallel-size": " Long sequences: --sequence-parallel, recompute.",
    "--expert-tensor-parallel-size": " With more ranks than experts --expert-model-parallel-size "
    "cuts them.",
}


def _one_of(flag: str, value: str) -> Mapping[str, Any]:
    values = _VALUES[flag]
    if value not in values:
        known = f"one of {', '.join(values)}" if len(values) > 1 else next(iter(values))
        raise ValueError(f"Expected {flag} to be {known}, got {value!r}.{_INSTEAD.get(flag, '')}")
    return values[value]


def _number(flag: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"Expected {flag} to be a number, got {word}.") from None


def _capacity_factor(word: str) -> Mapping[str, Any]:
    factor = _number("--moe-expert-capacity-factor", word)
    return {"moe_capacity_factor": max(factor, 0.0)}  # below 0 is none, there as here 0


def _weight(flag: str, word: str) -> Mapping[str, Any]:
    return {OF_EVERY_LAYER[flag]: _number(flag, word)}


# Flag -> whether a value follows ("+": some), and the fields that it sets. Where two set the same
# field, the first in this table wins: a balancing type "none" has no loss, whatever its weight.
TRANSLATED: Mapping[str, tuple[bool | str, Callable[[Any], Mapping[str, Any]]]] = {
    **{flag: (True, partial(_one_of, flag)) for flag in _VALUES},
    **{flag: (True, partial(_weight, flag)) for flag in OF_EVERY_LAYER},
    "--moe-router-pre-softmax": (False, lambda _: {}),
    "--moe-router-force-load-balancing": (
        False,
        lambda _: {"moe_uniform_expert_assignment": True},
    ),
    "--moe-expert-capacity-factor": (True, _capacity_factor),
    "--moe-layer-recompute": (False, lambda _: {"moe_recompute": True}),
    "--recompute-modules": ("+", _recomputed),
    "--use-torch-fsdp2": (False, lambda _: {"zero_stage": 3}),
}


def spelled_out(words: Sequence[str]) -> list[str]:
    """The command line with a number for `--moe-layer-freq`.

    Megatron Core also takes a list that says for each layer whether it has experts, such as
    "([0]*3+[1]*24)".

    Raises:
        ValueError: the list is not dense layers followed by experts in every n-th layer, or its
            length is not `--num-layers`.
    """
    found = list(words)
    for place, word in enumerate(found):
        name, equals, value = word.partition("=")
        if name != "--moe-layer-freq":
            continue
        if not equals and place + 1 < len(found):
            value = found[place + 1]
        if "[" in value:
            dense, every, layers = _pattern(value)
            said = re.findall(r"(?<!\S)--num-layers[= ](\d+)", " ".join(words))[-1:]
            if said not in ([], [str(layers)]):
                raise ValueError(
                    f"Expected --moe-layer-freq to be of --num-layers {said[0]}, got {value}, "
                    f"which is of {layers}."
                )
            found[place : place + (1 if equals else 2)] = [
                f"--moe-layer-freq={every}",
                f"--moe-first-k-dense={dense}",
            ]
    return found


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
    - `--num-experts` in a whole script: the balancing loss has weight 0, experts have biases if
      linear maps have them, and there are two experts for a token if the script is one of Core's.
    - `--moe-router-topk` (Core's spelling): the weights of a token add up to 1, unless they are of
      a softmax over all experts; a group of experts is scored by as many of its best as a token
      could choose there.

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
    cores = TOPK in typed
    if "--num-experts" in typed and "num_layers" in values and "recipe" not in values:
        found["moe_loss_weight"] = 0.0
        found["moe_mlp_bias"] = values.get("add_bias_linear", True)
        if "moe_top_k" not in values and any(flag in typed for flag in _CORES):
            cores, found["moe_top_k"] = True, 2
    if not cores:
        return found
    top_k: int = {**found, **values}["moe_top_k"]
    if top_k > 1:
        sigmoid = values.get("moe_router_score_function") == "sigmoid"
        found["moe_renormalize"] = sigmoid or "--moe-router-pre-softmax" not in typed
    if groups := values.get("moe_router_group_topk"):
        found["moe_router_group_score_top"] = max(top_k // groups, 1)
    return found


def check_moments(values: Mapping[str, Any]) -> None:
    """Raise ValueError for two dtypes of Adam's moments, which have one here."""
    dtypes = [values.get(name, "fp32") for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")]
    if len(set(dtypes)) > 1:
        raise ValueError(
            "Expected one dtype of --exp-avg-dtype and --exp-avg-sq-dtype, got "
            f"{' and '.join(dtypes)}. Give both, or --optimizer-state-dtype."
        )
