"""How transformers' MoE blocks route, as fields of `MoEConfig`, by the name of the block's class.

There are few ways: softmax over all experts or over the chosen ones, sigmoids with or without a
bias for the choice, groups of experts. If a block's config asks for something that `dMoE` cannot
compute, the error names the field. A class that is missing here routes in yet another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ToFields = Callable[[Any], dict[str, Any]]


def _softmax(config: Any) -> dict[str, Any]:
    return {"renormalize": config.norm_topk_prob}


def _plain_softmax(config: Any) -> dict[str, Any]:
    return {"renormalize": False}


def _softmax_after_top_k(config: Any) -> dict[str, Any]:
    _refuse_jitter(config)
    return {"renormalize": True}


def _ernie(config: Any) -> dict[str, Any]:
    if config.norm_min > 1e-12:  # the router's name for it
        raise ValueError(
            f"expected moe_norm_min of at most 1e-12, got {config.norm_min}: dMoE divides by the "
            "sum of a token's weights however small it is"
        )
    return {"renormalize": True, "balancing_bias": True}


def _sigmoid(config: Any) -> dict[str, Any]:
    return {"score_function": "sigmoid", "renormalize": config.norm_topk_prob}


def _sigmoid_and_bias(scale: str | None) -> ToFields:
    """Sigmoids that add up to `config.<scale>`, chosen with a bias."""

    def fields(config: Any) -> dict[str, Any]:
        _refuse_jitter(config)
        return {
            "score_function": "sigmoid",
            "renormalize": True,
            "balancing_bias": True,
            "routed_scaling_factor": float(getattr(config, scale)) if scale else 1.0,
        }

    return fields


def _laguna(config: Any) -> dict[str, Any]:
    if config.moe_router_logit_softcapping:
        raise ValueError(
            "expected moe_router_logit_softcapping=0, got "
            f"{config.moe_router_logit_softcapping}: dMoE does not cap logits"
        )
    return _sigmoid_and_bias("moe_routed_scaling_factor")(config)


def _lfm2(config: Any) -> dict[str, Any]:
    return _sigmoid(config) | {
        "balancing_bias": config.use_expert_bias,
        "routed_scaling_factor": float(config.routed_scaling_factor),
    }


def _cohere2(config: Any) -> dict[str, Any]:
    if config.num_shared_experts and config.shared_expert_combination_strategy != "sum":
        raise ValueError(
            "expected shared_expert_combination_strategy='sum', got "
            f"{config.shared_expert_combination_strategy!r}: dMoE adds the shared expert"
        )
    return _sigmoid(config) if config.expert_selection_fn == "sigmoid" else {"renormalize": True}


def _deepseek_v2(config: Any) -> dict[str, Any]:
    groups = _groups(config, 1) if config.topk_method == "group_limited_greedy" else {}
    return {"routed_scaling_factor": config.routed_scaling_factor, **groups}


def _mistral4(config: Any) -> dict[str, Any]:
    return _mistral_large4(config) | {"renormalize": config.norm_topk_prob}


def _mistral_large4(config: Any) -> dict[str, Any]:
    """Whatever `norm_topk_prob` a config brings along: the class passes over it."""
    return _groups(config, 2) | {
        "renormalize": True,
        "routed_scaling_factor": config.routed_scaling_factor,
    }


def _deepseek_v3(config: Any) -> dict[str, Any]:
    return _groups(config, 2) | {
        "score_function": "sigmoid",
        "renormalize": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "balancing_bias": True,
    }


def _axk2(config: Any) -> dict[str, Any]:
    fields = _deepseek_v3(config)
    if "num_expert_groups" in fields:
        raise ValueError(
            f"expected n_group=None, got {config.n_group}: in closed groups this router leaves "
            "scores of 0, which win over those that the bias takes below, and dMoE none"
        )
    return fields


def _groups(config: Any, score_top: int) -> dict[str, Any]:
    if (config.n_group or 1) == 1 and config.topk_group != 0:  # of 0 groups MoEConfig says so
        return {}
    return {
        "num_expert_groups": config.n_group,
        "top_k_groups": config.topk_group,
        "group_score_top": score_top,
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {"renormalize": True, "router_bias": True, "mlp_bias": True}


def _refuse_jitter(config: Any) -> None:
    if getattr(config, "router_jitter_noise", 0):
        raise ValueError(
            f"expected router_jitter_noise=0, got {config.router_jitter_noise}: the block shows "
            "the experts the jittered tokens, dMoE only the router; set it to 0 and pass "
            "jitter_eps="
        )


_CLASSES: dict[ToFields, tuple[str, ...]] = {
    _softmax: (
        "OlmoeSparseMoeBlock",
        "FlexOlmoSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3NextSparseMoeBlock",
        "Qwen3OmniMoeThinkerTextSparseMoeBlock",
        "Qwen3OmniMoeTalkerTextSparseMoeBlock",
        "Qwen4ExpTextSparseMoeBlock",
        "MellumSparseMoeBlock",
        "LaraMiniSparseMoeBlock",
    ),
    _plain_softmax: ("JambaSparseMoeBlock",),
    _softmax_after_top_k: (
        "MixtralSparseMoeBlock",
        "MiniMaxSparseMoeBlock",
        "GraniteMoeMoE",
        "GraniteMoeHybridMoE",
        "GraniteMoeSharedMoE",
        "GraniteMoeSWAMoE",
        "HunYuanMoEV1Moe",
        "Qwen3_5MoeSparseMoeBlock",
        "Qwen3VLMoeTextSparseMoeBlock",
    ),
    _ernie: ("Ernie4_5_MoeSparseMoeBlock",),
    _gpt_oss: ("GptOssMLP",),
    _sigmoid: ("FlintSparseMoeBlock",),
    _sigmoid_and_bias("route_scale"): ("AfmoeSparseMoeBlock",),
    _sigmoid_and_bias("router_scaling_factor"): ("HYV3MoE",),
    _sigmoid_and_bias(None): ("MiniMaxM2SparseMoeBlock",),
    _sigmoid_and_bias("routed_scaling_factor"): ("MiniMaxM3VLSparseMoeBlock",),
    _laguna: ("LagunaSparseMoeBlock",),
    _lfm2: ("Lfm2MoeSparseMoeBlock",),
    _cohere2: ("Cohere2MoeSparseMoeBlock",),
    _deepseek_v2: ("DeepseekV2Moe", "DeepseekOcr2TextMoe", "UnlimitedOcrTextMoe"),
    _mistral4: ("Mistral4MoE",),
    _mistral_large4: ("MistralLarge4TextMoE",),
    _axk2: ("AXK2MoE",),
    _deepseek_v3: (
        "DeepseekV3MoE",
        "DeepseekV32MoE",
        "BailingHybridMoE",
        "Dots1MoE",
        "Dots3NoteTextMoE",
        "ExaoneMoeSparseMoEBlock",
        "Glm4MoeMoE",
        "Glm4MoeLiteMoE",
        "Glm4vMoeTextMoE",
        "Glm5NextTextMoE",
        "GlmMoeDsaMoE",
        "KimiLinearMoE",
        "MiMoV2FlashMoE",
        "NemotronHMoE",
        "SolarOpenMoE",
    ),
}
BLOCKS = {name: fields for fields, names in _CLASSES.items() for name in names}
# Blocks that return (hidden states, routing weights); their layers throw the latter away.
RETURN_PAIRS = frozenset({"GptOssMLP"})
