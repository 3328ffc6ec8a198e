"""Every op in any memory order, width of indices, size and default: right.

Runs twice: on the references here, and on the kernels by test_interpreter.py.
"""

import os

import mb_kernels
import pytest
import torch
from every_op import ARGUMENTS, DEVICES, DIFFERENTIABLE, OPS, E, T, make_op, results
from mb_kernels import reference
from mb_kernels.runtime.registration import interpret
from mb_kernels.testing import assert_close, make_expert_ids
from torch.utils._python_dispatch import TorchDispatchMode


def elsewhere_in_memory(t: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of memory, dimensions in reverse order."""
    order = list(reversed(range(t.ndim)))
    memory = t.new_zeros([*(t.shape[d] for d in order), 2])
    view = memory[..., 0].permute(order)
    return view.copy_(t)


# All at once where the interpreter takes half a second for a call; each alone on a GPU.
STRIDED = [pytest.param(name, list(make_op(name).tensors), id=name) for name in OPS]
if os.environ.get("TRITON_INTERPRET") != "1":
    STRIDED = [pytest.param(p.values[0], [p.values[1]], id=p.id) for p in ARGUMENTS]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "arguments"), STRIDED)
def test_any_memory_order(name, arguments):
    op = make_op(name)
    strided = {argument: elsewhere_in_memory(op.tensors[argument]) for argument in arguments}
    got = results(op, op.tensors | strided)
    want = results(op, op.tensors, call=op.twin, double=True)
    for what, value in want.items():
        assert_close(f"{name}, {arguments} with strides: {what}", got[what].float(), value.float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", [{}, {"hidden": 18, "ffn": 9}], ids=str)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_any_memory_order_on_a_gpu(name, argument, sizes):
    op = make_op(name, **sizes).on_a_gpu()
    on_gpu = {n: t.cuda() for n, t in op.tensors.items()}
    got = results(op, on_gpu | {argument: elsewhere_in_memory(on_gpu[argument])})
    if op.bf16_on_a_gpu:  # rounds to 8 bits what bf16 has rounded, the twin what fp64 has not
        want = {what: t.cpu() for what, t in results(op, on_gpu).items()}
    else:
        want = results(op, op.tensors, call=op.twin, double=True)
    for what, value in want.items():
        assert_close(f"{name}, {argument} with strides: {what}", got[what].float(), value.float())


class _Long(TorchDispatchMode):
    """By name, the arguments of 64 bits that ops get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "mb":
            for argument, value in zip(function._schema.arguments, args, strict=False):
                if isinstance(value, torch.Tensor) and value.dtype is torch.int64:
                    self.seen.add(argument.name)
        return function(*args, **(kwargs or {}))


# Those that count rows or blocks by tensor descriptors on some GPUs. Kernels see 64 bits of the
# block-sparse products' indices alone; public functions cast the others.
COUNTING = [n for n in OPS if n in ("dsd", "dds", "sdd")]
if not interpret:
    COUNTING += [n for n in OPS if "grouped" in n or "gmm" in n or "mlp" in n]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COUNTING)
def test_indices_of_64_bits_are_as_good(name, device):
    # Coordinates of a descriptor have 32 bits: with others no kernel compiled on Hopper.
    op = make_op(name) if device == "cpu" else make_op(name).on_a_gpu()
    tensors = {n: t.to(device) for n, t in op.tensors.items()}
    want = results(op, tensors)
    longer = {n: t.long() for n, t in tensors.items() if t.dtype is torch.int32}
    with _Long() as long:
        got = results(op, tensors | longer)
    assert long.seen <= {"row_indices", "column_indices", "column_indices_t"}, long.seen
    for what, value in want.items():
        assert torch.equal(got[what], value), what


@pytest.mark.skipif(interpret, reason="kernels and references share it")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_autocast_does_not_reach_into_an_op(name):
    op = make_op(name)
    want = results(op, op.tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(op, op.tensors)
    for what, value in want.items():
        assert torch.equal(got[what], value), what


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OPS)
def test_torchs_default_dtype_and_device_change_nothing(name):
    op = make_op(name)
    op = op._replace(leaves=()) if interpret else op  # half the time
    want = results(op, op.tensors)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            got = results(op, op.tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    for what, value in want.items():
        assert got[what].dtype is value.dtype, what
        assert torch.equal(got[what], value), what


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_routing_weights_and_biases_of_another_dtype_cost_no_precision(weights):
    op = make_op("expert_mlp_bias")
    x = torch.float32 if interpret else torch.float64
    tensors = {n: t.to(x) if t.is_floating_point() else t for n, t in op.tensors.items()}
    for name in ("weights", "b1", "b2"):
        tensors[name] = tensors[name].to(weights)
    got, want = results(op, tensors), results(op, tensors, call=op.twin, double=True)
    for what in ("output 0", "gradient of x", "gradient of w1", "gradient of w2"):
        assert_close(what, got[what], want[what].to(x))


SIZES = {
    **{"no tokens": {"tokens": 0}, "no hidden": {"hidden": 0}},
    **{"one": {"tokens": 1, "top_k": 1}, "one expert": {"experts": 1, "top_k": 1}},
    **{"no width that kernels take": {"hidden": 18, "ffn": 9}},
}
# Of the interpreter's time all five take a sixth: none and a masked edge alone, unless asked for.
SLOW = {"no hidden", "one", "one expert"} if os.environ.get("TRITON_INTERPRET") == "1" else set()


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(of, id=n, marks=[pytest.mark.slow] * (n in SLOW)) for n, of in SIZES.items()],
)
@pytest.mark.parametrize("name", OPS)
def test_any_size(name, sizes):
    op = make_op(name, **sizes)
    got, want = results(op, op.tensors), results(op, op.tensors, call=op.twin, double=True)
    for what, value in want.items():
        assert_close(f"{name}: {what}", got[what].float(), value.float())


