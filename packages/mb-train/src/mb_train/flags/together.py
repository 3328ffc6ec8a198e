"""Flags of Megatron's scripts that say something together, or of a number that another flag says.

--quick-geglu --glu-linear-offset 1                      --activation 'swiglu(alpha=1.702, ...)'
--expert-model-parallel-size 4 and                       --expert-model-parallel-size 8
    --expert-tensor-parallel-size 2
--num-layers 16 --pipeline-model-parallel-size 2 and     --num-layers-per-virtual-pipeline-stage 2
    --num-virtual-stages-per-pipeline-rank 4
--moe-shared-expert-intermediate-size 2816 and           --moe-shared-expert-intermediate-size 2816
    --enable-shared-expert --num-shared-experts 2
--fine-grained-activation-offloading and                 --offload-modules core_attn
    --offload-modules core_attn
--cpu-offloading --cpu-offloading-num-layers 4           --cpu-offloading-num-layers 4
--use-mup and --mup-embedding-mult 10                    --use-mup --embedding-multiplier 10
--muon-tp-mode blockwise, of one tensor-parallel rank    --muon-tp-mode duplicated
--use-rotary-position-embeddings and                     --position-embedding-type rope
    --position-embedding-type learned_absolute
--multi-latent-attention and                             --position-embedding-type rope
    --position-embedding-type none
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mb_train.config.field import flag_name
from mb_train.config.offloading import EXPERT_MODULES
from mb_train.config.parallel import chunks_of_a_stage

QUICK_GEGLU = "--quick-geglu"
# Numbers of that gate, and their names within an activation.
_NUMBERS = {"--glu-linear-offset": "offset", "--activation-func-clamp-value": "limit"}
_CUT = "--expert-tensor-parallel-size"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_MODULES = "--recompute-modules"
_SHARED = ("--enable-shared-expert", "--num-shared-experts")
# Flags that say that activations go to the host, and the field that says which.
_OFFLOADING = {
    "--fine-grained-activation-offloading": "offload_modules",
    "--cpu-offloading": "cpu_offloading_num_layers",
    "--cpu-offloading-activations": "cpu_offloading_num_layers",
}
_MUP = ("--mup-embedding-mult", "--mup-output-mult")
_RECIPE = "--scaling-recipe"
_BASES = {
    "--scaling-base-hidden-size": "mup_base_hidden_size",
    "--scaling-base-head-dim": "mup_base_head_dim",
}
_MUON_PARTS = "--muon-tp-mode"
ROTARY = "--use-rotary-position-embeddings"
NO_POSITIONS = "--no-position-embedding"
ROUTERS_DTYPE = "--moe-router-dtype"
# Modules whose activations Megatron can compute anew one by one, and which here are kept.
KEPT = ("layernorm", "mla_up_proj", "mlp", "shared_experts")


def number(flag: str, word: str) -> float:
    """A flag's value as a number, or ValueError."""
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"Expected {flag} to be a number, got {word}.") from None


def _count(flag: str, word: str) -> int:
    try:
        count = int(word)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"Expected {flag} to be a whole number above 0, got {word}.")
    return count


def _gate(said: Mapping[str, Any]) -> dict[str, Any]:
    """As the value of --quick-geglu its numbers.

    Raises:
        ValueError: numbers without it, or something that is none.
    """
    numbers = {name: number(flag, said[flag]) for flag, name in _NUMBERS.items() if flag in said}
    if QUICK_GEGLU in said:
        return {QUICK_GEGLU: numbers}
    if any(numbers.values()):
        raise ValueError(
            f"Expected {' and '.join(_NUMBERS)} with {QUICK_GEGLU} alone: fused activations of "
            "Megatron Core ignore them otherwise. Say --activation 'swiglu(limit=7)' to have them."
        )
    return {}


