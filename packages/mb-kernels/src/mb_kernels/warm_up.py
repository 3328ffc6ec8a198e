"""``compile_ahead`` compiles kernels in parallel, before they are launched; ``warm_up`` a layer's.

Triton compiles a kernel at its first launch. A layer's first forward and backward therefore wait
for about twenty compilations, one after another. ``warm_up`` runs the ops on meta tensors, which
have no memory, and records what they would launch. That is quick. Then it compiles the recorded
kernels in threads while the caller goes on: of 10 s of work little more than 1 s holds Python's
lock (OLMoE's layer, Triton 3.6). Kernels that few layers use come last.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from mb_kernels.activation import is_glu
from mb_kernels.runtime import checks
from mb_kernels.runtime.host import cores
from mb_kernels.runtime.recording import record
from mb_kernels.runtime.registration import device_of, use_triton
from mb_kernels.runtime.widths import lacking


def warm_up(
    *,
    tokens: int,
    hidden_size: int,
    ffn_hidden_size: int,
    num_experts: int,
    top_k: int,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.bfloat16,
    bias_dtype: torch.dtype | None = None,
    score_function: str = "softmax",
    renormalize: bool = False,
    recompute: bool = False,
    ranks: int = 1,
    device: torch.device | str | None = None,
    training: bool = True,
    fp8: bool = False,
    threads: int | None = None,
) -> Future[int]:
    """Start to compile the kernels of routing, the router's losses and ``expert_mlp``.

    A kernel that is launched in the meantime waits for its own compilation alone.

    Args:
        tokens: T of one call. The tiles depend on T K / E, the rows per expert, and some kernels
            on whether 16 divides T.
        hidden_size, ffn_hidden_size, num_experts, top_k: D, F, E and K. If 4 does not divide E,
            the router's losses are compiled at their first use: they read a count that is then not
            aligned to 16 bytes.
        activation: a name from ``mb_kernels.activation``.
        dtype: of x and weights; the router's logits are fp32.
        bias_dtype: of the experts' biases, if they have some.
        score_function: of the router, "softmax" or "sigmoid".
        renormalize: as ``topk_softmax`` will be told.
        recompute: as ``expert_mlp`` will be told.
        ranks: P, the number of ranks that the experts are spread over; it divides E. Above 1 the
            kernels are for E / P experts and the tokens of all ranks, and those that prepare the
            exchange of tokens are added (not the exchange itself).
        device: of the layer; None is the current GPU.
        training: forward and backward; False: a forward that saves nothing for a backward.
        fp8: as ``expert_mlp``'s.
        threads: None is one for each core that this process may use.

    Returns:
        A future. Its ``result()`` waits for all kernels and is their number, compiled or found in
        Triton's cache: 0 on a device without kernels, or if this Triton cannot compile ahead.

    Raises:
        ValueError: a size that is no integer of at least 1; an unknown activation or score
            function; ranks that do not divide the experts.
    """
    is_glu(activation)
    sizes = {
        "tokens": tokens,
        "hidden_size": hidden_size,
        "ffn_hidden_size": ffn_hidden_size,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    checks.require_integer(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, as its calls will have; got {size}.")
    if ranks < 1 or num_experts % ranks:
        raise ValueError(f"ranks: expected to divide {num_experts} experts; got {ranks}.")
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"score_function: expected softmax or sigmoid; got {score_function!r}.")
    device = _device(device)
    more = partial(lacking, torch.empty(0, device=device, dtype=dtype))

    def rehearse() -> None:
        sigmoid = score_function == "sigmoid"
        if sigmoid:
            rehearse_choice(tokens, num_experts, top_k)
        else:
            rehearse_softmax(tokens, num_experts, top_k, renormalize)
        rehearse_bins(tokens, num_experts, top_k)
        per_rank = num_experts // ranks
        choices = min(top_k, per_rank)
        if ranks > 1:
            rehearse_exchange(tokens, num_experts, top_k, ranks)
            rehearse_bins(tokens, ranks, min(top_k, ranks))
            rehearse_bins(tokens * ranks, per_rank, choices)
        rehearse_experts(
            tokens * ranks,
            *(size + more(size) for size in (hidden_size, ffn_hidden_size)),
            *(per_rank, choices, activation, dtype),
            bias_dtype=bias_dtype,
            keep_rows=training and not recompute and choices == 1,
            recompute=recompute,
            training=training,
            fp8=fp8,
            ranks=ranks,
        )
        rehearse_losses(tokens, num_experts, sigmoid=sigmoid)

    return compile_ahead(rehearse, device=device, threads=threads)


def compile_ahead(
    rehearse: Callable[[], object],
    *,
    device: torch.device | str | None = None,
    threads: int | None = None,
) -> Future[int]:
    """Start to compile the kernels that this package's functions in ``rehearse`` would launch.

    Args:
        rehearse: is called at once, in the caller's thread. Given meta tensors, the functions
            within compute nothing and list their kernels, as they would be launched for tensors on
            the device, each at an address that 16 divides.
        device: that they will run on; None is the current GPU.
        threads: None is one for each core that this process may use.

    Returns:
        As ``warm_up``'s. On a device without kernels ``rehearse`` is not called.
    """
    here = torch.empty(0, device=_device(device))
    if not use_triton(here) or not here.is_cuda:
        nothing: Future[int] = Future()
        nothing.set_result(0)
        return nothing
    from mb_kernels.runtime.launch import compile_beside
    from mb_kernels.runtime.plan import assume, plan_on

    with device_of(here), assume(partial(plan_on, here.device)), record() as launches:
        rehearse()

    def compile_all() -> int:
        with device_of(here):  # the current device is a thread's own
            return compile_beside(launches, threads or cores())

    pool = ThreadPoolExecutor(1, thread_name_prefix="compile-ahead")
    try:
        return pool.submit(compile_all)
    finally:
        pool.shutdown(wait=False)


def _device(device: torch.device | str | None) -> torch.device | str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def rehearse_choice(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.float32
) -> None:
    """``topk_ids`` on scores without memory."""
    from mb_kernels.routing import kernels as routing

    routing.topk_ids(_empty(tokens, experts, dtype=dtype), top_k)


def rehearse_softmax(
    tokens: int, experts: int, top_k: int, renormalize: bool, dtype: torch.dtype = torch.float32
) -> None:
    """``topk_softmax``, forward and backward, on tensors without memory."""
    from mb_kernels.routing import kernels as routing

    wide = partial(_empty, dtype=torch.float32)
    logits, ids = _empty(tokens, experts, dtype=dtype), _int32(tokens, top_k)
    probs, weights = wide(tokens, experts), wide(tokens, top_k)
    routing.topk_softmax(logits, top_k, renormalize)
    for d_probs in (probs, None):
        routing.topk_softmax_backward(weights, d_probs, probs, weights, ids, renormalize)


def rehearse_linear_cross_entropy(
    rows: int, dtype: torch.dtype, *, start: int | None = None
) -> None:
    """``linear_cross_entropy`` in training, on logits without memory, for ``compile_ahead``.

    Not by the function itself: its arithmetic on meta tensors imports torch's compiler.

    Args:
        rows: of the head's weight, on this rank.
        dtype: of the hidden states.
        start: of a rank's share of the vocabulary, as ``VocabularyShard`` has it.
    """
    from mb_kernels.linear_cross_entropy import kernels

    tokens = 16  # any number: there is one kernel for all
    logits, labels = _empty(tokens, rows, dtype=dtype), _empty(tokens, dtype=torch.int64)
    each = _empty(tokens, dtype=torch.float32)
    if start is None:
        kernels.losses_and_gradients(logits, labels, each, gradient=True)
    else:
        kernels.row_statistics(logits, labels, start)
        kernels.row_gradients(logits, labels, each, each, each, start)


def rehearse_bins(tokens: int, experts: int, top_k: int) -> None:
    """``bin_tokens`` on ids without memory."""
    from mb_kernels.routing import kernels as routing

    routing.bin_tokens(_int32(tokens, top_k), experts, None)


def rehearse_exchange(tokens: int, experts: int, top_k: int, ranks: int) -> None:
    """``pack_routing`` and ``unpack_routing``, on tensors without memory."""
    from mb_kernels.exchange import routing_kernels as routing

    weights = _empty(tokens, top_k, dtype=torch.float32)
    routing.pack_routing(weights, _int32(tokens, top_k), experts, ranks)
    words = _empty(tokens * ranks, 2 * top_k, dtype=torch.float32)
    for counts in (None, _int32(ranks)):
        chosen, _, columns = routing.unpack_routing(words, counts, 0, experts // ranks)
    routing.unpack_routing_backward(chosen, columns)


def rehearse_losses(
    tokens: int, experts: int, dtype: torch.dtype = torch.float32, *, sigmoid: bool = False
) -> None:
    """A router's losses, forward and backward, with and without a mask."""
    from mb_kernels.router_losses import kernels as router_losses

    wide = partial(_empty, dtype=torch.float32)
    logits, counts, lse = _empty(tokens, experts, dtype=dtype), _int32(experts), wide(tokens)
    probs = None if sigmoid else wide(tokens, experts)
    options = (0.1, 0.1, sigmoid)
    for mask in (None, _empty(tokens, dtype=torch.bool)):
        given = (None, None) if mask is None else (wide(), _int32())
        router_losses.router_losses(logits, probs, counts, counts, _int32(), mask, *given, *options)
        router_losses.router_losses_backward(
            wide(), logits if probs is None else probs, counts, lse, wide(), mask, *options
        )


