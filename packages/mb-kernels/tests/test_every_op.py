"""Every op and argument in any memory order, device, dtype and size: right, or a clear error.

Runs twice: on the references here, and on the kernels by test_interpreter.py.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows.
"""

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import mb_kernels
import pytest
import torch
from mb_kernels import reference
from mb_kernels.block_sparse.reference import BLOCK, Topology, make_matrix
from mb_kernels.exchange import pack_routing, routing_reference, unpack_routing
from mb_kernels.runtime.registration import interpret
from mb_kernels.testing import assert_close, make_expert_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

T, D, F, E, K = 9, 16, 16, 3, 2


class Op(NamedTuple):
    """A call by tensors alone; ``leaves`` names those with a gradient."""

    call: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    leaves: tuple[str, ...] = ()
    twin: Callable[..., Any] | None = None
    second_derivative: bool = False


def _bins(order, inverse, counts, offsets):
    return mb_kernels.Bins(order, inverse, counts, offsets)


def make_op(
    name: str, tokens: int = T, hidden: int = D, ffn: int = F, top_k: int = K, experts: int = E
) -> Op:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    ids = make_expert_ids("skewed", tokens, experts, top_k, generator=generator)
    made = reference.bin_tokens(ids, experts)
    bins = dict(zip(("order", "inverse", "counts", "offsets"), made, strict=True))
    weights = torch.rand(tokens, top_k, generator=generator)
    logits = normal(tokens, experts)
    probs = torch.softmax(logits, 1)
    rows = normal(tokens * top_k, hidden)
    w1, w2 = normal(experts, 2 * ffn, hidden), normal(experts, hidden, ffn)

    def on_bins(module, function):
        def call(order, inverse, counts, offsets, **tensors):
            return function(module, _bins(order, inverse, counts, offsets), **tensors)

        return call

    def twins(function):
        return on_bins(mb_kernels, function), on_bins(reference, function)

    def losses(module, logits, probs, counts, kept, balance):
        return module.router_losses(
            *(logits, probs, counts, kept),
            load_balancing_weight=0.3,
            z_weight=0.1,
            balance_counts_E=balance,
        )[0]

    if name == "topk_softmax":
        call, twin = (
            lambda logits, m=m: m.topk_softmax(logits, top_k, renormalize=True)[::2]
            for m in (mb_kernels, reference)
        )
        return Op(call, {"logits": logits}, ("logits",), twin)
    if name == "topk_ids":
        call, twin = (
            lambda scores, m=m: m.topk_ids(scores, top_k) for m in (mb_kernels, reference)
        )
        return Op(call, {"scores": logits}, (), twin)
    if name == "bin_tokens":
        call, twin = (
            lambda ids, m=m: tuple(m.bin_tokens(ids, experts, capacity=5))
            for m in (mb_kernels, reference)
        )
        return Op(call, {"ids": ids}, (), twin)
    if name == "router_losses":
        tensors = {"logits": logits, "probs": probs, "counts": made.tokens_per_expert_E}
        tensors |= {"kept": made.offsets_E1[-1], "balance": made.tokens_per_expert_E.clone()}
        call, twin = (lambda m=m, **t: losses(m, **t) for m in (mb_kernels, reference))
        return Op(call, tensors, ("logits",), twin)
    if name == "gather":
        call, twin = twins(lambda m, bins, x: m.gather(x, bins, top_k))
        return Op(call, {"x": normal(tokens, hidden), **bins}, ("x",), twin, True)
    if name == "combine":
        call, twin = twins(lambda m, bins, rows, weights: m.combine(rows, bins, weights))
        return Op(call, {"rows": rows, "weights": weights, **bins}, ("rows", "weights"), twin)
    if name == "padded":  # gather and combine on the bins of pad_bins

        def padded(m, bins, x, weights):
            bins = m.pad_bins(bins)
            return m.combine(m.gather(x, bins, top_k), bins, weights)

        call, twin = twins(padded)
        return Op(call, {"x": normal(tokens, hidden), "weights": weights, **bins},
                  ("x", "weights"), twin)  # fmt: skip
    if name in ("grouped_gemm", "grouped_gemm_EKM"):
        transpose = name == "grouped_gemm"
        w = w1 if transpose else w1.transpose(1, 2).contiguous()
        call, twin = (
            lambda x, w, offsets, m=m: m.grouped_gemm(x, w, offsets, transpose_weight=transpose)
            for m in (mb_kernels, reference)
        )
        tensors = {"x": rows, "w": w, "offsets": made.offsets_E1}
        return Op(call, tensors, ("x", "w"), twin, True)
    if name in ("gmm", "gmm_trans_b", "gmm_trans_a"):
        options = {name.removeprefix("gmm_"): True} if name != "gmm" else {}
        b = {"gmm": w1.transpose(1, 2).contiguous(), "gmm_trans_b": w1}.get(name)
        b = normal(tokens * top_k, 2 * ffn) if b is None else b
        call, twin = (
            lambda a, b, batch_sizes, m=m: m.gmm(a, b, batch_sizes, **options)
            for m in (mb_kernels, reference)
        )
        tensors = {"a": rows, "b": b, "batch_sizes": made.tokens_per_expert_E.long()}
        return Op(call, tensors, ("a", "b"), twin, True)
    if name in ("grouped_experts", "grouped_experts_w3", "grouped_experts_plain"):
        activation = "silu" if name.endswith("plain") else "swigluoai"
        tensors = {"x": rows, "tokens": made.tokens_per_expert_E, "w1": w1, "w2": w2}
        if name != "grouped_experts":
            tensors["w1"] = w1[:, :ffn].contiguous()
        if name.endswith("w3"):
            tensors["w3"] = w1[:, ffn:].contiguous()
        call, twin = (
            lambda x, tokens, w1, w2, w3=None, m=m: m.grouped_experts(
                *(x, tokens, w1, w2, w3), activation=activation
            )
            for m in (mb_kernels, reference)
        )
        return Op(call, tensors, tuple(n for n in tensors if n != "tokens"), twin)
    if name == "expert_mlp_bias":
        call, twin = twins(
            lambda m, bins, x, w1, w2, weights, b1, b2: m.expert_mlp(
                *(x, w1, w2, bins, weights), b1_EF=b1, b2_ED=b2
            )
        )
        tensors = {"x": normal(tokens, hidden), "w1": w1, "w2": w2, "weights": weights, **bins}
        tensors |= {"b1": normal(experts, 2 * ffn), "b2": normal(experts, hidden)}
        return Op(call, tensors, ("x", "w1", "w2", "weights", "b1", "b2"), twin)
    if name in ("expert_mlp", "expert_mlp_recompute", "expert_mlp_8bit"):
        options = {"expert_mlp_recompute": {"recompute": True},
                   "expert_mlp_8bit": {"saved_activation_bits": 8}}.get(name, {})  # fmt: skip
        call, twin = twins(
            lambda m, bins, x, w1, w2, weights, **biases: m.expert_mlp(
                *(x, w1, w2, bins, weights), **options, **biases
            )
        )
        tensors = {"x": normal(tokens, hidden), "w1": w1, "w2": w2, "weights": weights, **bins}
        if name == "expert_mlp_recompute":
            tensors["b1_EF"] = normal(experts, 2 * ffn)
        if name == "expert_mlp_8bit":
            tensors["b2_ED"] = normal(experts, hidden)
        return Op(call, tensors, tuple(n for n in tensors if n not in bins), twin)
    if name == "quantize":
        call, twin = (
            lambda x: mb_kernels.dequantize(*mb_kernels.quantize(x, 4), bits=4, dtype=x.dtype),
            lambda x: reference.dequantize(*reference.quantize(x, 4), bits=4, dtype=x.dtype),
        )
        return Op(call, {"x": normal(tokens, hidden)}, (), twin)
    if name == "sum_of_squares":
        call, twin = (
            lambda a, b, m=m: m.sum_of_squares([a, b, a]) for m in (mb_kernels, reference)
        )
        return Op(call, {"a": normal(tokens, hidden), "b": normal(experts, 5)}, (), twin)
    if name == "symmetric_matmul":
        call, twin = (
            lambda a, add, m=m: m.symmetric_matmul(a, a, add, alpha=2.0, beta=-0.5, diagonal=3.0)
            for m in (mb_kernels, reference)
        )
        a, add = normal(experts, tokens, hidden), normal(experts, tokens, tokens)
        return Op(call, {"a": a, "add": add + add.mT}, (), twin)
    if name == "dequantize":
        codes, scales = reference.quantize(normal(tokens, hidden), 8)
        call, twin = (
            lambda codes, scales, m=m: m.dequantize(codes, scales, bits=8, dtype=torch.float32)
            for m in (mb_kernels, reference)
        )
        return Op(call, {"codes": codes, "scales": scales}, (), twin)
    if name == "linear_cross_entropy":
        call, twin = (
            lambda x, weight, labels, weights, bias, m=m: m.linear_cross_entropy(
                *(x, weight, labels, weights), bias_V=bias
            )
            for m in (mb_kernels, reference)
        )
        labels = torch.arange(tokens) % 7 - 1  # one in seven is ignored
        tensors = {"x": normal(tokens, hidden), "weight": normal(6, hidden), "labels": labels}
        tensors |= {"weights": torch.rand(tokens, generator=generator), "bias": normal(6)}
        return Op(call, tensors, ("x", "weight", "bias"), twin)
    if name == "relative_attention":
        call, twin = (
            lambda q, k, v, bias, offsets, m=m: m.relative_attention(
                *(q, k, v, bias, offsets), causal=True
            )
            for m in (mb_kernels, reference)
        )
        tensors = {"q": normal(tokens, 4, hidden), "k": normal(tokens, 2, hidden)}
        tensors |= {"v": normal(tokens, 2, hidden), "bias": normal(4, 2 * max(tokens, 1) - 1)}
        offsets = torch.tensor([0, tokens // 3, tokens])
        return Op(call, tensors | {"offsets": offsets}, ("q", "k", "v", "bias"), twin)
    if name == "routing_of_rows":  # packed for ranks of one expert each, and unpacked on the first

        def packed(weights, ids):
            sizes = {"num_experts": experts, "ranks": experts}
            words, peers, counts, _ = pack_routing(weights, ids, **sizes)
            return words, peers, counts, *unpack_routing(words, rank=0, **sizes)

        def packed_twin(weights, ids):
            words, peers, counts = routing_reference.pack_routing(weights, ids, experts, experts)
            unpacked = routing_reference.unpack_routing(words, None, 0, 1)
            return words, peers, counts[:-1], *unpacked

        return Op(packed, {"weights": weights, "ids": ids}, ("weights",), packed_twin)
    if name in ("sdd", "dsd", "dds"):
        return _block_sparse(name, min(tokens, 2), hidden, normal)
    if name == "sparse_expert_mlp":
        call, twin = twins(
            lambda m, bins, x, w1, w2, weights: m.sparse_expert_mlp(
                *(x, w1, w2, bins, weights), activation="silu"
            )
        )
        w1, w2 = normal(experts, BLOCK, hidden), normal(experts, hidden, BLOCK)
        tensors = {"x": normal(tokens, hidden), "w1": w1, "w2": w2, "weights": weights, **bins}
        return Op(call, tensors, ("x", "w1", "w2", "weights"), twin)
    raise AssertionError(name)


def _block_sparse(name: str, block_rows: int, hidden: int, normal) -> Op:
    """Blocks on the diagonal of [R, R] and one beside, R block_rows or none."""
    filled = torch.eye(block_rows, dtype=torch.bool)
    filled[:1, 1:] = True
    rows, columns = filled.nonzero().int().unbind(1)
    order = (columns * block_rows + rows).argsort().int()
    ends = [0, *filled.sum(1).cumsum(0).tolist()], [0, *filled.sum(0).cumsum(0).tolist()]
    offsets, offsets_t = (torch.tensor(e, dtype=torch.int32) for e in ends)
    indices = Topology(rows, columns, offsets, offsets_t, rows[order.long()], order)
    size = block_rows * BLOCK

    def matrix(data, topology):
        return make_matrix((size, size), data, Topology(**topology))

    def sdd(m, a, b, **topology):
        pattern = torch.zeros(1, 1, 1, device=a.device).expand(len(rows), BLOCK, BLOCK)
        return m.sdd(a, b, matrix(pattern, topology)).data

    functions = {
        "sdd": sdd,
        "dsd": lambda m, data, dense, **topology: m.dsd(matrix(data, topology), dense),
        "dds": lambda m, dense, data, **topology: m.dds(dense, matrix(data, topology)),
    }
    data = {"data": normal(len(rows), BLOCK, BLOCK)}
    dense = {
        "sdd": {"a": normal(size, hidden), "b": normal(hidden, size)},
        "dsd": {**data, "dense": normal(size, hidden)},
        "dds": {"dense": normal(hidden, size), **data},
    }[name]
    call, twin = (
        lambda m=m, **tensors: functions[name](m, **tensors) for m in (mb_kernels, reference)
    )
    return Op(call, {**dense, **indices._asdict()}, tuple(dense), twin, True)


OPS = (
    *("topk_softmax", "topk_ids", "bin_tokens", "router_losses", "gather", "combine", "padded"),
    *("grouped_gemm", "grouped_gemm_EKM", "gmm", "gmm_trans_b", "gmm_trans_a"),
    *("grouped_experts", "grouped_experts_w3", "grouped_experts_plain"),
    *("expert_mlp", "expert_mlp_recompute", "expert_mlp_8bit", "expert_mlp_bias"),
    *("quantize", "dequantize", "sum_of_squares", "symmetric_matmul"),
    *("linear_cross_entropy", "relative_attention", "routing_of_rows"),
    *(("sdd", "dsd", "dds") if importlib.util.find_spec("stk") else ()),  # the extra block-sparse
    "sparse_expert_mlp",
)
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]
ARGUMENTS = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name in OPS
    for argument in make_op(name).tensors
]
DIFFERENTIABLE = [name for name in OPS if make_op(name).leaves]


