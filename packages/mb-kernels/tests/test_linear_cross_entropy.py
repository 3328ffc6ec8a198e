"""Head and loss in one op against plain PyTorch: outputs, gradients, and what it refuses."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from mb_kernels import VocabularyShard, linear_cross_entropy, reference
from mb_kernels.linear_cross_entropy import reference as reference_steps
from mb_kernels.linear_cross_entropy import slices
from mb_kernels.testing import assert_close

V, D = 61, 24


def inputs(shape, *, vocab=V, ignored=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, D, generator=generator)
    w = torch.randn(vocab, D, generator=generator) / 4
    b = torch.randn(vocab, generator=generator)
    labels = torch.randint(vocab, shape, generator=generator)
    weights = torch.rand(shape, generator=generator)
    if ignored:
        labels.view(-1)[::3] = -100
        labels.view(-1)[1::5] = -1
        # As attention leaves where a row of padding saw nothing, and 0 / 0 in a mask of its mean.
        x[labels < 0], weights[labels < 0] = torch.nan, torch.nan
    return x, w, b, labels, weights


def run(op, x, w, b, labels, weights, **options):
    """Loss and gradients, times a factor, for the loss is never the last thing in a graph."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    bias = leaves[2] if b is not None else None
    loss = op(leaves[0], leaves[1], labels, weights, bias_V=bias, **options)
    return loss.detach(), *torch.autograd.grad(3 * loss, leaves)


