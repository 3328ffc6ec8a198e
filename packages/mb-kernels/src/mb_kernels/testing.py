"""What tests of MoE code share: one tolerance table by dtype, and routings that break things.

Letters: T tokens, E experts, K top-k.
"""

import torch
from torch import Tensor

# Relative Frobenius error against float64, by the dtype computed in.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}

ROUTINGS = ("uniform", "skewed", "one_expert", "empty_experts")


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64, on the CPU; NaN if either holds one."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    scale = want.norm().item()
    return (got - want).norm().item() / (scale if scale > 0 else 1.0)


def assert_close(name: str, got: Tensor, want: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Fail unless ``got`` is ``want`` within the tolerance of ``dtype`` (default: got's)."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    tolerance = TOLERANCES[dtype or got.dtype]
    error = relative_error(got, want)
    assert error <= tolerance, f"{name}: relative error {error:.2e} above {tolerance:.0e}"


def make_expert_ids(
    routing: str,
    tokens: int,
    num_experts: int,
    top_k: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Expert ids [T, K] int32, distinct within a token.

    "uniform" draws experts evenly; "skewed" by Zipf's law with exponent 1; "one_expert" sends each
    token's first choice to the last expert; "empty_experts" leaves every expert with an odd id idle
    (as far as top_k allows).
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: expected one of {', '.join(ROUTINGS)}; got {routing!r}.")
    score_TE = torch.rand(tokens, num_experts, generator=generator).log_().neg_().log_().neg_()
    ids = torch.arange(num_experts)
    if routing == "skewed":
        score_TE -= torch.log1p(ids.float())  # Gumbel top-k draws in proportion to 1 / (id + 1)
    elif routing == "one_expert":
        score_TE[:, -1] += 1e6
    elif routing == "empty_experts":
        score_TE[:, ids % 2 == 1] -= 1e6
    return score_TE.topk(top_k, dim=1).indices.to(device=device, dtype=torch.int32)
