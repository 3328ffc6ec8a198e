"""The scan of a state space from its definition in fp64; gradients against autograd's."""

import pytest
import torch
from mb_kernels import reference, state_space_scan
from mb_kernels.runtime.plan import plan_for
from mb_kernels.state_space import has_state_space_kernels
from mb_kernels.targets.table import TARGETS
from mb_kernels.testing import assert_close

NAMES = ("x", "b", "c", "dt", "A", "D", "state")


def by_hand(x, b, c, dt, A, D, begins, state):
    """A token at a time."""
    heads_of_a_group = x.shape[2] // b.shape[2]
    b, c = (t.repeat_interleave(heads_of_a_group, 2) for t in (b, c))
    outputs = []
    for i in range(x.shape[1]):
        if begins is not None:
            state = state * ~begins[:, i, None, None, None]
        fading = (dt[:, i] * A).exp()[..., None, None]
        state = fading * state + dt[:, i, :, None, None] * b[:, i, :, :, None] * x[:, i, :, None]
        outputs.append((c[:, i, :, :, None] * state).sum(2) + D[:, None] * x[:, i])
    return (torch.stack(outputs, 1) if outputs else x * 0), state


def make(B, S, H, G, N, P, *, dtype=torch.float64, device="cpu", fast=False):
    """Tensors by `NAMES` and where documents begin; `fast`: at some tokens nothing remains.

    Their mean is not 0, or the gradient of A would be a small difference of large sums.
    """
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return 1 + torch.randn(shape, generator=generator, dtype=torch.float64)

    dt, A = normal(B, S, H).exp() * 0.1, -torch.linspace(0.1, 4.0, H, dtype=torch.float64)
    if fast:
        dt[:, ::3] *= 100
    x, b, c = normal(B, S, H, P), normal(B, S, G, N), normal(B, S, G, N)
    made = (x, b, c, dt, A, normal(H), normal(B, H, N, P))
    wide = dtype if dtype is torch.float64 else torch.float32
    dtypes = (dtype, dtype, dtype, wide, wide, wide, wide)
    tensors = [t.to(device, d).requires_grad_() for t, d in zip(made, dtypes, strict=True)]
    return tensors, torch.rand(B, S, generator=generator).to(device) < 0.2


def weights_like(t):
    waves = torch.sin(torch.arange(t.numel(), dtype=torch.float64)) / 2
    return (waves + 1).view(t.shape).to(t.device)


def both(function, tensors, begins, *, state=True):
    """Outputs and gradients of a fixed projection, by name."""
    given = tensors if state else tensors[:6]
    if function is by_hand:
        y, last = by_hand(*tensors[:6], begins, tensors[6] if state else tensors[6] * 0)
    else:
        y, last = function(*tensors[:6], begins, state_BHNP=tensors[6] if state else None)
    score = sum((t.double() * weights_like(t)).sum() for t in (y, last))
    grads = torch.autograd.grad(score, given, materialize_grads=True)
    return {"y": y, "last": last} | dict(zip((f"d{n}" for n in NAMES), grads, strict=False))


SIZES = [  # sequences, tokens, heads, groups, N, P
    pytest.param((2, 7, 4, 2, 3, 5), id="a chunk"),
    pytest.param((1, 150, 3, 1, 4, 2), id="three chunks"),
    pytest.param((2, 64, 2, 2, 1, 1), id="whole chunks"),
    pytest.param((1, 1, 6, 3, 2, 2), id="a token"),
    pytest.param((2, 0, 2, 1, 2, 3), id="no tokens"),
    pytest.param((2, 3, 2, 1, 0, 3), id="no keys"),
]


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_gradients_are_their_definitions(sizes, documents):
    tensors, begins = make(*sizes)
    begins = begins if documents else None
    want = both(by_hand, tensors, begins)
    for function in (state_space_scan, reference.state_space_scan):
        for name, got in both(function, tensors, begins).items():
            assert_close(name, got, want[name])


def test_without_a_state_it_is_zero():
    tensors, begins = make(2, 70, 4, 2, 3, 5)
    want = both(by_hand, tensors, begins, state=False)
    for name, got in both(state_space_scan, tensors, begins, state=False).items():
        assert_close(name, got, want[name])


def test_heads_that_fade_at_once_leave_the_others_exact():
    """Decays of -400 beside those of -0.02, whose sums fp32 would round away."""
    tensors, begins = make(1, 90, 4, 2, 3, 5, fast=True)
    want = both(by_hand, tensors, begins)
    for name, got in both(state_space_scan, tensors, begins).items():
        assert_close(name, got, want[name])


def error_of_rates(dtype, longest, device="cpu"):
    """Of the gradients of dt and A, of tensors of mean 0, relative to those in fp64; the largest.

    Where states fade fast what a token reads of itself is all but all there is, and cancels out. A
    head's own gradient of A is a sum of few terms of either sign, so 16 heads are taken together.
    """
    torch.manual_seed(0)
    x, dy = torch.randn(2, 1, 70, 32, 8, dtype=dtype)
    b, c = torch.randn(2, 1, 70, 1, 16, dtype=dtype)
    dt, A = torch.rand(1, 70, 32) * longest, torch.tensor([[-4.0], [-16.0]]).expand(2, 16).flatten()

    def gradients(dtype, wide):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, b, c)]
        leaves += [t.to(device, wide).requires_grad_() for t in (dt, A, torch.ones(32))]
        y, _ = state_space_scan(*leaves)
        return torch.autograd.grad(y, leaves[3:5], dy.to(device, dtype))

    pairs = zip(gradients(dtype, torch.float32), gradients(*[torch.float64] * 2), strict=True)
    norms = [
        [t.view(-1, 2, 16).norm(dim=(0, 2)) for t in (got - want, want)] for got, want in pairs
    ]
    return torch.stack([off / all_of_it for off, all_of_it in norms]).max()


