"""The experts: E feed-forward networks with their weights stacked, run by one fused op.

Layout, Hugging Face's, so that importing a model is a rename: w1 is [E, F, D], or [E, 2F, D] with
the gate over the up projection for a gated activation; w2 is [E, D, F]. Expert e computes
`activation(x w1_e^T + b1_e) w2_e^T + b2_e`.

The shared expert is an expert that every token visits: the same op with E = 1, one row per token,
and its gate, if it has one, as routing weight.

Letters: E experts, D hidden, F expert ffn width, T or R tokens on this rank, K top-k, N rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels import Bins
from mb_kernels.activation import activate, activate_backward
from mb_kernels.exporting import is_exporting
from mb_kernels.recomputing import recomputed
from torch import Tensor, nn

from mb_layers.config import MoEConfig, a_config
from mb_layers.dispatch import Dispatched
from mb_layers.factored import LoRA, base_of, map_weight, weight_of
from mb_layers.frozen import FrozenWeight
from mb_layers.steps import expert_mlp_in_steps
from mb_layers.tensors import at_least_fp32, cast_alike, draw, to_plain

# A private name of torch, whose public calls set such hooks but do not tell of them.
_all_modules_are_watched = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)


class _StackedMLP(nn.Module):
    """Parameters `w1`, `w2` and, with `bias`, `b1`, `b2` of `num_experts` networks.

    working_copies: by parameter name, a copy of this rank's part in the dtype to compute with, used
        instead of the parameter. Whoever sets one keeps it equal to the parameter and passes its
        gradient on (`mb_parallel.optimizer.hold_working_copies`).
    """

    b1: nn.Parameter | None
    b2: nn.Parameter | None
    working_copies: dict[str, Tensor]

    def __init__(
        self,
        config: MoEConfig,
        num_experts: int,
        hidden: int,
        ffn: int,
        *,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.working_copies = _OfThisModule()
        rows = 2 * ffn if config.is_glu else ffn

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w1 = parameter(num_experts, rows, hidden)
        self.w2 = parameter(num_experts, hidden, ffn)
        self.register_parameter("b1", parameter(num_experts, rows) if bias else None)
        self.register_parameter("b2", parameter(num_experts, hidden) if bias else None)

    def reset_parameters(self) -> None:
        """Draw w1 from N(0, init_method_std), w2 from N(0, output_init_std); zero the biases.

        Adapters of `add_lora` are as they were at first.
        """
        config = self.config
        for name, std in (("w1", config.init_method_std), ("w2", config.output_std)):
            base, adapters = base_of(self, name)
            draw(getattr(self, name) if base is None else base, partial(nn.init.normal_, std=std))
            for adapter in adapters:
                if isinstance(adapter, LoRA):
                    adapter.reset_parameters()
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)

    def run(
        self,
        x_RD: Tensor,
        bins: Bins,
        weights_RK: Tensor,
        *,
        max_rows: int | None = None,
        x_stays: bool = True,
        home_P: Tensor | None = None,
    ) -> Tensor:
        """Return y_RD, each token's weighted sum over the experts that `bins` gives it."""
        config = self.config
        num_experts = bins.offsets_E1.shape[0] - 1
        parts = self._parts(num_experts) if self._in_parts() else None
        if not x_stays and (parts is not None or config.mlp_impl == "sparse"):
            x_RD = x_RD.clone()  # the fused op copies by itself, if it has to
        if parts is not None:
            return self._run_in_steps(x_RD, parts, bins, weights_RK)
        w1, w2, b1, b2 = self.local_parameters(num_experts)
        assert w1 is not None
        assert w2 is not None
        x_RD, w1, w2 = cast_alike(x_RD, w1, w2)
        arguments = (x_RD, w1, w2, bins, weights_RK)
        if config.mlp_impl == "sparse":
            return mb_kernels.sparse_expert_mlp(
                *arguments, activation=config.activation, recompute=config.recompute
            )
        return mb_kernels.expert_mlp(
            *arguments,
            activation=config.activation,
            b1_EF=b1,
            b2_ED=b2,
            max_rows=max_rows,
            recompute=config.recompute,
            saved_activation_bits=config.saved_activation_bits,
            fp8=config.fp8,
            x_stays=x_stays,
            home_P=home_P,
        )

    def stores_home(self) -> bool:
        """Whether `run` takes `home_P`: it calls `mb_kernels.expert_mlp`, and nothing after it.

        Hooks, its own or those of all modules, rule it out: they would see NaN as the output.
        """
        watched = self._forward_hooks or self._backward_hooks or self._backward_pre_hooks
        watched = watched or _all_modules_are_watched()
        fused = self.config.mlp_impl == "grouped" and not self._in_parts() and not watched
        return fused and self.config.experts_hidden_size % 16 == 0

    def _in_parts(self) -> bool:
        held = self._parameters  # getattr would add adapters to their weight
        frozen = any(isinstance(held.get(name), FrozenWeight) for name in ("w1", "w2"))
        return frozen or "parametrizations" in self._modules

    def local_parameters(self, num_experts: int) -> list[Tensor | None]:
        """w1, w2, b1 and b2 (None without biases) of the `num_experts` experts on this rank."""
        weights = [
            self.working_copies[name] if name in self.working_copies else getattr(self, name)
            for name in ("w1", "w2", "b1", "b2")
        ]
        return [None if w is None else to_plain(w, num_experts) for w in weights]

    def _parts(self, num_experts: int) -> tuple[Any, ...] | None:
        """The weights and their adapters unmerged, if there are any and they run step by step.

        Otherwise None: the weights are then read as `self.w1`, with their adapters merged. Never
        in 8-bit floats: rounding the sum adds more to what an adapter does than that itself.
        """
        config = self.config
        w1, w2 = weight_of(self, "w1"), weight_of(self, "w2")
        if isinstance(w1, Tensor) and isinstance(w2, Tensor):
            return None
        if config.fp8:
            raise ValueError(
                "expected fp8=False for experts with adapters, or with weights in few bits, got "
                "True; merge these, or build the layer without it"
            )
        if config.mlp_impl == "sparse" or config.saved_activation_bits is not None:
            return None
        plain = [None if b is None else to_plain(b, num_experts) for b in (self.b1, self.b2)]
        return (*(map_weight(w, lambda t: to_plain(t, num_experts)) for w in (w1, w2)), *plain)

    def _run_in_steps(
        self, x_RD: Tensor, weights: tuple[Any, ...], bins: Bins, weights_RK: Tensor
    ) -> Tensor:
        (x_RD,) = cast_alike(x_RD)
        w1, w2, b1, b2 = (
            None if w is None else map_weight(w, lambda t: t.to(x_RD.dtype)) for w in weights
        )
        arguments: tuple[Any, ...] = (x_RD, w1, w2, bins, weights_RK, self._activate)
        options: dict[str, Any] = {"b1": b1, "b2": b2}
        # Torch cannot run a saved program that holds a checkpoint.
        if not self.config.recompute or is_exporting():
            return expert_mlp_in_steps(*arguments, **options)
        return recomputed(expert_mlp_in_steps, *arguments, **options)

    def _activate(self, h_NF: Tensor) -> Tensor:
        # A saved program holds no function of ours, and a compiler decides itself what it keeps.
        # Compiled by torch 2.11 the function's gradient is wrong.
        if torch.compiler.is_compiling():
            return activate(at_least_fp32(h_NF), self.config.activation).to(h_NF.dtype)
        return _Activation.apply(h_NF, self.config.activation)


