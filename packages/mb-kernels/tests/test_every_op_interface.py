"""What every op refuses, and what it says of itself: its schema, its fake, its twin's arguments.

Runs twice: on the references here, and on the kernels by test_interpreter.py.
"""

import contextlib
import inspect
from typing import Any

import mb_kernels
import pytest
import torch
from every_op import ARGUMENTS, DEVICES, OPS, make_op, results
from mb_kernels import reference
from mb_kernels.block_sparse.reference import Topology
from mb_kernels.runtime.registration import interpret
from torch.utils._python_dispatch import TorchDispatchMode


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


@pytest.mark.sweep(2)
@pytest.mark.skipif(interpret, reason="of schemas and fakes, which kernels and references share")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_what_an_op_says_of_itself_is_so(name, device):
    op = make_op(name) if device == "cpu" else make_op(name).on_a_gpu()
    with _Calls() as calls:
        results(op, {n: t.to(device) for n, t in op.tensors.items()})
    assert calls.seen
    # Kernels leave rows that nobody reads unwritten, which two runs on a GPU do not have alike.
    compiled = ("test_aot_dispatch_dynamic",) if device == "cpu" else ()
    for func, arguments in calls.seen.items():
        torch.library.opcheck(
            func, arguments, test_utils=("test_schema", "test_faketensor", *compiled)
        )


@pytest.mark.skipif(interpret, reason="kernels write into memory of their own")
@pytest.mark.parametrize("name", OPS)
def test_outputs_of_one_row_share_no_memory(name):
    op = make_op(name, tokens=1, top_k=1)
    with _Calls() as calls:
        results(op, op.tensors)
    for func, arguments in calls.seen.items():
        torch.library.opcheck(func, arguments, test_utils="test_schema")


@pytest.mark.skipif(interpret, reason="of fakes, which kernels and references share")
@pytest.mark.parametrize("name", OPS)
def test_meta_tensors_have_results_and_gradients_too(name):
    def described(device):
        tensors = {n: t.to(device) for n, t in op.tensors.items()}
        return {what: (t.shape, t.stride(), t.dtype) for what, t in results(op, tensors).items()}

    op = make_op(name)
    assert described("meta") == described("cpu")


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


@pytest.mark.parametrize(
    "foreign", [torch.Tensor.tolist, torch.Tensor.numpy], ids=["list", "numpy"]
)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_is_no_tensor_is_an_error(name, argument, foreign):
    op = make_op(name)
    if argument == "counts" and name != "router_losses":
        pytest.skip("the op does not read the counts")
    if argument == "data" or argument in Topology._fields or (name, argument) == ("sdd", "a"):
        pytest.skip("a Matrix is made of it first, which stk checks")
    with pytest.raises(ValueError, match=r"expected .*tensor.*; got "):
        op.call(**op.tensors | {argument: foreign(op.tensors[argument])})


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_none_is_taken_or_is_an_error(name, argument):
    op = make_op(name)
    if argument == "data" or argument in Topology._fields or (name, argument) == ("sdd", "a"):
        pytest.skip("a Matrix is made of it first, which stk checks")
    with contextlib.suppress(ValueError):
        op.call(**op.tensors | {argument: None})


def test_other_than_bins_is_an_error():
    x, w, weights = torch.ones(2, 16), torch.ones(1, 16, 16), torch.ones(2, 1)
    bins = tuple(mb_kernels.bin_tokens(torch.zeros(2, 1, dtype=torch.int32), 1))
    for call in (
        lambda: mb_kernels.gather(x, bins, 1),
        lambda: mb_kernels.combine(x, bins, weights),
        lambda: mb_kernels.pad_bins(bins),
        lambda: mb_kernels.expert_mlp(x, w, w, bins, weights, activation="silu"),
    ):
        with pytest.raises(ValueError, match=r"bins: expected Bins; got a tuple\. .* bin_tokens"):
            call()


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
