"""Fields of models whose layers are halves of blocks, Mamba-2 and short convolutions among them."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import POSITIVE, flag

_PATTERN = ("hybrid_layer_pattern",)


@dataclass(frozen=True, kw_only=True)
class HybridFields:
    """Which layer is what, and the sizes of those of Mamba-2 and of short convolutions."""

    hybrid_layer_pattern: str | None = flag(
        "a letter for each layer, which is one half of a block: Mamba-2 (M), a gated short "
        "convolution (S, ours), attention (*), a dense feed-forward (-) or experts (E); default "
        "whole blocks",
        also=("--hybrid-override-pattern",), on_load="model",
    )  # fmt: skip
    mtp_hybrid_override_pattern: str | None = flag(
        "such letters for the layers of each module of --mtp-num-layers, behind such a model; or "
        "behind its pattern, once for each module: M*ME/*E/*E", on_load="fixed",
        in_force="mtp_pattern", needs=[_PATTERN, ("mtp_num_layers",)],
    )  # fmt: skip
    mamba_num_heads: int | None = flag(
        "Mamba layers: heads, each with a state; default 2 x hidden size / --mamba-head-dim",
        bounds=POSITIVE, on_load="model", in_force="mamba_sizes", needs=_PATTERN,
    )  # fmt: skip
    mamba_head_dim: int = flag(
        "Mamba layers: width of what a head writes", 64, bounds=POSITIVE, on_load="model",
        in_force="mamba_sizes", needs=_PATTERN,
    )  # fmt: skip
    mamba_num_groups: int = flag(
        "Mamba layers: groups of heads, each of which writes and reads in one direction", 8,
        bounds=POSITIVE, on_load="model", in_force="mamba_sizes", needs=_PATTERN,
    )  # fmt: skip
    mamba_state_dim: int = flag(
        "Mamba layers: width of these directions", 128, bounds=POSITIVE, on_load="model",
        in_force="mamba_sizes", needs=_PATTERN,
    )  # fmt: skip
    mamba_conv_kernel_dim: int = flag(
        "Mamba layers: tokens that the convolution before the state sums up (ours)", 4,
        bounds=POSITIVE, on_load="model", in_force="mamba_sizes", needs=_PATTERN,
    )  # fmt: skip
    short_conv_kernel_dim: int = flag(
        "layers of a short convolution: tokens that it sums up (ours)", 3,
        bounds=POSITIVE, on_load="model", in_force="conv_taps", needs=_PATTERN,
    )  # fmt: skip