def check(got, want, dtype):
    for name, g, w in zip(("loss", "dx", "dw", "db"), got, want, strict=False):
        assert_close(name, g, w, dtype=dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equals_the_reference(dtype, bias, weighted, reduction):
    x, w, b, labels, weights = inputs((3, 100), ignored=True)
    x, w, b = (t.bfloat16().float() for t in (x, w, b))  # the same numbers in every dtype
    arguments = (b if bias else None, labels, weights if weighted else None)
    master = torch.promote_types(dtype, torch.float32)
    given = (x.to(dtype), w.to(master), None if not bias else b.to(master), *arguments[1:])
    got = run(linear_cross_entropy, *given, reduction=reduction)
    wide = (x.double(), w.double(), b.double() if bias else None, *arguments[1:])
    check(got, run(reference.linear_cross_entropy, *wide, reduction=reduction), dtype)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("count", [1, 255, 257, 600])  # below, around and above a slice
def test_equals_pytorch(count):
    x, w, b, labels, _ = inputs((count,))
    want = run(
        lambda x, w, t, _, bias_V: F.cross_entropy(x @ w.t() + bias_V, t), x, w, b, labels, 0
    )
    check(run(linear_cross_entropy, x, w, b, labels, None), want, torch.float32)


def test_a_vocabulary_beyond_a_slice():
    x, w, b, labels, weights = inputs((70,), vocab=400_000)
    got = run(linear_cross_entropy, x, w, b, labels, weights)
    check(got, run(reference.linear_cross_entropy, x, w, b, labels, weights), torch.float32)


def test_every_losses_of_its_own_for_evaluation():
    x, w, _, labels, weights = inputs((4, 9), ignored=True)
    x.requires_grad_()
    losses = linear_cross_entropy(x, w, labels, weights, reduction="none")
    assert losses.shape == labels.shape
    assert not losses.requires_grad
    want = F.cross_entropy((x @ w.t()).flatten(0, 1), labels.clamp(min=-1).flatten(),
                           ignore_index=-1, reduction="none")  # fmt: skip
    torch.testing.assert_close(losses.flatten(), want.detach())


def test_small_weights_survive_fp16():
    # 1 / (batch x sequence) as weight: times a softmax it is below what fp16 holds.
    x, w, b, labels, _ = inputs((300,))
    tiny = torch.full(labels.shape, 1e-7)
    x = x.half()
    want = run(reference.linear_cross_entropy, x.double(), w.double(), b.double(), labels, tiny,
               reduction="sum")  # fmt: skip
    loss_scale = 2.0**16
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    loss = linear_cross_entropy(*leaves[:2], labels, tiny, bias_V=leaves[2], reduction="sum")
    grads = torch.autograd.grad(3 * loss_scale * loss, leaves)
    for name, got, exact in zip(("dx", "dw", "db"), grads, want[1:], strict=True):
        assert_close(name, got.double(), exact * loss_scale, dtype=torch.float16)


def test_a_sum_over_the_tokens_that_fp16_does_not_hold():
    # 128 rows of 1024 with a gradient of almost -1 each; their mean is far from fp16's 65504.
    x, w = torch.full((128, D), 1024.0), torch.zeros(V, D)
    labels = torch.zeros(128, dtype=torch.int64)
    want = run(reference.linear_cross_entropy, x.double(), w.double(), None, labels, None)
    got = run(linear_cross_entropy, x.half(), w, None, labels, None)
    check([g.double() for g in got], want, torch.float16)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(shape):
    for reduction in ("mean", "sum"):
        loss, *grads = run(linear_cross_entropy, *inputs(shape), reduction=reduction)
        assert loss == 0
        assert all(g.eq(0).all() for g in grads)
        assert grads[0].shape == (*shape, D)


def test_no_label_at_all():
    x, w, b, labels, weights = inputs((7,))
    for weights_T, target in ((None, labels * 0 - 1), (weights * 0, labels)):
        for op in (linear_cross_entropy, reference.linear_cross_entropy):
            leaves = [t.clone().requires_grad_() for t in (x, w, b)]
            loss = op(*leaves[:2], target, weights_T, bias_V=leaves[2])
            assert loss == 0
            grads = torch.autograd.grad(2.0**16 * loss, leaves)  # as fp16's loss scale does
            assert all(g.eq(0).all() for g in grads)


def test_any_strides():
    x, w, b, labels, weights = inputs((8, 6))
    strided = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        w.t().contiguous().t(),
        torch.stack([b, b], 1)[:, 0],
        torch.stack([labels, labels], 2)[..., 1],
        weights.t().contiguous().t(),
    )
    check(run(linear_cross_entropy, *strided), run(linear_cross_entropy, x, w, b, labels, weights),
          torch.float32)  # fmt: skip
    column = torch.stack([labels.flatten(), labels.flatten() * 0], 1)[:, 0]
    flat = linear_cross_entropy(x.flatten(0, 1), w, column)
    torch.testing.assert_close(flat, linear_cross_entropy(x, w, labels))


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_frozen_arguments(frozen):
    x, w, b, labels, _ = inputs((9,))
    leaves = {"x": x, "weight": w, "bias": b}
    wanted = [t.requires_grad_() for name, t in leaves.items() if name != frozen]
    grads = torch.autograd.grad(linear_cross_entropy(x, w, labels, bias_V=b), wanted)
    want = torch.autograd.grad(reference.linear_cross_entropy(x, w, labels, bias_V=b), wanted)
    for got, expected in zip(grads, want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shares", [(64,), (40, 24), (30, 34, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_vocabulary_in_parts(shares, reduction, monkeypatch):
    monkeypatch.setattr(slices, "_CPU_LOGITS", 64 * 128)  # fewer rows than shares alone would take
    # The ranks are threads, so that each waits in `gather` for the others.
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    x, w, b, labels, weights = inputs((300,), vocab=64, ignored=True)
    parts = len(shares)
    barrier, board = Barrier(parts, timeout=20), {}

    def rank_main(rank):
        def gather(statistics):
            board[rank] = statistics
            barrier.wait()
            everyone = torch.stack([board[r] for r in range(parts)])
            barrier.wait()
            return everyone

        start = sum(shares[:rank])
        here = slice(start, start + shares[rank])
        shard = VocabularyShard(start, 64, gather)
        arguments = (x, w[here], b[here], labels, weights)
        if reduction == "none":
            leaf = x.clone().requires_grad_()
            return linear_cross_entropy(leaf, w[here], labels, bias_V=b[here], shard=shard,
                                        reduction="none"), None, None, None  # fmt: skip
        return run(linear_cross_entropy, *arguments, reduction=reduction, shard=shard)

    with ThreadPoolExecutor(parts) as pool:
        results = list(pool.map(rank_main, range(parts)))
    losses, dxs, dws, dbs = zip(*results, strict=True)
    if reduction == "none":
        want = linear_cross_entropy(x, w, labels, bias_V=b, reduction="none")
        for loss in losses:
            torch.testing.assert_close(loss, want)
        return
    got = (losses[0], sum(dxs), torch.cat(dws), torch.cat(dbs))
    check(got, run(linear_cross_entropy, x, w, b, labels, weights, reduction=reduction),
          torch.float32)  # fmt: skip
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("size", [0.0, 30.0, 300.0, -3000.0])
def test_large_scores_cost_no_digits(size):
    """As torch's: what all scores have in common is taken off before anything else is rounded."""
    w = (size + 3 * torch.randn(301, 16)).requires_grad_()
    labels = torch.randint(301, (16,))  # with the unit matrix as x the scores are w itself
    losses = linear_cross_entropy(torch.eye(16), w, labels, reduction="none")
    exact = torch.nn.functional.cross_entropy(w.double().T, labels, reduction="none")
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-6, atol=3e-6)
    (got,) = torch.autograd.grad(linear_cross_entropy(torch.eye(16), w, labels), w)
    (want,) = torch.autograd.grad(exact.mean(), w)
    torch.testing.assert_close(got, want, rtol=5e-6, atol=0)