def results(op: Op, tensors: dict[str, torch.Tensor], *, call=None, double=False):
    """Outputs, and the gradients of a fixed projection."""
    tensors = {
        name: t.double() if double and t.dtype is torch.float32 else t
        for name, t in tensors.items()
    }
    for name in op.leaves:
        tensors[name] = tensors[name].detach().requires_grad_()
    found = (call or op.call)(**tensors)
    found = found if isinstance(found, tuple) else (found,)
    out = {f"output {i}": t for i, t in enumerate(found)}
    if op.leaves:
        fp32 = {"dtype": torch.float32}  # whatever the default is
        score = sum(
            (t * torch.linspace(0, 1, t.numel(), **fp32, device=t.device).view(t.shape)).sum()
            for t in found
        )
        grads = torch.autograd.grad(score, [tensors[n] for n in op.leaves])
        out |= {f"gradient of {n}": g for n, g in zip(op.leaves, grads, strict=True)}
    return out


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
    op = make_op(name, **sizes)
    on_gpu = {n: t.cuda() for n, t in op.tensors.items()}
    got = results(op, on_gpu | {argument: elsewhere_in_memory(on_gpu[argument])})
    want = results(op, op.tensors, call=op.twin, double=True)
    for what, value in want.items():
        assert_close(f"{name}, {argument} with strides: {what}", got[what].float(), value.float())