def _ranks_of_experts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Experts that Megatron cuts into parts are shared by as many ranks here, as wholes."""
    parts = _count(_CUT, said.get(_CUT, "1"))
    ranks = parts * said.get("expert_model_parallel_size", 1)
    return {} if parts == 1 else {"expert_model_parallel_size": ranks}


def _layers_of_chunks(said: Mapping[str, Any]) -> dict[str, Any]:
    """How many layers a chunk of the pipeline has where the number of chunks is said."""
    if _CHUNKS not in said:
        return {}
    chunks = _count(_CHUNKS, said[_CHUNKS])
    if chunks == 1:
        return {}
    if said.get("num_layers_per_virtual_pipeline_stage"):
        raise ValueError(
            f"Expected --num-layers-per-virtual-pipeline-stage or {_CHUNKS}, got both."
        )
    stages, layers = said.get("pipeline_model_parallel_size", 1), said.get("num_layers")
    if layers is not None and said.get("model") == "t5":
        layers += said.get("decoder_num_layers", layers)
    if layers is None:
        raise ValueError(f"Expected --num-layers with {_CHUNKS}, got none.")
    most = math.ceil(layers / (stages * chunks))
    made = chunks_of_a_stage(layers, stages, most)
    if made != chunks:
        raise ValueError(
            f"Expected {_CHUNKS} that share {layers} layers out over {stages} stages, got "
            f"{chunks}: of at most {most} layers there are {made}."
        )
    return {"num_layers_per_virtual_pipeline_stage": most}


def _shared_experts(said: Mapping[str, Any]) -> dict[str, Any]:
    """These say no more than the width of all of them together, which has to be there."""
    typed = [flag for flag in _SHARED if flag in said]
    if typed and said.get("moe_shared_expert_intermediate_size") is None:
        raise ValueError(
            f"{', '.join(typed)} cannot be honoured: say --moe-shared-expert-intermediate-size, of "
            "all of them together."
        )
    return {}


def _offloading(said: Mapping[str, Any]) -> dict[str, Any]:
    """These say no more than what is to go to the host, which has to be there."""
    for flag, name in _OFFLOADING.items():
        if flag in said and not said.get(name):
            raise ValueError(f"{flag} cannot be honoured alone: say {flag_name(name)} as well.")
    return {}


def _mup(said: Mapping[str, Any]) -> dict[str, Any]:
    """Multipliers of μP, which Megatron passes over without it, and today's names of its base.

    Raises:
        ValueError: such a number without it, another recipe, or two bases.
    """
    recipe = said.get(_RECIPE, "none")
    if recipe not in ("none", "mup"):
        raise ValueError(
            f"Expected {_RECIPE} none or mup, got {recipe!r}: nothing follows from a model's depth."
        )
    found: dict[str, Any] = {"use_mup": True} if recipe == "mup" else {}
    for flag, field in _BASES.items():
        if flag not in said:
            continue
        base = (_count if field == "mup_base_hidden_size" else number)(flag, said[flag])
        if said.get(field, base) != base:
            raise ValueError(f"Expected one base of μP, got {flag} {base} and {said[field]}.")
        found[field] = base
    numbers = {flag: number(flag, said[flag]) for flag in _MUP if flag in said}
    wanted = [flag for flag, value in numbers.items() if value != 1]
    wanted += [flag for flag in _BASES if flag in said]
    if wanted and not {**said, **found}.get("use_mup"):
        raise ValueError(
            f"Expected --use-mup with {', '.join(wanted)}, without which Megatron Core passes over "
            "them. Leave them out, or say --embedding-multiplier and --logits-scaling."
        )
    embedding, output = (numbers.get(flag, 1.0) for flag in _MUP)
    found |= {} if embedding == 1 else {"embedding_multiplier": embedding}
    return found if output == 1 else found | {"logits_scaling": 1 / output}


def _muon_parts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's default, which is of each rank's part of a matrix: alone it has the whole."""
    if _MUON_PARTS not in said:
        return {}
    if said[_MUON_PARTS] != "blockwise":
        return {_MUON_PARTS: said[_MUON_PARTS]}
    if (ranks := said.get("tensor_model_parallel_size", 1)) > 1:
        raise ValueError(
            f"Expected {_MUON_PARTS} duplicated with --tensor-model-parallel-size {ranks}, got "
            "blockwise: Muon iterates on whole matrices."
        )
    return {_MUON_PARTS: "duplicated"}


