"""The arguments of ``expert_mlp``: checks, and zeros for widths that kernels do not take.

Letters: T tokens, D hidden, F ffn width (2F in w1 for GLU), E experts, K top-k.
"""

import torch
from torch import Tensor

from mb_kernels.activation import is_glu, parse
from mb_kernels.bins import Bins
from mb_kernels.runtime import checks
from mb_kernels.runtime.registration import debugging
from mb_kernels.runtime.widths import lacking, widened


def check_experts(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    activation: str,
) -> None:
    """Raise ValueError unless the required arguments fit together."""
    checks.require_same("x_TD", x_TD, w1_EFD=w1_EFD, w2_EDF=w2_EDF)
    checks.require_floating("weights_TK", weights_TK)
    checks.require_device("x_TD", x_TD, weights_TK=weights_TK)
    checks.require_bins("x_TD", x_TD, bins)
    if x_TD.ndim != 2 or w2_EDF.ndim != 3 or w2_EDF.shape[1] != x_TD.shape[1]:
        raise ValueError(
            "w2_EDF: expected [E, D, F] with the D of x_TD [T, D] "
            f"{tuple(x_TD.shape)}; got {tuple(w2_EDF.shape)}."
        )
    experts, hidden, ffn = w2_EDF.shape
    columns = 2 * ffn if is_glu(activation) else ffn
    if w1_EFD.shape != (experts, columns, hidden):
        raise ValueError(
            f"w1_EFD: expected {(experts, columns, hidden)} for {activation} and w2_EDF "
            f"{tuple(w2_EDF.shape)}; got {tuple(w1_EFD.shape)}. A GLU holds gate over up: "
            "[E, 2F, D]."
        )
    if weights_TK.ndim != 2 or weights_TK.shape[0] != x_TD.shape[0] or weights_TK.shape[1] < 1:
        raise ValueError(
            f"weights_TK: expected [{x_TD.shape[0]}, top_k], a row per token, of at least one "
            f"choice; got {tuple(weights_TK.shape)}."
        )
    slots = weights_TK.numel()
    sizes = (bins.order_N.shape, bins.inverse_N.shape, bins.offsets_E1.shape)
    if sizes != ((slots,), (slots,), (experts + 1,)):
        raise ValueError(
            f"bins: expected {slots} slots and {experts} experts; got "
            f"{bins.order_N.shape[0]} and {bins.offsets_E1.shape[0] - 1}. "
            "Build them with bin_tokens(expert_ids_TK, num_experts)."
        )


def check_biases(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    b1_EF: Tensor | None,
    b2_ED: Tensor | None,
) -> None:
    """Raise ValueError unless the biases, if given, fit the weights."""
    for name, bias, shape in (
        ("b1_EF", b1_EF, tuple(w1_EFD.shape[:2])),
        ("b2_ED", b2_ED, tuple(w2_EDF.shape[:2])),
    ):
        if bias is None:
            continue
        checks.require_floating(name, bias)
        checks.require_device("x_TD", x_TD, **{name: bias})
        if tuple(bias.shape) != shape:
            raise ValueError(
                f"{name}: expected {shape}, a bias for each row of every expert's weight; got "
                f"{tuple(bias.shape)}."
            )


def check_float8(activation: str) -> None:
    """Raise ValueError for an activation whose kernels in 8 bits spill registers."""
    if parse(activation).interleaved:
        raise ValueError(
            f"fp8: expected an activation whose gate lies over up; got {activation!r}. Leave out "
            "`interleaved`, and reorder the rows of w1 and b1."
        )


def bounded(bins: Bins, weights_TK: Tensor, max_rows: int) -> tuple[Bins, Tensor]:
    """Bins of ``max_rows`` rows; weights that are NaN if there are more.

    A slot whose row is beyond them takes the last row, which its weight makes NaN: as a dropped
    slot it would be a zero among numbers.
    """
    if debugging(bins.offsets_E1):
        checks.debug_offsets(bins.offsets_E1, max_rows)
    weights_TK = torch.where(bins.offsets_E1[-1] > max_rows, torch.nan, weights_TK)
    bounded = Bins(
        bins.order_N[:max_rows],
        bins.inverse_N.clamp(max=max_rows - 1),
        bins.tokens_per_expert_E,
        bins.offsets_E1.clamp(max=max_rows),
    )
    return bounded, weights_TK


def fitted(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    b1_EF: Tensor | None,
    b2_ED: Tensor | None,
    activation: str,
    *,
    even: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The arguments, padded with zeros to widths that the op takes.

    Kernels take multiples of 16. ``even``: pre-activations are saved two to a byte, so that there
    must be an even number of them. The zeros add nothing to the output.
    """
    hidden, ffn = w2_EDF.shape[1:]
    more_D, more_F = lacking(x_TD, hidden), lacking(x_TD, ffn)
    if (even and w1_EFD.shape[1] % 2) or (ffn == 0 and b2_ED is not None):
        more_F = 16 - ffn % 16  # for F = 0 the op returns zeros, without the bias b2
    if not (more_D or more_F):
        return x_TD, w1_EFD, w2_EDF, b1_EF, b2_ED
    kind = parse(activation)
    more_rows = more_F * (2 if kind.gated else 1) // kind.parts

    def in_parts(w: Tensor) -> Tensor:  # [E, 2, F, ...] where gate lies over up, else [E, 1, ...]
        return w.unflatten(1, (kind.parts, w.shape[1] // kind.parts))

    return (
        widened(x_TD, more_D),
        widened(in_parts(w1_EFD), more_D, more_rows).flatten(1, 2),
        widened(w2_EDF, more_F, more_D),
        None if b1_EF is None else widened(in_parts(b1_EF), more_rows).flatten(1, 2),
        None if b2_ED is None else widened(b2_ED, more_D),
    )