class _Calls(TorchDispatchMode):
    """The calls of this package's ops, forward and backward, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mb":
            self.seen.setdefault(func, torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: t.detach().clone(), args
            ))  # fmt: skip
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(interpret, reason="of schemas and fakes, which kernels and references share")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_what_an_op_says_of_itself_is_so(name, device):
    op = make_op(name)
    with _Calls() as calls:
        results(op, {n: t.to(device) for n, t in op.tensors.items()})
    assert calls.seen
    for func, arguments in calls.seen.items():
        torch.library.opcheck(func, arguments, test_utils=("test_schema", "test_faketensor"))


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
    op = make_op(name)
    tensors = {n: t.to(device) for n, t in op.tensors.items()}
    want = results(op, tensors)
    longer = {n: t.long() for n, t in tensors.items() if t.dtype is torch.int32}
    with _Long() as long:
        got = results(op, tensors | longer)
    assert long.seen <= {"row_indices", "column_indices", "column_indices_t"}, long.seen
    for what, value in want.items():
        assert torch.equal(got[what], value), what


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_another_device_is_an_error(name, argument):
    op = make_op(name)
    if len(op.tensors) == 1 or (name, argument) in (("gather", "counts"), ("combine", "counts")):
        pytest.skip("no other tensor to differ from, or one that the op does not read")
    if argument == "counts" and name != "router_losses":
        pytest.skip("the op does not read the counts")
    if argument in ("a", "b") and name.startswith("gmm"):
        pytest.skip("batch sizes on the CPU may belong to rows elsewhere")
    moved = op.tensors | {argument: op.tensors[argument].to("meta")}
    with pytest.raises(ValueError, match=r"expected it on (cpu|meta), where .* is; got (cpu|meta)"):
        op.call(**moved)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_sparse_tensor_is_an_error(name, argument):
    op = make_op(name)
    if argument == "counts" and name != "router_losses":
        pytest.skip("the op does not read the counts")
    with pytest.raises(ValueError, match=r"expected a dense tensor; got torch.sparse_coo"):
        op.call(**op.tensors | {argument: op.tensors[argument].detach().to_sparse()})


@pytest.mark.parametrize("name", reference.__all__)
def test_a_twin_takes_what_its_op_takes(name):
    op, twin = (inspect.signature(getattr(m, name)).parameters for m in (mb_kernels, reference))
    of_other_ranks = {"shard", "home_P", "x_stays"}
    assert [p for p in op if p not in twin and p not in of_other_ranks] == []
    for p in op.keys() & twin.keys():
        assert op[p].default in (op[p].empty, twin[p].default), p


@pytest.mark.parametrize("device", ["MPS", "XPU", "PrivateUse1"])
def test_a_device_without_kernels_gets_the_twin(device):
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mb::")]
    served = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    assert len(ops) > 20
    assert [name for name in ops if not served(name, device)] == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int16], ids=str)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_a_dtype_nobody_computes_in_is_an_error(name, argument, dtype):
    op = make_op(name)
    if argument == "counts" and name != "router_losses":
        pytest.skip("the op does not read the counts")
    if dtype is torch.int16 and (argument in ("labels", "weights") or argument in Topology._fields):
        pytest.skip("as good as any integers")
    with pytest.raises(ValueError, match=rf"expected .*{dtype}"):
        op.call(**(op.tensors | {argument: op.tensors[argument].to(dtype)}))


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
def test_autocast_does_not_reach_into_an_op(name):
    op = make_op(name)
    want = results(op, op.tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(op, op.tensors)
    for what, value in want.items():
        assert torch.equal(got[what], value), what


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


@pytest.mark.skipif(interpret, reason="kernels and references share it")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_recomputed_by_torch_is_the_same(name):
    op = make_op(name)
    recomputed = functools.partial(checkpoint, op.call, use_reentrant=False)
    got, want = results(op, op.tensors, call=recomputed), results(op, op.tensors)
    for what, value in want.items():
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


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
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


@pytest.mark.skipif(interpret, reason="the kernels look at offsets under MB_DEBUG=1 alone")
@pytest.mark.parametrize("offsets", [[2, 4, 6], [0, 5, 3], [0, 4, 9], [-1, 2, 6]], ids=str)
def test_offsets_that_divide_no_rows_are_refused_on_a_cpu(offsets):
    x, w, offsets = torch.ones(6, 16), torch.ones(2, 16, 16), torch.tensor(offsets).int()
    with pytest.raises(ValueError, match="offsets_E1: expected to start at 0, never to fall"):
        mb_kernels.grouped_gemm(x, w, offsets)
    with pytest.raises(ValueError, match=r"batch_sizes: .* that add up to at most 2,"):
        mb_kernels.gmm(x[:2], w, offsets.diff())


@pytest.mark.parametrize("logits", [torch.float32, torch.float64], ids=str)
def test_probabilities_of_another_precision_are_refused(logits):
    op = make_op("router_losses")
    other = torch.float64 if logits is torch.float32 else torch.float32
    tensors = {"logits": op.tensors["logits"].to(logits), "probs": op.tensors["probs"].to(other)}
    with pytest.raises(ValueError, match=rf"probs_TE: expected .*{other} for logits in {logits}"):
        op.call(**(op.tensors | tensors))