class _OfThisModule(dict[str, Tensor]):
    """Empty in a copied or pickled module: nobody would keep the copy's tensors equal."""

    def __reduce__(self) -> tuple[type[_OfThisModule], tuple[()]]:
        return _OfThisModule, ()


class _Activation(torch.autograd.Function):
    """An activation in fp32 that saves only the pre-activations, in the dtype they have."""

    @staticmethod
    def forward(ctx: Any, h_NF: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(h_NF)
        ctx.activation = activation
        return activate(at_least_fp32(h_NF), activation).to(h_NF.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        (h_NF,) = ctx.saved_tensors
        grad_h = activate_backward(at_least_fp32(grad_NF), at_least_fp32(h_NF), ctx.activation)
        return grad_h.to(h_NF.dtype), None


class Experts(_StackedMLP):
    """E experts: `w1` [E, F or 2F, D], `w2` [E, D, F]; with mlp_bias `b1`, `b2` too."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        a_config(config)
        super().__init__(
            config,
            config.num_experts,
            config.experts_hidden_size,
            config.ffn_hidden_size,
            bias=config.mlp_bias,
            device=device,
            dtype=dtype,
        )
        self.reset_parameters()

    def forward(self, dispatched: Dispatched) -> Tensor:
        """Return y_RD: each token's sum over its experts, weighted by its routing weights."""
        return self.run(
            dispatched.x_RD,
            dispatched.bins,
            dispatched.weights_RK,
            max_rows=dispatched.max_rows,
            x_stays=dispatched.x_stays,
            home_P=dispatched.home_P,
        )

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"{config.num_experts} x ({config.experts_hidden_size} -> {config.ffn_hidden_size} -> "
            f"{config.experts_hidden_size}), activation={config.activation!r}"
        )


class SharedExpert(_StackedMLP):
    """The expert that every token visits: `w1` [1, F or 2F, D], `w2` [1, D, F].

    With `shared_expert_gate` there is a parameter `gate` [1, D].
    """

    gate: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        assert config.shared_expert_hidden_size is not None
        super().__init__(
            config,
            1,
            config.hidden_size,
            config.shared_expert_hidden_size,
            bias=config.shared_expert_bias,
            device=device,
            dtype=dtype,
        )
        gate = torch.empty(1, config.hidden_size, device=device, dtype=dtype)
        self.register_parameter("gate", nn.Parameter(gate) if config.shared_expert_gate else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As for the experts; the gate from N(0, init_method_std)."""
        super().reset_parameters()
        if self.gate is not None:
            draw(self.gate, partial(nn.init.normal_, std=self.config.init_method_std))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the shared expert's share of the output for every token, [T, D]."""
        num_tokens = x_TD.shape[0]
        weights_T1 = self._weights(x_TD)
        if self.config.shared_expert_weighted_sum:
            weights_T1 = weights_T1 / (self.config.top_k + 1)
        rows_N = torch.arange(num_tokens, device=x_TD.device, dtype=torch.int32)
        offsets_E1 = torch.arange(2, device=x_TD.device, dtype=torch.int32) * num_tokens
        return self.run(x_TD, Bins(rows_N, rows_N, offsets_E1[1:], offsets_E1), weights_T1)

    def extra_repr(self) -> str:
        config = self.config
        widths = f"{config.hidden_size} -> {config.shared_expert_hidden_size} -> "
        return f"{widths}{config.hidden_size}, gate={config.shared_expert_gate}"

    def _weights(self, x_TD: Tensor) -> Tensor:
        if self.gate is None:
            return at_least_fp32(x_TD.new_ones(x_TD.shape[0], 1))
        x_TD, gate = cast_alike(x_TD, to_plain(self.gate, 1))
        return torch.sigmoid(at_least_fp32(x_TD @ gate.T))


class LatentMap(nn.Module):
    """One of the two maps around experts in a latent: x_TD to [T, L], or back.

    Args:
        inputs, outputs: widths.
        std: of its normal init.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        std: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std)."""
        draw(self.weight, partial(nn.init.normal_, std=self.std))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(*cast_alike(x, to_plain(self.weight, self.weight.shape[0])))

    def extra_repr(self) -> str:
        return " -> ".join(map(str, reversed(self.weight.shape)))
