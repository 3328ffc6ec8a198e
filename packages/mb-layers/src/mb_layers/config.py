"""Every choice of an MoE layer in one frozen, self-checking dataclass.

A config holds plain values only: no tensor, no process group, no callable. `__post_init__` refuses
what cannot work and says what was expected, what it got and what to change, so that a wrong value
fails at construction and not in a backward pass.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from mb_kernels.activation import is_glu, parse

from mb_layers import arguments

ScoreFunction = Literal["softmax", "sigmoid"]
BalanceOver = Literal["micro_batch", "sequence", "global_batch"]
BalanceBy = Literal["visits", "scores"]
DropPolicy = Literal["position", "probability"]
MLPImpl = Literal["grouped", "sparse"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What `MoE` and `dMoE` are built from. All fields are keyword-only.

    Sizes:
        hidden_size: D, the width of the tokens.
        ffn_hidden_size: F, the inner width of one expert.
        num_experts: E.
        top_k: K, experts per token.
        activation: a name of `mb_kernels.activation`: "swiglu", "geglu", "geglu_tanh", "reglu" and
            GPT-OSS's clamped "swigluoai" are gated (w1 is [E, 2F, D], gate over up), and take
            numbers: "swiglu(limit=10)"; "gelu", "gelu_tanh", "silu", "relu" and "squared_relu" are
            not (w1 is [E, F, D]).
        latent_size: the routed experts compute between two maps that all share, in so many channels
            instead of D: y = up(experts(down(x))) (Nemotron 3's LatentMoE). The router and the
            shared expert take x. None: no such maps.

    Router:
        score_function: "softmax" over all experts, or "sigmoid" of each logit (DeepSeek-V3).
        renormalize: divide the K weights of a token by their norm. With softmax and p=1 this is
            softmax after top-k.
        renormalize_p: p of that norm, 1 or 2; refused without renormalize, but for 1.
        routed_scaling_factor: the weights are multiplied by it last.
        num_expert_groups, top_k_groups: group-limited routing. Experts are split into
            `num_expert_groups` runs of equal length, and a token chooses among the experts of its
            best `top_k_groups` groups. None: no groups.
        group_score_top: a group's score is the sum of this many of its best experts' scores.
        balancing_bias: keep a buffer `router.balancing_bias` [E], added to the scores for the
            choice of experts alone (arXiv 2408.15664). `update_balancing_bias` moves it.
        jitter_eps: in training the router sees x times uniform noise in [1 - eps, 1 + eps].
        uniform_assignment: for benchmarks: slot s goes to expert s mod E, whatever the scores; its
            weight is the one of the router's choice.
        num_zero_experts: Z experts more to choose from, of ids E to E + Z - 1, that return their
            token (LongCat-Flash). The router, its bias and the counts then have E + Z entries.
        weights_on_input: the routing weights scale the experts' input, not their output (Llama-4).
        router_fp32: compute the logits in fp32. False: in the dtype of the tokens.
        router_bias: a learned bias [E] on the logits.

    Biases and the shared expert:
        mlp_bias: biases b1 [E, F or 2F] and b2 [E, D] inside every expert.
        output_bias: one bias [D] on the experts' output, as MegaBlocks has it.
        shared_expert_hidden_size: width of an expert that every token visits; None: no such
            expert. It has the activation of the others.
        shared_expert_gate: weight it per token by the sigmoid of a learned linear map (Qwen2-MoE).
        shared_expert_weighted_sum: y = (shared + K * (routed + bias)) / (K + 1) instead of the
            plain sum.
        shared_expert_bias: biases inside the shared expert.

    Losses, none of them in eval mode:
        load_balancing_loss_weight, z_loss_weight: their weights in `MoEOutput.aux_loss`.
        balance_over: balance the experts' load over each "micro_batch", over each "sequence", or
            over the "global_batch" (see `mb_layers.losses`; the layer needs `reduce_counts`).
        balance_by: which experts of a token the load-balancing loss counts: those of its "visits",
            or the best K by "scores", before a balancing bias, groups or the caller's ids
            (DeepSeek-V3, arXiv 2412.19437, eq. 18, and Megatron Core since 2025).
        sequence_dim: the dimension of x [..., D] along which a sequence runs, for "sequence": -2
            for [B, S, D], 0 for Megatron's [S, B, D].

    Capacity, for `MoE` (None for `dMoE`, which drops nothing; the other three are refused then):
        capacity_factor: an expert takes at most ceil(factor * K * T / E) slots; slots of padding
            and of zero experts are not among the K * T.
        eval_capacity_factor: the factor in eval mode; None: the same.
        min_capacity: but never fewer slots than this.
        drop_policy: who is kept when there are more: the first by "position", or the ones with
            the largest weight ("probability").

    Init, memory and kernels:
        init_method_std: normal init of the router and w1.
        output_init_std: of w2; None means init_method_std.
        mlp_impl: how the experts compute, over the same parameters: "grouped" matrix products, or
            MegaBlocks' block-"sparse" ones, for which F must be a multiple of 128.
        recompute: the experts save only the tokens for the backward pass, and recompute the rest.
        saved_activation_bits: 8 or 4: the experts save their pre-activations rounded to as many
            bits, a half or a quarter of bf16's memory. The output is exact, gradients are not
            (docs/memory.md has each activation's error). Not for relu and reglu, whose derivative
            jumps at 0: what rounds to 0 would lose its gradient altogether.
        fp8: the experts, the shared one too, multiply rows and weights in 8-bit floats, each row
            and each output channel with a scale of its own (`mb_kernels.expert_mlp`). Weights,
            their gradients and everything else stay as they are. On a GPU for bf16 alone, on
            NVIDIA's from Ada and Hopper on and AMD's MI300, MI350 and RX 9070; it has run on
            Hopper alone.

    Raises:
        ValueError: a field out of its range, or fields that contradict each other.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int = 1
    activation: str = "swiglu"
    latent_size: int | None = None

    score_function: ScoreFunction = "softmax"
    renormalize: bool = False
    renormalize_p: float = 1.0
    routed_scaling_factor: float = 1.0
    num_expert_groups: int | None = None
    top_k_groups: int | None = None
    group_score_top: int = 2
    balancing_bias: bool = False
    jitter_eps: float = 0.0
    uniform_assignment: bool = False
    num_zero_experts: int = 0
    weights_on_input: bool = False
    router_fp32: bool = True
    router_bias: bool = False

    mlp_bias: bool = False
    output_bias: bool = False
    shared_expert_hidden_size: int | None = None
    shared_expert_gate: bool = False
    shared_expert_weighted_sum: bool = False
    shared_expert_bias: bool = False

    load_balancing_loss_weight: float = 0.01
    z_loss_weight: float = 0.0
    balance_over: BalanceOver = "micro_batch"
    balance_by: BalanceBy = "visits"
    sequence_dim: int = -2

    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    min_capacity: int = 0
    drop_policy: DropPolicy = "position"

    init_method_std: float = 0.02
    output_init_std: float | None = None
    mlp_impl: MLPImpl = "grouped"
    recompute: bool = False
    saved_activation_bits: int | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_type(field.name, value, str(field.type))
        arguments.at_least_1(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )
        if self.top_k > self.num_choices:
            raise ValueError(
                f"expected top_k <= num_experts, got top_k={self.top_k} with "
                f"num_experts={self.num_experts}; a token can choose an expert only once"
            )
        if parse(self.activation).interleaved:  # raises for what is no activation
            raise ValueError(
                "expected an activation whose gate lies over up in w1 and b1, got "
                f"{self.activation!r}; leave out `interleaved`, and reorder the rows of w1 and b1"
            )
        arguments.one_of(get_args(ScoreFunction), score_function=self.score_function)
        arguments.one_of(get_args(BalanceOver), balance_over=self.balance_over)
        arguments.one_of(get_args(BalanceBy), balance_by=self.balance_by)
        arguments.one_of(get_args(DropPolicy), drop_policy=self.drop_policy)
        arguments.one_of(get_args(MLPImpl), mlp_impl=self.mlp_impl)
        if self.sequence_dim == -1:
            raise ValueError(
                "expected sequence_dim to be the dimension of x [..., D] along which a sequence "
                "runs, got -1, which is D"
            )
        if self.renormalize_p not in (1, 2):
            raise ValueError(
                f"expected renormalize_p of 1 or 2, got {self.renormalize_p}; "
                "to leave the weights as they are, set renormalize=False"
            )
        if self.renormalize_p != 1 and not self.renormalize:
            raise ValueError(
                f"expected renormalize=True with renormalize_p={self.renormalize_p}, got False: "
                "the weights are not divided by their norm; change one of the two"
            )
        self._check_groups()
        self._check_shared_expert()
        if self.mlp_impl == "sparse":
            self._check_sparse()
        if self.saved_activation_bits is not None:
            self._check_saved_activations()
        if not 0 <= self.jitter_eps < 1:
            raise ValueError(
                f"expected 0 <= jitter_eps < 1, got {self.jitter_eps}; 0 turns jitter off"
            )
        arguments.at_least_0(
            load_balancing_loss_weight=self.load_balancing_loss_weight,
            z_loss_weight=self.z_loss_weight,
            init_method_std=self.init_method_std,
            output_init_std=self.output_init_std or 0.0,
            num_zero_experts=self.num_zero_experts,
            min_capacity=self.min_capacity,
        )
        if not (math.isfinite(self.routed_scaling_factor) and self.routed_scaling_factor > 0):
            raise ValueError(
                f"expected a finite routed_scaling_factor > 0, got {self.routed_scaling_factor}"
            )
        self._check_capacity()
        self._check_weights_on_input()
        self._check_latent()
        if self.top_k == 1 and self.renormalize:
            warnings.warn(
                "top_k=1 with renormalize=True makes every routing weight exactly 1: the model's "
                "loss then gives the router no gradient, only the auxiliary losses train it. "
                "Set renormalize=False for top-1 routing.",
                stacklevel=3,
            )

    @property
    def is_glu(self) -> bool:
        """Whether the activation is gated, so that w1 holds two matrices per expert."""
        return is_glu(self.activation)

    @property
    def num_choices(self) -> int:
        """How many experts a token chooses among: E, and the zero experts."""
        return self.num_experts + self.num_zero_experts

    @property
    def output_std(self) -> float:
        """Standard deviation of what adds to the residual at the start."""
        return self.init_method_std if self.output_init_std is None else self.output_init_std

    @property
    def experts_hidden_size(self) -> int:
        """Channels that the routed experts take and return: D, or those of the latent."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    def _check_capacity(self) -> None:
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not (math.isfinite(factor) and factor > 0):
                raise ValueError(
                    f"expected a finite {name} > 0, got {factor}; for a layer that drops no token "
                    "use dMoE with capacity_factor=None"
                )
        if self.capacity_factor is None:
            arguments.none_without_capacity(
                eval_capacity_factor=(self.eval_capacity_factor, None),
                min_capacity=(self.min_capacity, 0),
                drop_policy=(self.drop_policy, "position"),
            )

    def _check_weights_on_input(self) -> None:
        if self.weights_on_input and self.drop_policy == "probability":
            raise ValueError(
                "expected drop_policy='position' with weights_on_input=True, got 'probability'; "
                "change one of the two"
            )
        if self.weights_on_input and self.shared_expert_weighted_sum:
            raise ValueError(
                "expected shared_expert_weighted_sum=False with weights_on_input=True, got both; "
                "leave one out"
            )

    def _check_latent(self) -> None:
        if self.latent_size is None:
            return
        arguments.at_least_1(latent_size=self.latent_size)
        for name in ("mlp_bias", "num_zero_experts"):
            if value := getattr(self, name):
                raise ValueError(
                    f"expected {name}={type(value)(0)} with latent_size, got {value}; leave one of "
                    "the two out"
                )

    def _check_shared_expert(self) -> None:
        if self.shared_expert_hidden_size is not None:
            arguments.at_least_1(shared_expert_hidden_size=self.shared_expert_hidden_size)
            return
        for name in ("gate", "weighted_sum", "bias"):
            if getattr(self, f"shared_expert_{name}"):
                raise ValueError(
                    f"expected shared_expert_hidden_size with shared_expert_{name}=True, got None; "
                    "give the shared expert a width"
                )

    def _check_sparse(self) -> None:
        for name in ("ffn_hidden_size", "shared_expert_hidden_size"):
            width = getattr(self, name)
            if width is not None and width % 128:
                raise ValueError(
                    f"expected {name} to be a multiple of 128 for mlp_impl='sparse', got {width}; "
                    "mlp_impl='grouped' takes any width"
                )
        if self.mlp_bias or self.shared_expert_bias:
            raise ValueError(
                "expected no biases inside the experts for mlp_impl='sparse', got "
                f"mlp_bias={self.mlp_bias}, shared_expert_bias={self.shared_expert_bias}; "
                "use mlp_impl='grouped'"
            )
        if self.fp8:
            raise ValueError(
                "expected fp8=False with mlp_impl='sparse', got True; use mlp_impl='grouped'"
            )

    def _check_saved_activations(self) -> None:
        if self.saved_activation_bits not in (4, 8):
            raise ValueError(
                "expected saved_activation_bits to be 4, 8 or None, "
                f"got {self.saved_activation_bits!r}"
            )
        for name, value, remedy in (
            (
                "activation",
                parse(self.activation).function == "relu",
                "values that round to 0 would lose their gradient; use recompute=True",
            ),
            ("recompute", self.recompute, "recompute saves no activations at all"),
            ("mlp_impl", self.mlp_impl == "sparse", "use mlp_impl='grouped'"),
        ):
            if value:
                raise ValueError(
                    f"expected saved_activation_bits=None with {name}={getattr(self, name)!r}, "
                    f"got {self.saved_activation_bits}; {remedy}"
                )

    def _check_groups(self) -> None:
        if self.num_expert_groups is None and self.top_k_groups is None:
            return
        if self.num_zero_experts:
            raise ValueError(
                f"expected num_zero_experts=0 with expert groups, got {self.num_zero_experts}; "
                "leave one of the two out"
            )
        if self.num_expert_groups is None or self.top_k_groups is None:
            raise ValueError(
                "expected num_expert_groups and top_k_groups together, got "
                f"num_expert_groups={self.num_expert_groups}, top_k_groups={self.top_k_groups}"
            )
        arguments.at_least_1(
            num_expert_groups=self.num_expert_groups,
            top_k_groups=self.top_k_groups,
            group_score_top=self.group_score_top,
        )
        if self.num_experts % self.num_expert_groups:
            raise ValueError(
                f"expected num_expert_groups to divide num_experts, got {self.num_expert_groups} "
                f"groups for {self.num_experts} experts"
            )
        per_group = self.num_experts // self.num_expert_groups
        if self.top_k_groups > self.num_expert_groups:
            raise ValueError(
                f"expected top_k_groups <= num_expert_groups={self.num_expert_groups}, "
                f"got {self.top_k_groups}"
            )
        if self.group_score_top > per_group:
            raise ValueError(
                f"expected group_score_top <= {per_group}, the experts in one group, "
                f"got {self.group_score_top}; lower it, or take fewer groups"
            )
        if self.top_k > self.top_k_groups * per_group:
            raise ValueError(
                f"expected top_k <= {self.top_k_groups * per_group}, the experts in "
                f"{self.top_k_groups} groups of {per_group}, got {self.top_k}; raise top_k_groups"
            )


def a_config(config: Any) -> None:
    """Check that this is a MoEConfig."""
    if not isinstance(config, MoEConfig):
        raise ValueError(
            f"expected a MoEConfig, got {arguments.described(config)}; MegaBlocks' Arguments are "
            "for mb_layers.compat.dmoe.dMoE or mb_layers.compat.layer_from_arguments"
        )


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}


def _plain(value: Any) -> Any:
    """A number or flag as Python's own: NumPy's are equal to it, but json writes none of them."""
    # NumPy's flags are no kind of number. NumPy 2 has renamed their type, and is not imported here.
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    for kind, plain in ((Integral, int), (Real, float)):
        if isinstance(value, kind):
            return value if isinstance(value, bool) else plain(value)
    return value


def _check_type(name: str, value: object, annotation: str) -> None:
    """Refuse a value whose type is not the field's, above all a string for a number or a flag."""
    kind, _, optional = annotation.partition(" | ")
    if optional and value is None:
        return
    kinds = _TYPES.get(kind, (str,))
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(
            f"expected {name} to be {kind if kind in _TYPES else 'str'}"
            f"{' or None' if optional else ''}, got {value!r} of type {type(value).__name__}"
        )
