"""What Megatron's scripts leave unsaid: its defaults where they are others, and remarks on them.

They hold beside flags that Megatron alone has, and in whole scripts, which say the number of layers
and no recipe. Other flags beside a recipe keep the defaults of the fields.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from mb_train.config.field import flag_name
from mb_train.config.positions import PositionFields
from mb_train.flags.settled import NO_FUSED_GELU
from mb_train.flags.together import NO_POSITIONS, QUICK_GEGLU, ROTARY
from mb_train.flags.translated import TRANSLATED

TOPK = "--moe-router-topk"
BALANCING = "--moe-router-load-balancing-type"
NO_BIAS = "--disable-bias-linear"
_MEGABLOCKS = "--moe-num-experts"
_FIRST_NESTEROV = "--muon-use-nesterov"
LEGACY = "--use-legacy-models"
_YARNS_LENGTH = PositionFields.original_max_position_embeddings
# Transformer Engine's GELU is the approximation by tanh.
_TE_ACTIVATION = "--use-te-activation-func"
_TE_FUSED_MLP = "--use-transformer-engine-op-fuser"  # of dense models

_NOT_TRANSLATED = """
    --expert-model-parallel-size --expert-tensor-parallel-size
    --moe-ffn-hidden-size --moe-latent-size --moe-layer-freq --moe-input-jitter-eps
    --moe-apply-probs-on-input
    --moe-router-score-function --moe-router-topk-scaling-factor --moe-router-num-groups
    --moe-router-group-topk --moe-router-enable-expert-bias --moe-router-bias-update-rate
    --moe-shared-expert-intermediate-size --moe-shared-expert-gate
    --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-router-fusion
    --moe-pad-expert-input-to-capacity --moe-per-layer-logging --moe-shared-expert-overlap
    --overlap-moe-expert-parallel-comm --moe-enable-deepep --moe-deepep-num-sms
    --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-hybridep-num-sms
    --moe-enable-mori --moe-mori-max-tokens-per-rank
    --moe-router-aux-loss-fusion --no-moe-router-aux-loss-fusion --multi-latent-attention
    --moe-router-padding-for-fp8 --moe-router-padding-for-quantization --moe-use-grouped-tensor
    --moe-paged-stash --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda
    --moe-paged-stash-buffer-size-factor-cpu
    --moe-single-grouped-weight --moe-single-grouped-bias --moe-mlp-glu-interleave-size
    --moe-shared-expert-glu-interleave-size --moe-permute-fusion-into-hybridep
    --moe-hybridep-pad-variable-tokens --moe-hybridep-num-blocks-permute
    --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms-preprocessing
    --moe-ncclep-static-shape --moe-ncclep-use-symm-mem --moe-routing-trace-path
    --moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits
    --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