def test_rates_of_heads_that_forget_at_once_have_their_gradient():
    assert error_of_rates(torch.float32, longest=30) < 1e-4


def test_a_sequence_in_parts_is_the_whole():
    tensors, begins = make(2, 100, 4, 2, 3, 5)
    *rows, A, D, state = tensors
    whole, last = state_space_scan(*rows, A, D, begins, state_BHNP=state)
    parts = []
    for part in (slice(0, 33), slice(33, 100)):
        of_part = [t[:, part] for t in rows]
        y, state = state_space_scan(*of_part, A, D, begins[:, part], state_BHNP=state)
        parts.append(y)
    assert_close("y", torch.cat(parts, 1), whole)
    assert_close("last", state, last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 4)}, "four dimensions"),
        ({"c": torch.zeros(2, 3, 2, 9)}, "alike"),
        ({"b": torch.zeros(2, 3, 3, 8), "c": torch.zeros(2, 3, 3, 8)}, "a divisor of 4"),
        ({"b": torch.zeros(2, 5, 2, 8), "c": torch.zeros(2, 5, 2, 8)}, r"\[2, 3, a divisor of 4"),
        ({"dt": torch.zeros(2, 3, 2)}, "dt_BSH: expected"),
        ({"A": torch.zeros(4, dtype=torch.int32)}, "A_H: expected float"),
        ({"D": torch.zeros(1)}, "D_H: expected"),
        ({"begins": torch.zeros(2, 3)}, "begins_BS: expected torch.bool"),
        ({"state": torch.zeros(2, 4, 6, 8)}, "state_BHNP: expected"),
        ({"b": torch.zeros(2, 3, 2, 8).half(), "c": torch.zeros(2, 3, 2, 8)}, "the dtype of x"),
        ({"dt": torch.zeros(2, 3, 4, device="meta")}, "on cpu"),
    ],
    ids=[
        *("dimensions", "apart", "groups", "tokens", "steps", "rates", "past", "begins"),
        *("state", "dtype", "device"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"x": torch.zeros(2, 3, 4, 6), "b": torch.zeros(2, 3, 2, 8)}
    given |= {"c": torch.zeros(2, 3, 2, 8), "dt": torch.zeros(2, 3, 4), "A": torch.zeros(4)}
    given |= {"D": torch.zeros(4), "begins": torch.zeros(2, 3, dtype=torch.bool)} | change
    state = given.pop("state", None)
    with pytest.raises(ValueError, match=message):
        state_space_scan(*given.values(), state_BHNP=state)


def test_who_computes_by_kernels(monkeypatch):
    """bf16, and widths whose states fit; no RDNA3, and no CPU."""
    pytest.importorskip("triton")
    gpu = torch.device("cuda")

    def found(chip, dtype=torch.bfloat16, P=64, N=128):
        plan = plan_for(TARGETS[chip], dtype, 1, hopper=False)
        monkeypatch.setattr("mb_kernels.runtime.plan.plan_on", lambda *_: plan)
        return has_state_space_kernels(gpu, dtype, P, N)

    assert all(found(chip) == (not chip.startswith("gfx11")) for chip in TARGETS)
    assert found("sm90", P=8, N=16)
    assert all(found("sm90", P=wide) for wide in (80, 128))
    assert not any(found("sm90", **change) for change in (
        {"P": 65}, {"P": 130}, {"N": 129}, {"dtype": torch.float16}, {"dtype": torch.float32},
    ))  # fmt: skip
    assert not has_state_space_kernels(torch.device("cpu"), torch.bfloat16, 64, 128)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("longest", [0.3, 4, 30, 100])
def test_rates_of_heads_that_forget_at_once_on_a_gpu(longest):
    assert error_of_rates(torch.bfloat16, longest, device="cuda") < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("sizes", "documents"),
    [
        ((2, 300, 16, 2, 128, 64), True),
        ((1, 130, 24, 1, 64, 64), False),
        ((3, 64, 4, 4, 16, 32), True),
        ((2, 1, 4, 2, 128, 64), False),
        ((1, 100, 6, 3, 40, 24), True),
        ((1, 100, 4, 2, 128, 16), True),
        ((1, 200, 2, 1, 128, 128), False),
        ((2, 150, 6, 2, 128, 80), True),
    ],
)
def test_the_kernels_on_a_gpu(sizes, documents, dtype):
    """Against fp64, twice the same."""
    tensors, begins = make(*sizes, dtype=dtype, device="cuda")
    begins = begins if documents else None
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    want = both(reference.state_space_scan, exact, None if begins is None else begins.cpu())
    found, again = (both(state_space_scan, tensors, begins) for _ in range(2))
    for name, got in found.items():
        assert torch.equal(got, again[name]), name
        assert_close(name, got, want[name], dtype=dtype)
