"""Fields of the Mixture-of-Experts: everything that a layer of mb_layers can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mb_train.config.field import AT_LEAST_0, FRACTION, GIVEN, IS_0_OR_1, POSITIVE, flag, spec


@dataclass(frozen=True, kw_only=True)
class MoEFields:
    """The Mixture-of-Experts; everything that a layer of mb_layers can do."""

    moe_num_experts: int | None = flag(
        "experts of a feed-forward; default a dense model", bounds=POSITIVE, on_load="model",
        layer="num_experts", also=("--num-experts",), falsy_is_none=True,
    )  # fmt: skip
    moe_top_k: int = flag(
        "experts per token", 1, bounds=POSITIVE, on_load="said", layer="top_k",
        also=("--moe-router-topk",),
    )  # fmt: skip
    moe_capacity_factor: float = flag(
        "slots per expert over the even share; 0 drops no token (dMoE)", 0.0, bounds=AT_LEAST_0,
        on_load="said", in_training=True,
    )  # fmt: skip
    moe_eval_capacity_factor: float | None = flag(
        "the same in evaluation; default no other (ours)", bounds=POSITIVE, on_load="said",
        layer="eval_capacity_factor", in_training=True,
    )  # fmt: skip
    moe_min_capacity: int = flag(
        "but never fewer slots than this (ours)", 0, bounds=AT_LEAST_0, on_load="said",
        layer="min_capacity", needs=("moe_capacity_factor",), in_training=True,
    )  # fmt: skip
    moe_drop_policy: str = flag(
        "who is kept of an expert's tokens beyond its slots: the first, or the surest (ours)",
        "position", choices=("position", "probability"), on_load="said", layer="drop_policy",
        needs=("moe_capacity_factor",), in_training=True,
    )  # fmt: skip
    moe_ffn_hidden_size: int | None = flag(
        "width inside an expert; default --ffn-hidden-size", bounds=POSITIVE, on_load="model",
        in_force="expert_ffn_size",
    )  # fmt: skip
    moe_latent_size: int | None = flag(
        "width of a latent in which the experts compute, between two maps that all of a layer "
        "share; default none: the hidden state",
        bounds=POSITIVE, on_load="model", layer="latent_size", falsy_is_none=True,
    )  # fmt: skip
    moe_layer_freq: int = flag(
        "every n-th layer has experts, the first of them too", 1, bounds=POSITIVE,
        on_load="model", instead_of=("moe_layers",),
    )  # fmt: skip
    moe_first_k_dense: int = flag(
        "the first k layers have none (ours)", 0, bounds=AT_LEAST_0, on_load="model",
        instead_of=("moe_layers",),
    )  # fmt: skip
    moe_layers: list[int] | None = flag(  # noqa: RUF009, a field like the others
        "1 for each layer with experts and 0 for each without, in place of --moe-layer-freq and "
        "--moe-first-k-dense (ours)", bounds=IS_0_OR_1, on_load="model",
        instead_of=("moe_layer_freq", "moe_first_k_dense"),
    )  # fmt: skip
    moe_loss_weight: float = flag(
        "weight of the load-balancing loss, a mean over the layers", 0.1, bounds=AT_LEAST_0,
        on_load="said", layer="load_balancing_loss_weight", in_training=True,
    )  # fmt: skip
    moe_balance_over: str = flag(
        "balance the load over each micro-batch, each sequence or the global batch: all ranks' "
        "micro-batches of a step up to the one under way (ours)",
        "micro_batch", choices=("micro_batch", "sequence", "global_batch"), on_load="said",
        layer="balance_over", in_training=True,
    )  # fmt: skip
    moe_balance_by: str = flag(
        "which experts of a token the load-balancing loss counts: those that it visits or its best "
        "by score, before a bias and groups, as in Megatron Core (ours)",
        "visits", choices=("visits", "scores"), on_load="said",
        layer="balance_by", in_training=True,
    )  # fmt: skip
    moe_z_loss_weight: float = flag(
        "weight of the router's z-loss, a mean over the layers (ours)", 0.0, bounds=AT_LEAST_0,
        on_load="said", layer="z_loss_weight", in_training=True,
    )  # fmt: skip
    moe_router_type: str = flag(
        "how a token's experts are chosen: its best by score, or in training by logits that "
        "Sinkhorn's iteration balances over the tokens of a rank's micro-batch; or one after the "
        "other among those near the best, in training by chance, as Phi-3.5-MoE; or the experts "
        "choose their best tokens, of models that see whole texts (ours)",
        "topk", choices=("topk", "sinkhorn", "sparsemixer", "expert_choice"), on_load="said",
        in_training=True,
    )  # fmt: skip
    moe_router_noise: bool = flag(
        "noise on the router's scores in training, as wide as a learned map of the token says: "
        "noisy top-k (ours)", False, on_load="model",
    )  # fmt: skip
    moe_router_score_function: str = flag(
        "scores of the router", "softmax", choices=("softmax", "sigmoid"), on_load="said",
        layer="score_function",
    )  # fmt: skip
    moe_renormalize: bool = flag(
        "divide the routing weights of a token by their norm (ours)", False, on_load="said",
        layer="renormalize",
    )  # fmt: skip
    moe_renormalize_p: float = flag(
        "p of that norm (ours)", 1.0, choices=(1.0, 2.0), on_load="said", layer="renormalize_p",
        needs=("moe_renormalize",),
    )  # fmt: skip
    moe_router_topk_scaling_factor: float = flag(
        "multiply the routing weights by this", 1.0, bounds=POSITIVE, on_load="said",
        layer="routed_scaling_factor",
    )  # fmt: skip
    moe_weights_on_input: bool = flag(
        "scale the experts' input by the routing weights, not their output (ours)", False,
        on_load="said", layer="weights_on_input", also=("--moe-apply-probs-on-input",),
    )  # fmt: skip
    moe_num_zero_experts: int = flag(
        "experts more to choose from, which return their token (ours)", 0, bounds=AT_LEAST_0,
        on_load="model", layer="num_zero_experts",
    )  # fmt: skip
    moe_router_num_groups: int | None = flag(
        "split the experts into groups, of which a token chooses some", bounds=POSITIVE,
        on_load="said", layer="num_expert_groups", needs=("moe_router_group_topk", GIVEN),
    )  # fmt: skip
    moe_router_group_topk: int | None = flag(
        "groups that a token chooses", bounds=POSITIVE, on_load="said", layer="top_k_groups"
    )
    moe_router_group_score_top: int = flag(
        "a group's score is the sum of this many of its best experts' (ours)", 2, bounds=POSITIVE,
        on_load="said", layer="group_score_top", needs=("moe_router_num_groups",),
    )  # fmt: skip
    moe_router_enable_expert_bias: bool = flag(
        "balance the load by a bias on the choice of experts instead of a loss", False,
        on_load="model", layer="balancing_bias",
    )  # fmt: skip
    moe_router_bias_update_rate: float = flag(
        "how far a step moves that bias; about a tenth of this for softmax scores", 1e-3,
        bounds=AT_LEAST_0, on_load="said", needs=("moe_router_enable_expert_bias",),
        in_training=True,
    )  # fmt: skip
    moe_router_lr_mult: float = flag(
        "learning rate of the routers, in units of --lr; below 1 for Muon at high rates (ours)",
        1.0, bounds=POSITIVE, on_load="said", in_training=True,
    )  # fmt: skip
    moe_jitter_eps: float = flag(
        "noise on the router's input in training, uniform in 1 +- eps", 0.0, bounds=FRACTION,
        on_load="said", layer="jitter_eps", also=("--moe-input-jitter-eps",), in_training=True,
    )  # fmt: skip
    moe_uniform_expert_assignment: bool = flag(
        "for benchmarks: deal the tokens out evenly, whatever the scores (ours)", False,
        on_load="said", layer="uniform_assignment",
    )  # fmt: skip
    moe_router_fp32: bool = flag(
        "compute the router's scores in fp32 (ours)",
        True,
        on_load="said",
        layer="router_fp32",
        in_training=True,
    )
    moe_router_bias: bool = flag(
        "a learned bias on the router's scores (ours)", False, on_load="model",
        layer="router_bias",
    )  # fmt: skip
    moe_mlp_bias: bool = flag(
        "biases inside every expert (ours)", False, on_load="model", layer="mlp_bias"
    )
    moe_output_bias: bool = flag(
        "one bias on the output of the experts, as MegaBlocks has it (ours)", False,
        on_load="model", layer="output_bias",
    )  # fmt: skip
    moe_shared_expert_intermediate_size: int | None = flag(
        "width of an expert that every token visits; default none", bounds=POSITIVE,
        on_load="model", layer="shared_expert_hidden_size", falsy_is_none=True,
    )  # fmt: skip
    moe_shared_expert_gate: bool = flag(
        "weight the shared expert by a learned gate", False, on_load="model",
        layer="shared_expert_gate",
    )  # fmt: skip
    moe_shared_expert_weighted_sum: bool = flag(
        "average the shared expert with the k routed ones instead of adding it (ours)", False,
        on_load="said", layer="shared_expert_weighted_sum",
    )  # fmt: skip
    moe_shared_expert_bias: bool = flag(
        "biases inside the shared expert (ours)", False, on_load="model",
        layer="shared_expert_bias",
    )  # fmt: skip
    moe_mlp_impl: str = flag(
        "grouped matrix products, or MegaBlocks' block-sparse ones, over the same weights (ours)",
        "grouped", choices=("grouped", "sparse"), layer="mlp_impl", in_training=True,
    )  # fmt: skip
    moe_recompute: bool = flag(
        "recompute the experts' activations in the backward pass (ours)", False,
        layer="recompute", in_training=True,
    )  # fmt: skip
    moe_saved_activation_bits: int | None = flag(
        "keep the experts' activations for the backward pass in this many bits (ours)",
        choices=(4, 8), on_load="said", layer="saved_activation_bits", in_training=True,
    )  # fmt: skip

    def moe_arguments(self) -> dict[str, Any]:
        """Arguments of `mb_layers.MoEConfig` that have a field of their own here.

        The sizes, the activation and the init are the model's; see `TrainConfig`.
        """
        arguments = {
            layer: getattr(self, f.name)
            for f in fields(MoEFields)
            if (layer := spec(f).layer) is not None
        }
        if self.moe_router_group_topk is None:  # a token may choose of all groups
            arguments["num_expert_groups"] = None
        # Idle here, which a remark says, and refused there.
        if not self.moe_capacity_factor:
            arguments |= {"drop_policy": "position", "min_capacity": 0}
        if not self.moe_renormalize:
            arguments["renormalize_p"] = 1.0
        return arguments | {"capacity_factor": self.moe_capacity_factor or None}

    @staticmethod
    def moe_argument_names() -> dict[str, str]:
        """The field behind each argument of `mb_layers.MoEConfig`."""
        own = {spec(f).layer or "": f.name for f in fields(MoEFields) if spec(f).layer}
        shared = {"activation": "activation", "ffn_hidden_size": "moe_ffn_hidden_size"}
        return own | shared | {"capacity_factor": "moe_capacity_factor"}

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts."""
        return layer in self.expert_layers(layer + 1)

    def expert_layers(self, layers: int) -> Sequence[int]:
        """Those of so many layers that have experts."""
        if self.moe_num_experts is None:
            return range(0)
        if self.moe_layers is not None:
            return [layer for layer, one in enumerate(self.moe_layers[:layers]) if one]
        first = -(-self.moe_first_k_dense // self.moe_layer_freq) * self.moe_layer_freq
        return range(first, layers, self.moe_layer_freq)

    @property
    def experts_see_others(self) -> bool:
        """What a token gets of the experts depends on the other tokens that are computed with it.

        They take places of a capacity, or are chosen before it.
        """
        return self.moe_num_experts is not None and (
            self.moe_capacity_factor > 0 or self._experts_choose
        )

    @property
    def _experts_choose(self) -> bool:
        return self.moe_num_experts is not None and self.moe_router_type == "expert_choice"

    def check_moe(self) -> None:
        """Raise ValueError for a choice of experts that does not work."""
        experts, zero = self.moe_num_experts, self.moe_num_zero_experts
        if experts is not None and self.moe_top_k > experts + zero:
            both = " and --moe-num-zero-experts together" if zero else ""
            raise ValueError(
                f"Expected --moe-top-k of at most --moe-num-experts{both}, got {self.moe_top_k} "
                f"and {experts + zero}: a token can choose an expert only once."
            )
        if experts is not None and self.moe_router_type != "topk":
            self._check_router()

    def _check_router(self) -> None:
        """Raise ValueError for what another choice than that of the best by score would ignore."""
        kind, function = self.moe_router_type, self.moe_router_score_function
        ignored = {
            "--moe-router-group-topk": self.moe_router_group_topk is not None,
            "--moe-router-enable-expert-bias": self.moe_router_enable_expert_bias,
            "--moe-router-noise": self.moe_router_noise,
        }
        if kind in ("sparsemixer", "expert_choice"):
            ignored |= {
                "--moe-renormalize": self.moe_renormalize,
                "--moe-uniform-expert-assignment": self.moe_uniform_expert_assignment,
            }
        if kind == "sparsemixer":
            ignored[f"--moe-router-score-function {function}"] = function != "softmax"
        if kind == "expert_choice":
            ignored |= {
                "--moe-num-zero-experts": self.moe_num_zero_experts > 0,
                "--moe-balance-by scores": self.moe_balance_by == "scores",
                "--moe-balance-over sequence": self.moe_balance_over == "sequence",
            }
        for words in (words for words, given in ignored.items() if given):
            raise ValueError(
                f"Expected --moe-router-type topk with {words}, which bears on a choice by "
                f"score, got {kind}. Leave one of the two out."
            )
