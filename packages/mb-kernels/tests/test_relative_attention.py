"""Attention with a bias by distance from its definition in fp64; gradients against autograd's."""

import pytest
import torch
from mb_kernels import relative_attention
from mb_kernels.testing import assert_close


def by_hand(q, k, v, bias, lengths, *, causal, scale):
    """A query and head at a time."""
    longest, start, rows = (bias.shape[1] + 1) // 2, 0, []
    for length in lengths:
        for i in range(start, start + length):
            end = i + 1 if causal else start + length
            for h in range(q.shape[1]):
                g = h * k.shape[1] // q.shape[1]
                near = bias[h, start - i + longest - 1 : end - i + longest - 1]
                scores = k[start:end, g] @ q[i, h] * scale + near
                rows.append(torch.softmax(scores, 0) @ v[start:end, g])
        start += length
    return torch.stack(rows).view_as(q) if rows else q * 0


def make(tokens, heads, groups, width, longest, *, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(device, dtype).requires_grad_()

    kv = (normal(tokens, groups, width) for _ in range(2))
    return normal(tokens, heads, width), *kv, normal(heads, 2 * longest - 1)


def offsets_of(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "longest"), [([5, 0, 3, 7], 7), ([1], 1), ([2, 4], 9), ([0, 0], 3)], ids=str
)
def test_values_and_gradients_are_their_definitions(lengths, longest, causal):
    tensors = make(sum(lengths), 6, 2, 4, longest)
    options = {"causal": causal, "scale": 0.7}
    got = relative_attention(*tensors, offsets_of(lengths), **options)
    want = by_hand(*tensors, lengths, **options)
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view_as(want)
    assert_close("y", got, want)
    grads = (
        torch.autograd.grad((y * weight).sum(), tensors, materialize_grads=True)
        for y in (got, want)
    )
    for name, g, w in zip(("dq", "dk", "dv", "d_bias"), *grads, strict=True):
        assert_close(name, g, w)


@pytest.mark.parametrize("shifted", [0, 1, 2], ids="qkv".__getitem__)
def test_a_mean_in_common_costs_bf16_no_digits_on_a_cpu(shifted):
    """The scores' gradients add up to 0 over keys, up to the rounding of what is subtracted."""
    tensors = [x.detach().bfloat16() for x in make(40, 2, 1, 16, 40)]
    tensors[shifted] += 30
    dy = torch.randn(40, 2, 16).bfloat16()
    got, want = (
        torch.autograd.grad(relative_attention(*leaves, offsets_of([40]), causal=True), leaves, y)
        for leaves, y in (
            ([x.requires_grad_() for x in tensors], dy),
            ([x.detach().double().requires_grad_() for x in tensors], dy.double()),
        )
    )
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 4e-3 * b.norm()


def test_a_token_that_sees_nothing_gets_nothing():
    q, k, v, bias = make(5, 1, 1, 4, 5)
    bias.data[:, 4:] = -torch.inf  # no token but those before
    y = relative_attention(q, k, v, bias, offsets_of([5]), causal=False)
    assert y[0].eq(0).all()
    assert_close("y of the second", y[1], v[0])
    for grad in torch.autograd.grad(y.sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_a_bias_that_drowns_the_products_leaves_the_mean():
    tensors = make(5, 2, 2, 4, 5, dtype=torch.float32)
    _, _, v, bias = tensors
    bias.data.fill_(-1e9)
    got = relative_attention(*tensors, offsets_of([5]), causal=True)
    counts = torch.arange(1, 6)[:, None, None]
    assert_close("y", got, v.cumsum(0) / counts)
    weight = torch.linspace(-1, 1, got.numel()).view_as(got)
    (dv,) = torch.autograd.grad((got * weight).sum(), v)
    assert_close("dv", dv, (weight / counts).flip(0).cumsum(0).flip(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 3, 8)}, "a divisor of 4"),
        ({"k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 8)}, r"\[4, a divisor of 4, 8\]"),
        ({"v": torch.zeros(4, 2, 4)}, "alike"),
        ({"q": torch.zeros(4, 0, 8), "bias": torch.zeros(0, 7)}, "one head at least"),
        ({"bias": torch.zeros(4, 8)}, r"2 S - 1"),
        ({"bias": torch.zeros(2, 7)}, r"\[4, 2 S - 1\]"),
        ({"bias": torch.zeros(4, 5)}, "distances -3 to 3"),
        ({"offsets": torch.tensor([4])}, "two numbers at least"),
        ({"offsets": torch.tensor([0, 3])}, "end at 4"),
        ({"offsets": torch.tensor([0, 3, 2, 4])}, "never to fall"),
    ],
    ids=[
        *("groups", "tokens", "values", "no heads", "even", "heads", "short", "one offset"),
        *("end", "falling"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    tensors = {"q": torch.zeros(4, 4, 8), "k": torch.zeros(4, 2, 8), "v": torch.zeros(4, 2, 8)}
    tensors |= {"bias": torch.zeros(4, 7), "offsets": torch.tensor([0, 4])} | change
    if "v" not in change and "k" in change:
        tensors["v"] = tensors["k"]
    with pytest.raises(ValueError, match=message):
        relative_attention(*tensors.values(), causal=True)


def test_a_scale_that_learns_is_refused():
    """Taken as a number it would never have a gradient."""
    x, bias, offsets = torch.zeros(4, 2, 8), torch.zeros(2, 7), torch.tensor([0, 4])
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ValueError, match="scale: expected a number, which has no gradient"):
        relative_attention(x, x, x, bias, offsets, causal=True, scale=scale)
    y = relative_attention(x, x, x, bias, offsets, causal=True, scale=scale.detach())
    assert torch.equal(y, relative_attention(x, x, x, bias, offsets, causal=True, scale=0.5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("lengths", "longest", "heads", "groups", "width", "causal"),
    [
        ([64, 0, 1, 513, 200], 513, 12, 12, 64, False),
        ([128, 7, 65, 300], 300, 12, 4, 64, True),
        ([100, 90], 1000, 3, 1, 24, True),
        ([257, 31], 257, 4, 2, 120, False),
        ([70], 70, 2, 2, 128, True),
    ],
)
def test_the_kernels_on_a_gpu(lengths, longest, heads, groups, width, causal, dtype):
    """Against fp64, twice the same, in memory that begins as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    offsets = offsets_of(lengths, "cuda")
    tensors = make(sum(lengths), heads, groups, width, longest, dtype=dtype, device="cuda")
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    found = []
    for given, where in ((tensors, offsets), (tensors, offsets), (exact, offsets.cpu())):
        y = relative_attention(*given, where, causal=causal)
        weight = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y)
        found.append([y, *torch.autograd.grad((y * weight).sum(), given)])
    torch.use_deterministic_algorithms(False)
    for name, got, again, want in zip(("y", "dq", "dk", "dv", "d_bias"), *found, strict=True):
        assert torch.equal(got, again), name
        assert_close(name, got, want)