def test_a_share_of_padding_alone_adds_nothing():
    x, w, b, labels, _ = inputs((5,))
    x.requires_grad_()
    others = reference_steps.row_statistics(x.detach() @ w.t(), labels, 0)
    shard = VocabularyShard(V, 2 * V, lambda mine: torch.stack([others, mine]))
    got = linear_cross_entropy(x, w, labels, bias_V=b * 0 - torch.inf, shard=shard)
    torch.testing.assert_close(got, linear_cross_entropy(x, w, labels))
    assert torch.autograd.grad(got, x)[0].eq(0).all()


def test_negative_weights_count_as_such():
    x, w, b, labels, weights = inputs((20,))
    got = run(linear_cross_entropy, x, w, b, labels, -weights)
    check(got, run(reference.linear_cross_entropy, x, w, b, labels, weights), torch.float32)


@pytest.mark.parametrize("parts", [None, 1])
def test_a_second_derivative_is_refused(parts):
    x, w, _, labels, _ = inputs((5,))
    x.requires_grad_()
    shard = None if parts is None else VocabularyShard(0, V, lambda s: s[None])
    loss = linear_cross_entropy(x, w, labels, shard=shard)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("shard", [None, VocabularyShard(0, V, lambda s: s[None])])
def test_autocast_changes_nothing(shard):
    x, w, b, labels, weights = inputs((20,))
    want = run(linear_cross_entropy, x, w, b, labels, weights, shard=shard)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_cross_entropy, x, w, b, labels, weights, shard=shard)
    check(got, want, torch.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.zeros(5, D, dtype=torch.int64)}, "x: expected float32"),
        ({"weight_VD": torch.zeros(V, D + 1)}, r"weight_VD: expected \[V, 24\]"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels: expected integers of shape \(5,"),
        ({"labels": torch.zeros(5)}, r"labels: expected integers .* got torch.float32"),
        ({"labels": torch.zeros(5, dtype=torch.bool)}, r"labels: expected .* got torch.bool"),
        ({"weights": torch.zeros(4)}, r"weights: expected shape \(5,\)"),
        ({"bias_V": torch.zeros(3)}, r"bias_V: expected shape \(61,\)"),
        ({"reduction": "median"}, "reduction: expected one of mean, sum, none; got 'median'"),
        ({"weight_VD": torch.zeros(V, D, device="meta")}, "weight_VD: expected it on cpu"),
        (
            {"labels": torch.zeros(5, dtype=torch.int64, device="meta")},
            "labels: expected it on cpu",
        ),
        ({"shard": VocabularyShard(10, V, lambda s: s[None])}, "61 rows from 10 on"),
        ({"weight_VD": torch.zeros(0, D)}, "weight_VD: expected a row for each label"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_is_refused(change, says):
    x, w, _, labels, _ = inputs((5,))
    arguments = {"x": x, "weight_VD": w, "labels": labels} | change
    with pytest.raises(ValueError, match=says):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("shard", [None, VocabularyShard(0, V, lambda s: s[None])])
def test_a_label_of_no_class_makes_the_loss_nan(shard):
    x, w, _, labels, _ = inputs((5,))
    labels[3] = V
    assert linear_cross_entropy(x, w, labels, shard=shard).isnan()
    losses = linear_cross_entropy(x, w, labels, reduction="none", shard=shard)
    assert losses.isnan().tolist() == [False, False, False, True, False]


def test_a_label_of_no_class_is_named_under_mb_debug():
    # MB_DEBUG is read at import: hence another process.
    lines = [
        "import torch, mb_kernels",
        "x, w = torch.zeros(4, 8), torch.zeros(5, 8)",
        "for shard in (None, mb_kernels.VocabularyShard(0, 5, lambda s: s[None])):",
        "    try: mb_kernels.linear_cross_entropy(x, w, torch.tensor([0, -1, 5, 2]), shard=shard)",
        "    except ValueError as error: print(error)",
    ]
    environment = {**os.environ, "MB_DEBUG": "1"}
    command = [sys.executable, "-c", "\n".join(lines)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.count("below the vocabulary, 5, or negative to be ignored; got 5 for "
                             "token 2") == 2  # fmt: skip


def test_compiled_and_faked():
    x, w, b, labels, weights = inputs((40,))

    def loss(x, w, b):
        return linear_cross_entropy(x, w, labels, weights, bias_V=b)

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    got = (compiled.detach(), *torch.autograd.grad(3 * compiled, leaves))
    check(got, run(linear_cross_entropy, x, w, b, labels, weights), torch.float32)


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    x, w, _, labels, _ = inputs((10,))
    w.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, w, labels)
    assert counter.get_total_flops() == 2 * (2 * 10 * D * V)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [61, 8192, 50_304])
def test_on_a_gpu(dtype, vocab):
    arguments = [t.cuda() for t in inputs((3, 2800), vocab=vocab, ignored=True)]
    x, w, b, labels, weights = arguments
    x, w, b = (t.bfloat16().float() for t in (x, w, b))
    got = run(linear_cross_entropy, x.to(dtype), w, b, labels, weights)
    torch.backends.cuda.matmul.allow_tf32 = False
    want = run(reference.linear_cross_entropy, x, w, b, labels, weights)
    check(got, want, dtype)
    halves = (0, vocab // 2)
    statistics = {}

    def share(rank, gather, **options):
        here = slice(halves[rank], vocab if rank else halves[1])
        shard = VocabularyShard(halves[rank], vocab, gather)
        part = (x.to(dtype), w[here].contiguous(), b[here], labels, weights)
        return run(linear_cross_entropy, *part, shard=shard, **options)

    # The ranks one after the other: first each notes its statistics, then each sees the others'.
    for rank in (0, 1):
        noted = statistics.setdefault(rank, [])
        share(rank, lambda s, noted=noted: (noted.append(s), s[None])[1])
    parts = []
    for rank in (0, 1):
        pairs = iter([torch.stack(pair) for pair in zip(*statistics.values(), strict=True)])
        parts.append(share(rank, lambda s, pairs=pairs: next(pairs)))
    (loss, dx0, dw0, db0), (_, dx1, dw1, db1) = parts
    check((loss, dx0.float() + dx1.float(), torch.cat([dw0, dw1]), torch.cat([db0, db1])), want,
          dtype)  # fmt: skip
