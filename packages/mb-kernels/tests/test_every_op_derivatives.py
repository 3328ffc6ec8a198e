"""Every op's second derivatives and transforms: right, or a clear error.

Runs twice: on the references here, and on the kernels by test_interpreter.py.
"""

import functools

import pytest
import torch
from every_op import DIFFERENTIABLE, make_op, results
from mb_kernels.runtime.registration import interpret
from mb_kernels.testing import assert_close
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_are_right_or_an_error(name):
    op = make_op(name)
    if interpret and not op.second_derivative:
        pytest.skip("an error that kernels and references share")
    tensors = {
        n: t.double() if t.is_floating_point() and not interpret else t
        for n, t in op.tensors.items()
    }
    leaves = [tensors[n].detach().requires_grad_() for n in op.leaves]

    def second(call):
        y = call(**(tensors | dict(zip(op.leaves, leaves, strict=True))))
        y = y[0] if isinstance(y, tuple) else y
        first = torch.autograd.grad((y * y).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    if not op.second_derivative:
        with pytest.raises(NotImplementedError, match=r"second derivatives.*mb_kernels\.reference"):
            second(op.call)
        return
    for g, w in zip(second(op.call), second(op.twin), strict=True):
        assert_close("second derivative", g, w, dtype=torch.float32)


@pytest.mark.skipif(interpret, reason="the same calls as without the interpreter")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vmap_is_a_loop(name):
    op = make_op(name)
    leaves = {n: op.tensors[n].detach().clone().requires_grad_() for n in op.leaves}
    first, *_ = op.leaves
    both = [op.tensors[first].detach(), op.tensors[first].detach() / 2]
    x = leaves[first] = torch.stack(both).requires_grad_()

    def call(x):
        y = op.call(**(op.tensors | leaves | {first: x}))
        return y[0] if isinstance(y, tuple) else y

    got, want = torch.func.vmap(call)(x), torch.stack([call(x[0]), call(x[1])])
    assert torch.equal(got, want)
    slope = torch.linspace(0, 1, want.numel()).view(want.shape)
    grads = (torch.autograd.grad(y, list(leaves.values()), slope) for y in (got, want))
    for name, g, w in zip(leaves, *grads, strict=True):
        assert_close(f"gradient of {name}", g, w)


@pytest.mark.skipif(interpret, reason="kernels and references share it")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_batched_gradients_are_a_loop(name):
    op = make_op(name)
    leaves = {n: op.tensors[n].detach().clone().requires_grad_() for n in op.leaves}
    y = op.call(**(op.tensors | leaves))
    y = y[0] if isinstance(y, tuple) else y

    def gradients(slope, batched=False):
        options = {"retain_graph": True, "is_grads_batched": batched}
        return torch.autograd.grad(y, list(leaves.values()), slope, **options)

    slopes = torch.linspace(-1, 1, 2 * y.numel()).view(2, *y.shape)
    one_by_one = zip(*map(gradients, slopes), strict=True)
    for name, g, w in zip(leaves, gradients(slopes, batched=True), one_by_one, strict=True):
        assert_close(f"gradient of {name}", g, torch.stack(w))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_and_forward_mode_are_errors(name):
    op = make_op(name)
    leaf = op.tensors[op.leaves[0]]

    def scalar(x):
        y = op.call(**(op.tensors | {op.leaves[0]: x}))
        return (y[0] if isinstance(y, tuple) else y).sum()

    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        torch.func.grad(scalar)(leaf)
    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        torch.func.jvp(scalar, (leaf,), (leaf,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"forward-mode derivatives \(jvp\)"),
    ):
        scalar(torch.autograd.forward_ad.make_dual(leaf, leaf))


class _NoGradient(torch.autograd.Function):
    """What returns no gradient, as a function does that is flat where it is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.skipif(interpret, reason="kernels and references share it")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_output_without_a_gradient_gives_none_or_zeros(name):
    op = make_op(name)
    leaves = {n: op.tensors[n].detach().requires_grad_() for n in op.leaves}
    y = op.call(**(op.tensors | leaves))
    outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]
    score = sum(_NoGradient.apply(t).sum() for t in outputs)
    grads = torch.autograd.grad(score, list(leaves.values()), allow_unused=True)
    assert not any(g.any() for g in grads if g is not None)


@pytest.mark.skipif(interpret, reason="kernels and references share it")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_recomputed_by_torch_is_the_same(name):
    op = make_op(name)
    recomputed = functools.partial(checkpoint, op.call, use_reentrant=False)
    got, want = results(op, op.tensors, call=recomputed), results(op, op.tensors)
    for what, value in want.items():
        assert torch.equal(got[what], value), what


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_output_may_be_written_into(name):
    op = make_op(name)
    if interpret and not op.second_derivative:
        pytest.skip("the others' kernels write into memory of their own")

    def changed(change):
        def call(**tensors):
            y = op.call(**tensors)
            y = y if isinstance(y, tuple) else (y,)
            return tuple(change(t) if t.requires_grad else t for t in y)

        return results(op, op.tensors, call=call)

    if name in ("topk_softmax", "relative_attention"):  # whose backward reads it
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            changed(lambda t: t.mul_(2))
        return
    got, want = changed(lambda t: t.mul_(2)), changed(lambda t: t * 2)
    for what, value in want.items():
        assert torch.equal(got[what], value), what