def _positions(said: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's older flag overrules the newer one. That of none alone is a default: see
    `megatron_defaults.defaults_beside`."""
    if ROTARY in said:
        return {"position_embedding_type": "rope"}
    if NO_POSITIONS in said and said.get("position_embedding_type") == "learned":
        raise ValueError(
            f"Expected {NO_POSITIONS} or --position-embedding-type learned, got both. Leave one of "
            "the two out."
        )
    return {"position_embedding_type": "rope"} if _turned_anyway(said) else {}


def _turned_anyway(said: Mapping[str, Any]) -> bool:
    """Whether channels of latent attention turn though a script has no positions."""
    unsaid = "none" if NO_POSITIONS in said and ROTARY not in said else "rope"
    without = said.get("position_embedding_type", unsaid) == "none"
    return without and bool(said.get("multi_latent_attention"))


# What flags are read together, and by what: the fields, or flags, that they set.
_READINGS: Sequence[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], dict[str, Any]]]] = (
    ((QUICK_GEGLU, *_NUMBERS), _gate),
    ((_CUT,), _ranks_of_experts),
    ((_CHUNKS,), _layers_of_chunks),
    (_SHARED, _shared_experts),
    (tuple(_OFFLOADING), _offloading),
    ((*_MUP, _RECIPE, *_BASES), _mup),
    ((_MUON_PARTS,), _muon_parts),
    ((ROTARY, NO_POSITIONS), _positions),
)
# Those that nothing else reads, and whether a value follows.
TOGETHER: Mapping[str, bool] = {
    **dict.fromkeys((*_NUMBERS, _CUT, _CHUNKS, "--num-shared-experts"), True),
    **dict.fromkeys((*_MUP, _RECIPE, *_BASES), True),
    **dict.fromkeys(("--enable-shared-expert", *_OFFLOADING, ROTARY, NO_POSITIONS), False),
}


def read_together(said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What was said, with what the flags above mean in their place, and what is wrong with them."""
    values, wrong = dict(said), []
    for flags, reading in _READINGS:
        try:
            meant = reading(values)
        except ValueError as error:
            wrong.append(str(error))
            meant = {}
        values = {name: value for name, value in values.items() if name not in flags} | meant
    return values, wrong


def done_otherwise(said: Mapping[str, Any]) -> list[str]:
    """Remarks on what was asked for and is done in another way here."""
    found = []
    if _CUT in said and said[_CUT] != "1":
        found.append(
            f"{_CUT} {said[_CUT]}: as many ranks share the experts, which stay whole while there "
            "are enough of them"
        )
    if ROTARY in said and (kind := said.get("position_embedding_type", "rope")) != "rope":
        found.append(f"no effect beside {ROTARY}: --position-embedding-type {kind}")
    elif _turned_anyway(said):
        found.append("latent attention has rotary positions all the same, as in Megatron")
    if said.get(ROUTERS_DTYPE) == "fp64":
        found.append(f"{ROUTERS_DTYPE} fp64: routers compute in fp32")
    if kept := [name for name in said.get(_MODULES, ()) if name in KEPT]:
        found.append(f"{_MODULES}: without {', '.join(kept)}, which keep what they compute")
    if len({*EXPERT_MODULES}.intersection(said.get("offload_modules") or ())) == 1:
        found.append(
            f"--offload-modules: {' and '.join(EXPERT_MODULES)} are one here, all that experts keep"
        )
    return found