"""
# A script without a top-k is taken for one of Core's if it has one of these, which Core alone has.
CORES = {
    "--use-mcore-models",
    *_NOT_TRANSLATED.split(),
    *(flag for flag in TRANSLATED if flag.startswith("--moe-")),
}


def defaults_beside(typed: Container[str], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Other defaults that fields have where certain flags of Megatron's are typed, as there.

    Where 0 experts are asked for, those of experts are nobody's matter.

    - The loss of a balancing type has weight 0 unless `--moe-aux-loss-coeff` is given.
    - That loss, of `--moe-aux-loss-coeff`, counts the best experts by score where a bias or groups
      make a token visit others, as Core does since 2025.
    - A capacity factor drops an expert's least probable tokens.
    - `--num-experts` in a whole script: the balancing loss has weight 0, experts and routers have
      biases if linear maps have them, and a token has two experts in a script of Core's, else one.
    - `--moe-num-experts` in a whole script: their output has a bias if linear maps have them, as
      that of MegaBlocks' experts, which have no others.
    - `--moe-router-topk` (Core's spelling): the weights of a token add up to 1, unless they are of
      a softmax over all experts; a group of experts is scored by as many of its best as a token
      could choose there.
    - Muon in a whole script: its momentum is plain, its coefficients are the quintic ones and the
      factor of its steps is 1. With `--muon-use-nesterov`, as Core spelled it at first, the
      momentum is 0.9, as it was then.
    - Sinkhorn's balance by `--moe-router-load-balancing-type`: a token's expert is weighed by its
      sigmoid, several by their probabilities, whose sum is not 1. Where their number is left to a
      recipe or to `--load`, the scores are, too.
    - `--num-experts` and `--use-legacy-models` in a whole script: the same balance, one expert for
      a token, and routers without biases.
    - Rotary positions of a T5 in a whole script: its scores have a bias for each token if its head
      is tied, as with learned positions, with which they always have it.
    - `--disable-bias-linear` or `--no-bias-gelu-fusion` in a whole script: GELU is exact, for only
      the kernel that adds a bias before it approximates it. MegaBlocks' experts always do, and
      Transformer Engine does where a flag asks for its activation.

    Args:
        typed: flags of the command line.
        values: the fields that they set.
    """
    found: dict[str, Any] = {}
    if NO_POSITIONS in typed:  # scripts have it beside rotary positions too
        found["position_embedding_type"] = "none"
    rotary_t5 = values.get("model") == "t5" and _positions(typed, values) == "rope"
    if is_whole(values) and rotary_t5 and not values.get("untie_embeddings_and_output_weights"):
        found["head_bias"] = True
    if _is_exact_gelu(typed, values):
        found["activation"] = "gelu"
    if is_whole(values) and values.get("optimizer") == "muon":
        found |= {"muon_nesterov": False, "muon_extra_scale_factor": 1.0}
        found["muon_coefficient_type"] = "quintic"
        if _FIRST_NESTEROV in typed:
            found["muon_momentum"] = 0.9
    if _is_dense(values):
        return found
    if BALANCING in typed:
        found["moe_loss_weight"] = 0.0
    chosen = values.get("moe_router_enable_expert_bias") or values.get("moe_router_group_topk")
    if chosen and "--moe-aux-loss-coeff" in typed:
        found["moe_balance_by"] = "scores"
    if "--moe-expert-capacity-factor" in typed:
        found["moe_drop_policy"] = "probability"
    if "--moe-router-pre-softmax" in typed:
        found["moe_renormalize"] = False
    biases = values.get("add_bias_linear", True)
    if is_whole(values) and _MEGABLOCKS in typed:
        found["moe_output_bias"] = biases and not values.get("moe_mlp_bias")
    if is_whole(values) and _has_experts(typed, values):
        found["moe_loss_weight"] = 0.0
        found["moe_mlp_bias"] = biases
        found["moe_router_bias"] = biases and LEGACY not in typed
    top_k = _core_top_k(typed, values)
    if top_k is not None:
        found["moe_top_k"] = top_k
    elif is_whole(values) and _has_experts(typed, values) and "moe_top_k" not in values:
        found["moe_top_k"] = 1
    if is_by_sinkhorn(typed, values):
        return found | _sinkhorn_weights(typed, values)
    if top_k is None:
        return found
    if top_k > 1:
        sigmoid = values.get("moe_router_score_function") == "sigmoid"
        found["moe_renormalize"] = sigmoid or "--moe-router-pre-softmax" not in typed
    if groups := values.get("moe_router_group_topk"):
        found["moe_router_group_score_top"] = max(top_k // groups, 1)
    return found


def remarks_on(beside: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """What is said of the `defaults_beside` certain flags that no flag or file overrules."""
    unsaid = {name: value for name, value in beside.items() if name not in values}
    notes = []
    sinkhorn = {**beside, **values}.get("moe_router_type") == "sinkhorn"
    if unsaid.get("moe_router_type"):
        notes.append(f"experts are chosen by Sinkhorn's balance with {LEGACY}, as in Megatron")
    if "moe_loss_weight" in unsaid and not sinkhorn:
        notes.append("no load-balancing loss without --moe-aux-loss-coeff, as in Megatron")
    if "moe_balance_by" in unsaid and values.get("moe_loss_weight"):
        notes.append(
            "the load-balancing loss counts the best experts by score, without bias and groups, as "
            "in Megatron since 2025"
        )
    if sinkhorn and unsaid.get("moe_router_score_function") == "sigmoid":
        notes.append("an expert's weight is its sigmoid beside Sinkhorn's balance, as in Megatron")
    if unsaid.get("moe_top_k") == 1:
        notes.append(f"one expert for a token without {TOPK}, as in Megatron before Core: it has 2")
    elif "moe_top_k" in unsaid:
        notes.append(f"{unsaid['moe_top_k']} experts for a token without {TOPK}, as in Megatron")
    balanced = sinkhorn or "moe_balance_over" in values or "moe_loss_weight" not in unsaid
    if "moe_top_k" in unsaid and not balanced:
        notes.append(
            "Megatron at the end of 2023, Core too, chose one expert for a token by Sinkhorn's "
            f"balance: say {BALANCING} sinkhorn and {TOPK} 1"
        )
    if unsaid.get("moe_output_bias"):
        notes.append("a bias on the experts' output without --no-moe-output-bias, as in MegaBlocks")
    if "head_bias" in unsaid:
        notes.append("a bias for each token on its score, without --no-head-bias, as in Megatron")
    if "activation" in unsaid:
        notes.append("the exact GELU, as in Megatron without its fused kernel")
    if "muon_nesterov" in unsaid:
        notes.append("Muon without Nesterov's momentum, having no --muon-nesterov, as in Megatron")
    if "muon_coefficient_type" in unsaid:
        notes.append(
            "Muon with quintic coefficients, having no --muon-coefficient-type, as in Megatron"
        )
    if "muon_momentum" in unsaid:
        notes.append(
            f"Muon with a momentum of {unsaid['muon_momentum']}, having no --muon-momentum beside "
            f"{_FIRST_NESTEROV}, as in Megatron when it had that flag"
        )
    if "muon_extra_scale_factor" in unsaid:
        notes.append(
            "steps of Muon five times as large as Adam's without --muon-extra-scale-factor 0.2, as "
            "in Megatron"
        )
    return notes


def is_whole(values: Mapping[str, Any]) -> bool:
    """Whether this is a whole script, not a few flags beside a recipe."""
    return "num_layers" in values and "recipe" not in values


def _positions(typed: Container[str], values: Mapping[str, Any]) -> str:
    """The kind of positions of a whole script."""
    if ROTARY in typed:
        return "rope"
    unsaid = "none" if NO_POSITIONS in typed else "learned"
    return values.get("position_embedding_type", unsaid)


def _is_dense(values: Mapping[str, Any]) -> bool:
    """Whether 0 experts were asked for, whatever other flags would have them do."""
    return values.get("moe_num_experts", 0) is None


def _has_experts(typed: Container[str], values: Mapping[str, Any]) -> bool:
    """Whether there are experts by Megatron's flag."""
    return "--num-experts" in typed and not _is_dense(values)


def _is_exact_gelu(typed: Container[str], values: Mapping[str, Any]) -> bool:
    named = any(values.get(name) for name in ("activation", "glu", "swiglu", "squared_relu"))
    others = [_MEGABLOCKS, "--openai-gelu", "--config", "--quick-geglu", _TE_ACTIVATION]
    if not _has_experts(typed, values):
        others.append(_TE_FUSED_MLP)
    unfused = any(name in typed for name in (NO_BIAS, NO_FUSED_GELU))
    return unfused and is_whole(values) and not named and not any(name in typed for name in others)


def _core_top_k(typed: Container[str], values: Mapping[str, Any]) -> int | None:
    """Experts of a token by Core's flag, or by Core's default; None for the flags of others."""
    if _is_dense(values):
        return None
    if TOPK in typed:
        return values["moe_top_k"]
    megatrons = is_whole(values) and _has_experts(typed, values)
    cores = megatrons and LEGACY not in typed and any(flag in typed for flag in CORES)
    return 2 if cores and "moe_top_k" not in values else None


def is_legacy(typed: Container[str], values: Mapping[str, Any]) -> bool:
    """Whether the experts are those of Megatron before Core, as its last releases had them."""
    return LEGACY in typed and is_whole(values) and _has_experts(typed, values)


def is_by_sinkhorn(typed: Container[str], values: Mapping[str, Any]) -> bool:
    """Whether flags of Megatron's, among what was typed, choose experts by Sinkhorn's balance."""
    asked_for = values.get(BALANCING) in ("sinkhorn", ["sinkhorn"]) and not _is_dense(values)
    asked_for = asked_for or is_legacy(typed, values)
    return asked_for and values.get("moe_router_type", "sinkhorn") == "sinkhorn"


def legacy_experts(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """What is wrong beside the experts of Megatron before Core, which pass over other choices."""
    if not is_legacy(typed, values) or not is_by_sinkhorn(typed, values):
        return []
    balanced = values.get(BALANCING, "sinkhorn")
    asked = [(TOPK, "1", str(values["moe_top_k"]))] if TOPK in typed else []
    asked.append((BALANCING, "sinkhorn", balanced if isinstance(balanced, str) else balanced[0]))
    return [
        f"Expected {flag} {there} with {LEGACY}, beside which Megatron has no other, got {here}. "
        f"Leave one of the two out: without {LEGACY} the experts are Megatron Core's."
        for flag, there, here in asked
        if here != there
    ]


def _sinkhorn_weights(typed: Container[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """How Megatron weighs the experts that Sinkhorn's balance chooses."""
    top_k = values.get("moe_top_k", _core_top_k(typed, values))
    if top_k is None and is_whole(values):
        top_k = 1
    found: dict[str, Any] = {"moe_router_type": "sinkhorn", "moe_renormalize": False}
    if top_k is not None:
        found["moe_router_score_function"] = "sigmoid" if top_k == 1 else "softmax"
    return found


def beside_sinkhorn(
    typed: Container[str],
    beside: Mapping[str, Any],
    values: Mapping[str, Any],
    of_every_layer: Container[str],
) -> list[str]:
    """What is wrong beside Megatron's flag for Sinkhorn's balance, where `is_by_sinkhorn`.

    Args:
        typed: flags of the command line.
        beside: the defaults there.
        values, of_every_layer: what was typed, see `translated.Understood`.
    """
    flag_of_it = f"{BALANCING} sinkhorn" if BALANCING in typed else LEGACY
    wanted = {"moe_router_topk_scaling_factor": 1.0, **beside}
    names = ["moe_router_score_function", "moe_router_topk_scaling_factor"]
    found = [(flag_name(name), wanted.get(name), values.get(name)) for name in names]
    if "moe_loss_weight" in of_every_layer:
        found.append(("--moe-aux-loss-coeff", 0.0, values["moe_loss_weight"]))
    return [
        f"Expected {flag} {there} with {flag_of_it}, beside which Megatron has no other, got "
        f"{here}. Leave it out, or say --moe-router-type sinkhorn in place of {flag_of_it}."
        for flag, there, here in found
        if None not in (there, here) and here != there
    ]


def other_muon(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """Remarks on a whole script with Muon that leaves to Megatron what is otherwise here."""
    if values.get("optimizer") != "muon" or not is_whole(values):
        return []
    found = []
    if values.get("tensor_model_parallel_size", 1) > 1 and "--muon-tp-mode" not in typed:
        found.append(
            "Muon iterates on whole matrices, as Megatron does with --muon-tp-mode duplicated; "
            "without it each tensor-parallel rank takes its part there"
        )
    if values.get("multi_latent_attention") and values.get("muon_split_qkv", True):
        found.append(
            "Muon takes apart what one map of latent attention makes, keys and values for one, "
            "which Megatron does not; --muon-no-split-qkv takes all maps whole"
        )
    if any(values.get(name) for name in ("glu", "swiglu", QUICK_GEGLU)):
        found.append("Muon takes gate and up for two matrices, which Megatron takes for one")
    if _positions(typed, values) == "learned":
        found.append("learned positions are Adam's to move, which Megatron leaves to Muon")
    return found


def other_yarn(values: Mapping[str, Any]) -> list[str]:
    """Remarks on latent attention in a whole script whose YaRN was otherwise early in 2025."""
    stretched = values.get("rope_type") in (None, "yarn") and values.get("rotary_scaling_factor", 1)
    if not (is_whole(values) and values.get("multi_latent_attention") and stretched > 1):
        return []
    found = []
    if "mscale_all_dim" not in values:
        found.append(
            "--mscale-all-dim is 0 if it is not said, as in today's Megatron; early in 2025 it was "
            "1, and scores had the scale of --mscale"
        )
    longest = values.get("max_position_embeddings", _YARNS_LENGTH)
    if "original_max_position_embeddings" not in values and longest != _YARNS_LENGTH:
        found.append(
            f"YaRN stretches {_YARNS_LENGTH} positions, as in today's Megatron; early in 2025 it "
            f"were those of --max-position-embeddings, here --original-max-position-embeddings "
            f"{longest}"
        )
    return found


def gated_anyway(values: Mapping[str, Any]) -> list[str]:
    """A remark on a gate in a whole script where MegaBlocks' fork has none, whatever is asked."""
    asked = values.get("glu") and not any(values.get(name) for name in ("swiglu", "activation"))
    dropless = values.get("moe_num_experts") and not values.get("moe_capacity_factor")
    if not asked or dropless or not is_whole(values):
        return []
    return [
        "--glu gates every feed-forward; MegaBlocks' fork of Megatron passes over it in dense ones "
        "and in experts with a capacity"
    ]


def lone_expert(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """A remark on one expert for a token where Megatron would weigh it by 1, or ask for a flag."""
    alone = _core_top_k(typed, values) == 1 and "moe_renormalize" not in values
    alone = alone and not is_by_sinkhorn(typed, values)
    scores = "--moe-router-pre-softmax" in typed
    if not alone or scores or values.get("moe_router_score_function") == "sigmoid":
        return []
    return [
        f"an expert's weight is its probability with {TOPK} 1, as with --moe-router-pre-softmax, "
        "which today's Megatron asks for beside it; before, it was 1"
    ]


def summed_logits(typed: Container[str], values: Mapping[str, Any]) -> list[str]:
    """What is wrong with groups of experts that Core scores by their logits; empty for others."""
    top_k, groups = _core_top_k(typed, values), values.get("moe_router_group_topk")
    scores = (
        "--moe-router-pre-softmax" in typed
        or values.get("moe_router_score_function") == "sigmoid"
        or "moe_router_group_score_top" in values
    )
    all_groups = groups == values.get("moe_router_num_groups")  # whatever their scores
    if top_k is None or not groups or top_k // groups < 2 or scores or all_groups:
        return []
    return [
        f"Expected --moe-router-pre-softmax with {TOPK} {top_k} and --moe-router-group-topk "
        f"{groups}, or --moe-router-score-function sigmoid: without them Megatron scores a group "
        f"by the sum of its best {top_k // groups} logits. --moe-router-group-score-top "
        f"{top_k // groups} scores it by their probabilities."
    ]
