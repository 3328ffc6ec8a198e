"""What the gate compiles: the launches of every op, recorded on meta tensors of several sizes.

A kernel compiles to other code for each dtype and activation, and for sizes that do or do not
divide its tile. All combinations are thousands of builds: ``every_case`` (``--all``) has them.
``gate_cases`` takes the launches of a few layers and leaves out those that bring nothing new (see
``targets.cover``). It leaves out fewest for one chip of each maker, and most for chips that use the
tiles of a similar one.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mb_kernels.accumulate_grad import kernels as accumulating
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS, PRESETS, is_glu
from mb_kernels.adamw import kernels as adamw
from mb_kernels.block_sparse import kernels as block_sparse
from mb_kernels.block_sparse import mlp_kernels
from mb_kernels.block_sparse.mlp_reference import empty_topology
from mb_kernels.block_sparse.reference import BLOCK
from mb_kernels.elementwise import kernels as elementwise
from mb_kernels.exchange import Layout, PeerMemory
from mb_kernels.grouped_gemm import kernels as grouped_gemm
from mb_kernels.linear_cross_entropy import kernels as cross_entropy
from mb_kernels.muon import kernels as muon
from mb_kernels.permute import kernels as permute
from mb_kernels.quantize import kernels as quantize
from mb_kernels.relative_attention import kernels as attention
from mb_kernels.state_space import steps as state_space
from mb_kernels.sum_of_squares import kernels as squares
from mb_kernels.symmetric_matmul import kernels as symmetric
from mb_kernels.targets.cover import cover
from mb_kernels.targets.gate_case import GateCase
from mb_kernels.targets.record import recorded_cases
from mb_kernels.targets.table import NEIGHBOURS, Target
from mb_kernels.warm_up import (
    rehearse_bins,
    rehearse_choice,
    rehearse_exchange,
    rehearse_experts,
    rehearse_losses,
    rehearse_softmax,
)

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


class Layer(NamedTuple):
    """Sizes of an expert MLP."""

    dtype: torch.dtype
    activation: str
    hidden: int = 2048
    ffn: int = 1024
    top_k: int = 8
    tokens: int = 16384
    experts: int = 64
    bias: torch.dtype | None = None
    transposed: tuple[bool, bool] = (False, False)
    fp8: bool = False

    @property
    def label(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        tokens = "" if self.tokens == 16384 else f" T{self.tokens}"
        bias = "" if self.bias is None else " bias"
        order = " transposed" if any(self.transposed) else ""
        sizes = f"D{self.hidden} F{self.ffn} K{self.top_k}{tokens}"
        dtype += " fp8" if self.fp8 else ""
        return f"{self.activation} {dtype} {sizes}{bias}{order}"


_GPT_OSS = "swiglu(alpha=1.702, limit=7, offset=1, interleaved)"  # as its checkpoints lie
# No tile divides 720. With K = 1 rows go straight to their tokens; 256 rows per expert are few.
LAYERS = (
    Layer(_BF16, "swiglu"),
    Layer(_BF16, "gelu", 768, 3072, 1),
    Layer(_BF16, "geglu", 720, 720, 8),
    Layer(_BF16, "gelu", 720, 720, 1, tokens=65536),
    Layer(_FP16, "geglu_tanh", 2048, 720, 1),
    Layer(_FP16, "squared_relu", 720, 1024, 8),
    Layer(_FP32, "geglu", 720, 720, 8),
    Layer(_FP32, "gelu", 768, 3072, 1),
    Layer(_BF16, "swiglu", tokens=2**20),  # 2**31 elements of x
    Layer(_BF16, "swiglu", 2048, 768, 8, 64, 128),  # few rows, of which weights are all there is
    Layer(_BF16, "gelu", 720, 720, 1, 64, 64),
    Layer(_BF16, "swigluoai", 2880, 2880, 4, experts=32, bias=_BF16),  # GPT-OSS 20B
    Layer(_BF16, "gelu", 768, 3072, 1, bias=_FP32),
    Layer(_BF16, "gelu", 720, 720, 1, 64, 64, bias=_BF16),
    Layer(_FP32, "swigluoai", 720, 720, 8, bias=_FP32),
    Layer(_BF16, _GPT_OSS, 2880, 2880, 4, experts=32, bias=_BF16, transposed=(True, True)),
    Layer(_BF16, _GPT_OSS, 720, 720, 8, 64, 64, transposed=(True, True)),
    Layer(_BF16, "swiglu(limit=10)", 7168, 2048, 8),  # DeepSeek-V4
    Layer(_BF16, "swiglu(gate_cap=4, up_cap=25)", 720, 720, 8, transposed=(True, True)),
    Layer(_FP32, "geglu_tanh(limit=7, interleaved)", 720, 720, 8, transposed=(True, False)),
)
_IN_DEPTH = ("sm90", "gfx942")
_WIDTHS = ((2048, 1024), (720, 720))
ALL_LAYERS = tuple(
    Layer(dtype, activation, hidden, ffn, top_k, bias=bias)
    for dtype, activation, (hidden, ffn), top_k, bias in itertools.product(
        (_BF16, _FP16, _FP32),
        (*GLU_ACTIVATIONS, *PRESETS, *PLAIN_ACTIVATIONS),
        _WIDTHS,
        (1, 8),
        (None, _FP32),
    )
) + tuple(
    Layer(dtype, activation, hidden, ffn, top_k, bias=bias, transposed=(transposed, transposed))
    for dtype, activation, (hidden, ffn), top_k, bias, transposed in itertools.product(
        (_BF16, _FP16, _FP32),
        (
            "swiglu(limit=10)",
            "swiglu(alpha=1.702, limit=7, offset=1)",
            "swiglu(gate_cap=4, up_cap=25)",
            *(f"{glu}(limit=7, offset=1, interleaved)" for glu in GLU_ACTIVATIONS),
            *("swiglu", "gelu"),
        ),
        _WIDTHS,
        (8,),
        (None, _FP32),
        (False, True),
    )
)

# Of state spaces: width of a head, keys of a state, groups of 48 heads. Granite 4 has one group,
# Nemotron 3 eight.
STATES = ((64, 128, 1), (64, 128, 8), (48, 40, 8))

# Of attention: dtype, width of a head, causal. 64: T5's encoder and decoder; no tile divides 120.
Heads = tuple[torch.dtype, int, bool]
HEADS: tuple[Heads, ...] = (
    *((_BF16, 64, False), (_BF16, 64, True)),
    *((_FP16, 120, True), (_FP32, 120, False)),
)
ALL_HEADS = tuple(itertools.product((_BF16, _FP16, _FP32), (16, 64, 80, 128), (False, True)))


# On the chips that multiply 8-bit floats.
FP8_LAYERS = (
    Layer(_BF16, "swiglu", fp8=True),
    Layer(_BF16, "gelu", 768, 3072, 1, fp8=True),
    Layer(_BF16, "geglu", 720, 720, 8, fp8=True),
    Layer(_BF16, "swigluoai", 2880, 2880, 4, experts=32, bias=_BF16, fp8=True),
    Layer(_BF16, "swiglu", 2048, 768, 8, 64, 128, transposed=(True, True), fp8=True),
)
ALL_FP8_LAYERS = tuple(
    Layer(_BF16, activation, hidden, ffn, top_k, bias=bias, fp8=True)
    for activation, (hidden, ffn), top_k, bias in itertools.product(
        (*GLU_ACTIVATIONS, *PRESETS, *PLAIN_ACTIVATIONS, "swiglu(limit=10)"),
        _WIDTHS,
        (1, 8),
        (None, _FP32),
    )
)


def gate_cases(target: Target) -> list[GateCase]:
    """Every kernel of the package in each dtype and kind of size, but not in all combinations."""
    depth = 2 if target.name in _IN_DEPTH else 0 if target.name in NEIGHBOURS else 1
    layers = (*LAYERS, *(FP8_LAYERS if target.float8 else ()))
    return cover(recorded_cases(target, _calls(layers, HEADS)), depth=depth)


def every_case(target: Target) -> list[GateCase]:
    """Every dtype with every activation and every kind of size."""
    layers = (*LAYERS, *ALL_LAYERS)
    if target.float8 is not None:
        layers += (*FP8_LAYERS, *ALL_FP8_LAYERS)
    return recorded_cases(target, _calls(layers, (*HEADS, *ALL_HEADS)))


def _calls(layers: tuple[Layer, ...], heads: tuple[Heads, ...]) -> dict[str, Callable[[], object]]:
    small = {**_small_ops(), **_products(), **_state_space()}
    return small | _layers(layers) | _attention(heads)


def _empty(*shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _layers(layers: tuple[Layer, ...]) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {
        layer.label: partial(_run_layer, layer) for layer in layers
    }
    options: dict[str, Any] = {"dtype": _BF16, "ranks": 4}
    return calls | {
        "gelu K1 to 4": partial(
            *(rehearse_experts, 65536, 768, 3072, 16, 1, "gelu"), keep_rows=True, **options
        ),
        "swiglu K8 to 4": partial(
            *(rehearse_experts, 65536, 2048, 1024, 16, 8, "swiglu"), keep_rows=False, **options
        ),
    }


def _run_layer(layer: Layer) -> None:
    """Forward and backward. With K = 1 the backward once has x's copy in rows, and once x."""
    sizes = (layer.tokens, layer.hidden, layer.ffn, layer.experts, layer.top_k)
    for keep in (False, True) if layer.top_k == 1 else (False,):
        rehearse_experts(
            *(*sizes, layer.activation, layer.dtype),
            keep_rows=keep,
            bias_dtype=layer.bias,
            transposed=layer.transposed,
            fp8=layer.fp8,
        )


