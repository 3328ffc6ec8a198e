"""``grouped_experts``: the expert networks alone, on rows that somebody else has sorted.

For frameworks with routing and permutation of their own, gate and up weights apart (torchtitan's
w1, w2, w3): no concatenated copy is made.

Letters: R rows, D hidden, F ffn width, E experts.
"""

import torch
from torch import Tensor

from mb_kernels.activation import parse
from mb_kernels.elementwise import op as elementwise  # noqa: F401  (registers the ops)
from mb_kernels.grouped_gemm.op import check_sizes, grouped_gemm, offsets_of
from mb_kernels.runtime import checks


def grouped_experts(
    x_RD: Tensor,
    tokens_per_expert_E: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    *,
    activation: str = "swiglu",
) -> Tensor:
    """Each row through the network of its expert.

    Args:
        x_RD: [R, D], rows of expert 0 first; fp32, bf16 or fp16.
        tokens_per_expert_E: [E] int32 or int64 on the device of x_RD. Rows that it does not count
            give zeros.
        w1: [E, F, D], with w3 the gate's; without, for a GLU, [E, 2F, D], gate over up.
        w2: [E, D, F].
        w3: [E, F, D], the up-projection of a GLU.
        activation: a name from ``mb_kernels.activation``.

    Returns:
        [R, D] in the dtype of x_RD. Differentiable in x_RD and the weights; keeps x_RD, the
        pre-activations and the activations.

    Raises:
        ValueError: unknown activation, w3 without a GLU; sizes, dtypes or devices that do not
            match; on a CPU, a count below 0 or more rows together than x_RD has.
    """
    kind = parse(activation)
    glu = kind.gated
    if w3 is not None and kind.parts == 1:
        what = "has its gate between the rows of w1" if glu else "has no gate"
        raise ValueError(f"w3: expected None for {activation}, which {what}; got a tensor.")
    others = {"w1": w1, "w2": w2} | ({} if w3 is None else {"w3": w3})
    checks.require_same("x_RD", x_RD, **others)
    if x_RD.ndim != 2 or w2.ndim != 3 or w2.shape[1] != x_RD.shape[1]:
        raise ValueError(
            f"w2: expected [E, D, F] with the D of x_RD {tuple(x_RD.shape)}; got {tuple(w2.shape)}."
        )
    experts, hidden, ffn = w2.shape
    columns = 2 * ffn if glu and w3 is None else ffn
    for name, w, shape in (
        ("w1", w1, (experts, columns, hidden)),
        ("w3", w3, (experts, ffn, hidden)),
    ):
        if w is not None and w.shape != shape:
            raise ValueError(
                f"{name}: expected {shape} for {activation}, w2 {tuple(w2.shape)} and "
                f"{'no w3' if w3 is None else 'a w3'}; got {tuple(w.shape)}."
            )
    check_sizes("tokens_per_expert_E", tokens_per_expert_E, experts, x_RD.shape[0])
    checks.require_device("x_RD", x_RD, tokens_per_expert_E=tokens_per_expert_E)
    offsets_E1 = offsets_of(tokens_per_expert_E)
    h = grouped_gemm(x_RD, w1, offsets_E1)
    if w3 is None:
        a = torch.ops.mb.activation(h, activation)
    else:
        a = torch.ops.mb.gated_activation(h, grouped_gemm(x_RD, w3, offsets_E1), activation)
    return grouped_gemm(a, w2, offsets_E1)
