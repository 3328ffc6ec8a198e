"""Every op as a call by tensors alone, for the tests that go through all of them.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import mb_kernels
import pytest
import torch
from mb_kernels import reference
from mb_kernels.block_sparse.reference import BLOCK, Topology, make_matrix
from mb_kernels.exchange import pack_routing, routing_reference, unpack_routing
from mb_kernels.testing import make_expert_ids

T, D, F, E, K = 9, 16, 16, 3, 2


class Op(NamedTuple):
    """A call by tensors alone; ``leaves`` names those with a gradient."""

    call: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    leaves: tuple[str, ...] = ()
    twin: Callable[..., Any] | None = None
    second_derivative: bool = False
    bf16_on_a_gpu: tuple[str, ...] = ()  # tensors that kernels take in bf16 alone

    def on_a_gpu(self) -> "Op":
        """The call as a GPU takes it."""
        cast = {name: self.tensors[name].bfloat16() for name in self.bf16_on_a_gpu}
        return self._replace(tensors=self.tensors | cast)


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
    if name in ("expert_mlp", "expert_mlp_recompute", "expert_mlp_8bit", "expert_mlp_fp8"):
        options = {"expert_mlp_recompute": {"recompute": True},
                   "expert_mlp_8bit": {"saved_activation_bits": 8},
                   "expert_mlp_fp8": {"fp8": True}}.get(name, {})  # fmt: skip
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
        leaves = tuple(n for n in tensors if n not in bins)
        in_bf16 = ("x", "w1", "w2") if name == "expert_mlp_fp8" else ()
        return Op(call, tensors, leaves, twin, bf16_on_a_gpu=in_bf16)
    if name == "quantize":
        call, twin = (
            lambda x: mb_kernels.dequantize(*mb_kernels.quantize(x, 4), bits=4, dtype=x.dtype),
            lambda x: reference.dequantize(*reference.quantize(x, 4), bits=4, dtype=x.dtype),
        )
        return Op(call, {"x": normal(tokens, hidden)}, (), twin)
    if name in ("to_float8", "to_float8_transposed"):

        def restored(m, x):
            codes, scales = m.to_float8(x, transpose=name.endswith("transposed"))
            return codes.float() * scales[..., None]

        call, twin = (lambda x, m=m: restored(m, x) for m in (mb_kernels, reference))
        return Op(call, {"x": normal(experts, tokens, hidden)}, (), twin)
    if name == "float8_linear":
        call, twin = (lambda x, w, bias, m=m: m.float8_linear(x, w, bias)
                      for m in (mb_kernels, reference))  # fmt: skip
        tensors = {"x": normal(tokens, hidden), "w": normal(ffn, hidden), "bias": normal(ffn)}
        return Op(call, tensors, tuple(tensors), twin, bf16_on_a_gpu=tuple(tensors))
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
    if name == "state_space_scan":
        call, twin = (
            lambda x, b, c, dt, A, D, begins, state, m=m: m.state_space_scan(
                *(x, b, c, dt, A, D, begins), state_BHNP=state
            )
            for m in (mb_kernels, reference)
        )
        tensors = {"x": normal(2, tokens, 4, ffn), "b": normal(2, tokens, 2, hidden)}
        tensors |= {"c": normal(2, tokens, 2, hidden), "dt": normal(2, tokens, 4).exp()}
        tensors |= {"A": -normal(4).exp(), "D": normal(4)}
        begins = torch.arange(2 * tokens).view(2, tokens) % 4 == 3
        tensors |= {"begins": begins, "state": normal(2, 4, hidden, ffn)}
        return Op(call, tensors, tuple(n for n in tensors if n != "begins"), twin)
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
    *("expert_mlp_fp8", "to_float8", "to_float8_transposed", "float8_linear"),
    *("quantize", "dequantize", "sum_of_squares", "symmetric_matmul"),
    *("linear_cross_entropy", "relative_attention", "state_space_scan", "routing_of_rows"),
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