@pytest.mark.parametrize("experts", [0, 2])
def test_nothing_inside(experts):
    x, no_counts = torch.ones(4, 16), torch.zeros(experts, dtype=torch.int32)
    w1, w2 = torch.ones(experts, 0, 16), torch.ones(experts, 16, 0)
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    assert torch.equal(mb_kernels.grouped_experts(x, no_counts, w1, w2), torch.zeros(4, 16))
    got = mb_kernels.grouped_gemm(x, torch.ones(experts, 32, 16), offsets)
    assert torch.equal(got, torch.zeros(4, 32))
    got = mb_kernels.gmm(x, x, no_counts, trans_a=True)
    assert torch.equal(got, torch.zeros(experts, 16, 16))
    if experts:
        leaves = [t.requires_grad_() for t in (x, w1, w2, torch.ones(4, 1))]
        bins = mb_kernels.bin_tokens(torch.zeros(4, 1, dtype=torch.int32), experts)
        y = mb_kernels.expert_mlp(*leaves[:3], bins, leaves[3])
        for t in (y, *torch.autograd.grad(y.sum(), leaves)):
            assert not t.any()
        b2 = torch.ones(experts, 16, requires_grad=True)
        y = mb_kernels.expert_mlp(*leaves[:3], bins, leaves[3], b2_ED=b2)
        assert torch.equal(y, torch.ones(4, 16))
        *grads, d_b2 = torch.autograd.grad(y.sum(), [*leaves, b2])
        assert d_b2.sum() == 4 * 16
        assert grads[3].sum() == 4 * 16
        assert not any(g.any() for g in grads[:3])


@pytest.mark.parametrize("device", DEVICES)
def test_experts_of_a_token_are_distinct_whatever_its_logits_are(device):
    negated = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a GPU's NaN times -1
    nan, inf = torch.nan, torch.inf
    logits = [[1.0, nan, 2.0], [1.0, negated, 2.0], [negated] * 3, [-inf] * 3, [-inf, inf, negated]]
    _, ids, _ = mb_kernels.topk_softmax(torch.tensor(logits, device=device), 3)
    assert ids.tolist() == [[1, 2, 0], [1, 2, 0], [0, 1, 2], [0, 1, 2], [2, 1, 0]]


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("name", ["padded", "expert_mlp", "expert_mlp_bias", "sparse_expert_mlp"])
def test_what_no_expert_takes_may_be_any_number(name, top_k):
    tensors = make_op(name, top_k=top_k).tensors
    ids = make_expert_ids("uniform", T, E, top_k)
    ids[0] = -1
    made = reference.bin_tokens(ids, E)
    tensors |= zip(("order", "inverse", "counts", "offsets"), made, strict=True)
    tensors["x"][0], tensors["weights"][0] = torch.inf, torch.nan
    got = results(make_op(name, top_k=top_k), tensors)
    assert not got["output 0"][0].any()
    for what, value in got.items():
        assert value.isfinite().all(), what


@pytest.mark.parametrize("module", [mb_kernels, reference], ids=["op", "twin"])
def test_an_infinite_loss_of_no_weight_adds_nothing(module):
    tensors = make_op("router_losses").tensors
    tensors.pop("balance")
    tensors["logits"].view(-1)[0] = 1e30
    logits = tensors["logits"].requires_grad_()
    tensors["probs"] = torch.softmax(logits.detach(), 1)
    weights = {"load_balancing_weight": 0.3, "z_weight": 0.0}
    losses = module.router_losses(*tensors.values(), **weights)
    assert losses.z_loss.isinf()
    assert_close("aux", losses.aux_loss, 0.3 * losses.load_balancing_loss)
    assert torch.autograd.grad(losses.aux_loss, logits)[0].isfinite().all()