def rehearse_experts(
    tokens: int,
    hidden: int,
    ffn: int,
    experts: int,
    top_k: int,
    activation: str,
    dtype: torch.dtype,
    *,
    keep_rows: bool,
    bias_dtype: torch.dtype | None = None,
    transposed: Sequence[bool] = (False, False),
    recompute: bool = False,
    training: bool = True,
    fp8: bool = False,
    ranks: int = 1,
) -> None:
    """``expert_mlp``, forward and backward, on tensors without memory.

    With several ``ranks`` also such that results are stored on other ranks, see ``home_P``.
    """
    from mb_kernels.expert_mlp import steps

    rows, columns = tokens * top_k, ffn * (2 if is_glu(activation) else 1)
    empty = partial(_empty, dtype=dtype)
    x, w1, w2 = empty(tokens, hidden), empty(experts, columns, hidden), empty(experts, hidden, ffn)
    w1, w2 = (w.mT.contiguous() if t else w for w, t in zip((w1, w2), transposed, strict=True))
    indices = (_int32(rows), _int32(rows), _int32(experts + 1))
    b1 = b2 = None
    if bias_dtype is not None:
        b1, b2 = (_empty(experts, size, dtype=bias_dtype) for size in (columns, hidden))
    inputs = (w1, w2, *indices, _empty(tokens, top_k, dtype=torch.float32), b1, b2)
    saved_bits = 16 if training and not recompute else 0
    needs = [True] * 4 + [bias_dtype is not None] * 2
    order = list(transposed)
    for home in (None,) if ranks == 1 else (None, _empty(ranks, dtype=torch.int64)):
        options = (order, activation, saved_bits, keep_rows, fp8, home)
        *_, h, tiles, kept = steps.expert_mlp(x, *inputs, *options)
        if training:
            steps.expert_mlp_backward(
                empty(tokens, hidden),
                kept if keep_rows else x,
                *(*inputs, order, h, tiles, activation, keep_rows, fp8, needs, home),
            )


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)