def _attention(heads: tuple[Heads, ...]) -> dict[str, Callable[[], object]]:
    def both_ways(dtype: torch.dtype, width: int, causal: bool) -> None:
        q, bias, offsets = (
            _empty(4096, 12, width, dtype=dtype),
            _empty(12, 1023, dtype=_FP32),
            _int32(9),
        )
        k = v = _empty(4096, 4, width, dtype=dtype)
        y, norms = attention.relative_attention(q, k, v, bias, offsets, causal, 1.0)
        given = (y, q, k, v, bias, offsets, y, norms)
        attention.relative_attention_backward(*given, causal, 1.0, True)

    return {
        f"{str(dtype).removeprefix('torch.')} C{width}{' causal' * causal}": partial(
            both_ways, dtype, width, causal
        )
        for dtype, width, causal in heads
    }


def _state_space() -> dict[str, Callable[[], object]]:
    def both_ways(width: int, keys: int, groups: int) -> None:
        x, keys_ = (_empty(2, 4096, *of) for of in ((48, width), (groups, keys)))
        dt, rates = _empty(2, 4096, 48, dtype=_FP32), _empty(48, dtype=_FP32)
        begins, state = _empty(2, 4096, dtype=torch.bool), _empty(2, 48, keys, width, dtype=_FP32)
        given = (x, keys_, keys_, dt, rates, rates)
        state_space.state_space_scan(*given, begins, state)
        state_space.state_space_scan_backward(x, state, *given, None, state)

    return {
        f"state space P{width} N{keys} G{groups}": partial(both_ways, width, keys, groups)
        for width, keys, groups in STATES
    }


def _products() -> dict[str, Callable[[], object]]:
    """The products that stand alone: grouped, and block-sparse in each order a layer meets."""

    def grouped() -> None:
        x, w, offsets = _empty(4096, 720), _empty(8, 1024, 720), _int32(9)
        grouped_gemm.grouped_gemm(x, w, offsets, True)
        grouped_gemm.grouped_gemm(x, w.transpose(1, 2).contiguous(), offsets, False)
        grouped_gemm.grouped_outer(_empty(4096, 1024), x, offsets)

    def sparse(dtype: torch.dtype, hidden: int) -> None:
        experts, ffn, block_rows = 8, 1024, 80
        topology = empty_topology(_int32(experts + 1), block_rows, ffn // BLOCK)
        empty = partial(_empty, dtype=dtype)
        x, dy = empty(1, block_rows * BLOCK, hidden), empty(1, block_rows * BLOCK, hidden)
        w1, w2 = empty(experts, ffn, hidden), empty(experts, hidden, ffn)
        data = empty(block_rows * ffn // BLOCK, BLOCK, BLOCK)
        block_sparse.sdd(x, w1.transpose(1, 2), *topology)
        block_sparse.sdd(dy, w2, *topology)
        block_sparse.sdd(x.transpose(1, 2).contiguous().transpose(1, 2), w2, *topology)
        block_sparse.dsd(data, w2.transpose(1, 2), *topology, False, 1, False)
        block_sparse.dsd(data, w1, *topology, False, 1, False)
        block_sparse.dsd(data, x, *topology, True, experts, False)
        block_sparse.dsd(data, dy, *topology, True, experts, True)

    def gram(dtype: torch.dtype, size: int, depth: int) -> None:
        x, tall = _empty(64, size, depth, dtype=dtype), _empty(64, depth, size, dtype=dtype)
        for rows in (x, tall.mT):
            small = symmetric.symmetric_matmul(rows, rows, None, 1.0, 0.0, 0.0)
        symmetric.symmetric_matmul(small, small, small, 0.1, 0.1, 0.1)

    calls: dict[str, Callable[[], object]] = {
        "grouped": grouped,
        "symmetric bf16": partial(gram, _BF16, 768, 3072),
        "symmetric fp16, anywhere": partial(gram, _FP16, 180, 721),
    }
    for dtype, hidden in ((_BF16, 2048), (_BF16, 720), (_FP32, 720)):
        label = f"{str(dtype).removeprefix('torch.')} D{hidden}"
        calls[f"sparse {label}"] = partial(sparse, dtype, hidden)
    return calls


def _small_ops() -> dict[str, Callable[[], object]]:
    """Routing, permutation, losses, quantisation: bound by memory or by launches."""

    def routed(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
        rehearse_softmax(tokens, experts, top_k, True, dtype)
        rehearse_choice(tokens, experts, top_k, dtype)
        rehearse_bins(tokens, experts, top_k)
        rehearse_losses(tokens, experts, dtype)

    def permuted(dtype: torch.dtype, hidden: int) -> None:
        indices = (_int32(131072), _int32(131072), _int32(65))
        x, rows = _empty(16384, hidden, dtype=dtype), _empty(131072, hidden, dtype=dtype)
        weights = _empty(16384, 8, dtype=_FP32)
        permute.gather(x, *indices, 8)
        permute.combine(rows, *indices, weights, 8)
        permute.combine(rows, *indices, None, 8)
        permute.combine_backward(x, rows, *indices, weights)

    def quantised(bits: int, columns: int) -> None:
        quantize.dequantize(*quantize.quantize(_empty(4096, columns), bits), bits, _BF16)

    def indices(width: int) -> None:
        mlp_kernels.pad_indices(_int32(65536), _int32(65536), _int32(65), 73728)
        mlp_kernels.topology_indices(_int32(65), 576, width)

    def activations(activation: str) -> None:
        h, d_a = _empty(64, 2048 * (2 if is_glu(activation) else 1)), _empty(64, 2048)
        elementwise.activation(h, activation)
        elementwise.activation_backward(d_a, h, activation)

    def stepped(
        grad: torch.dtype, moment: torch.dtype, copy: torch.dtype | None, numbers: int
    ) -> None:
        def tensors(dtype: torch.dtype) -> list[Tensor]:
            return [_empty(numbers, dtype=dtype)] * 200

        copies = [None] * 200 if copy is None else tensors(copy)
        one = _empty(dtype=_FP32)
        rates: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        lists = (tensors(_FP32), tensors(grad), tensors(moment), tensors(moment), copies)
        adamw.adamw_step(*lists, [one] * 200, **rates, grad_scale=one, found_inf=one)

    def squared(numbers: int) -> None:
        squares.sum_of_squares([_empty(numbers, dtype=d) for d in (_FP32, _BF16, _FP16)] * 60)

    def accumulated(total: torch.dtype, numbers: int) -> None:
        accumulating.accumulate_grad(_empty(numbers, dtype=total), _empty(numbers))

    def orthogonal(grad: torch.dtype, numbers: int) -> None:
        weight, one = _empty(numbers, dtype=_FP32), _empty(dtype=_FP32)
        update = muon.muon_momentum(
            _empty(numbers, dtype=grad), weight, momentum=0.9, grad_scale=one, found_inf=one
        )
        muon.muon_step(weight, update, _empty(numbers), size=0.1, decay=0.1, found_inf=one)

    def scored() -> None:
        logits = _empty(8192, 262144)  # a slice beyond 2 GiB
        labels, weights = _empty(8192, dtype=torch.int64), _empty(8192, dtype=_FP32)
        for gradient in (True, False):
            cross_entropy.losses_and_gradients(logits, labels, weights, gradient=gradient)
        cross_entropy.row_statistics(logits, labels, 1000)
        cross_entropy.row_gradients(logits, labels, weights, weights, weights, 1000)

    def exchanged() -> None:
        layout = Layout(ranks=8, tokens=16384, hidden=7168, words=16, dtype=_BF16)
        arena, table = _empty(layout.nbytes, dtype=torch.uint8), _empty(8, dtype=torch.int64)
        memory = PeerMemory(layout, 3, arena, table, torch.zeros(3, dtype=torch.int32))
        slots, words = _int32(16384 * 8), _empty(16384, 16, dtype=_FP32)
        sent = {"order_N": slots, "columns": 8, "payload": words}
        memory.push("tokens", _empty(16384, 7168), _int32(8), **sent)
        counts = memory.wait("tokens")
        memory.push("home", memory.rows("tokens"), counts)
        memory.push("home", None, counts, payload=memory.payload("tokens"))
        memory.sum_home(memory.rows("home"), slots.view(-1, 8), slots, _int32(9))
        counted = Layout(ranks=8, tokens=1, hidden=64, words=1, dtype=torch.int32)
        PeerMemory(counted, 3, arena, table, memory.error).gather(_int32(64))

    return {
        "gradients of micro-batches": partial(accumulated, _FP32, 4096),
        "the first two": partial(accumulated, _BF16, 4001),
        "sum of squares": partial(squared, 4096),
        "sum of squares, anywhere": partial(squared, 4001),
        "AdamW, anywhere": partial(stepped, _FP32, _FP32, _BF16, 4001),
        "AdamW, fp32": partial(stepped, _FP32, _FP32, None, 4096),
        "AdamW, fp32, copy": partial(stepped, _FP32, _FP32, _BF16, 4096),
        "AdamW, bf16": partial(stepped, _BF16, _BF16, _BF16, 4096),
        "AdamW, fp16": partial(stepped, _FP16, _FP32, _FP16, 4096),
        "bf16, anywhere": partial(orthogonal, _BF16, 4001),
        "fp32": partial(orthogonal, _FP32, 4096),
        "V262144": scored,
        "D7168 over 8": exchanged,
        "E64 K8 over 4": partial(rehearse_exchange, 16384, 64, 8, 4),
        "E8 K2 over 8": partial(rehearse_exchange, 16384, 8, 2, 8),
        "E128 K8": partial(routed, 16384, 128, 8, _BF16),
        "E60 K4": partial(routed, 16383, 60, 4, _FP32),
        "E256 sigmoid": partial(rehearse_losses, 16384, 256, sigmoid=True),
        "D2048": partial(permuted, _BF16, 2048),
        "D720 fp32": partial(permuted, _FP32, 720),
        "8 bits": partial(quantised, 8, 1024),
        "4 bits, C720": partial(quantised, 4, 720),
        "F1536": partial(indices, 12),
        "geglu": partial(activations, "geglu"),
        "gelu": partial(activations, "gelu"),
    }
