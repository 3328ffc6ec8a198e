"""Sinks and windows of attention: every way to compute them against loops in fp64."""

from dataclasses import replace

import pytest
import torch
from mb_layers import MoEConfig
from mb_parallel.recompute import apply_recompute
from mb_train.models import gpt, segments, sinks
from mb_train.models.attention import Attention, BlockContext, CoreAttention
from mb_train.models.bert import Bert
from mb_train.models.cache import KVCache
from mb_train.models.config import LatentSizes, TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.segments import (
    Segments,
    flash_kernel,
    flash_takes,
    seen,
    segment_mask,
    within_segments,
)
from mb_train.models.transformer import Block

ENDS = torch.tensor([[4, 7, 7, 12], [12, 12, 12, 12], [1, 2, 9, 12]])
B, S, H, G, C = 3, 12, 4, 2, 8


def by_loops(q, k, v, ends_BN, window, sinks_H, scale):
    """y_BSHV: each query's weights one by one; a sink takes its share and gives nothing."""
    numbers = Segments(ends_BN, q.shape[1]).numbers()
    rows = []
    for b in range(len(q)):
        for s in range(q.shape[1]):
            first = 0 if window is None else max(s - window, 0)
            places = [t for t in range(first, s + 1) if numbers[b, t] == numbers[b, s]]
            for h in range(q.shape[2]):
                g = h * k.shape[2] // q.shape[2]
                weights = [(q[b, s, h] @ k[b, t, g] * scale).exp() for t in places]
                total = sum(weights) + (0 if sinks_H is None else sinks_H[h].exp())
                rows.append(sum(w * v[b, t, g] for w, t in zip(weights, places, strict=True)))
                rows[-1] = rows[-1] / total
    return torch.stack(rows).view(*q.shape[:3], v.shape[3])


def _segment_by_segment(edges_q, edges_k, before, behind):
    """Slices of both sides' tokens and the mask of a segment, fp32."""
    pairs = torch.stack([edges_q[:-1], edges_q[1:], edges_k[:-1], edges_k[1:]], dim=1).tolist()
    for start, end, start_k, end_k in pairs:
        if end == start:
            continue
        assert (end - start, behind) == (end_k - start_k, 0)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        allowed = distance >= 0 if before < 0 else (distance >= 0) & (distance <= before)
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
        yield slice(start, end), slice(start_k, end_k), mask[None, None]


def _heads_first(x, heads):
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)[None]


def forward_on_cpu(q, k, v, edges_q, edges_k, longest_q, longest_k, scale, before, behind):
    y, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for own, other, mask in _segment_by_segment(edges_q, edges_k, before, behind):
        each = [_heads_first(x, q.shape[1]) for x in (q[own], k[other], v[other])]
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *each, attn_mask=mask, scale=scale
        )
        y[own], lse[:, own] = found[0].transpose(0, 1), sums[0]
    return y, lse


def backward_on_cpu(
    dy, q, k, v, y, lse, edges_q, edges_k, longest_q, longest_k, scale, before, behind
):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for own, other, mask in _segment_by_segment(edges_q, edges_k, before, behind):
        each = [_heads_first(x, q.shape[1]) for x in (dy[own], q[own], k[other], v[other], y[own])]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *each, lse[None, :, own].contiguous(), 0.0, False, attn_mask=mask, scale=scale
        )
        for total, places, grad in zip((dq, dk, dv), (own, other, other), found, strict=True):
            total[places] = grad[0].transpose(0, 1).unflatten(1, (total.shape[1], -1)).sum(2)
    return dq, dk, dv


def by_documents(q, k, v, *where, scale, window_size):
    return forward_on_cpu(q, k, v, *where, scale, *window_size)[0]


@pytest.fixture
def flash_on_cpu(monkeypatch):
    """torch's kernel for CPUs, segment by segment, in place of that for GPUs."""
    monkeypatch.setattr(sinks, "flash_forward", forward_on_cpu)
    monkeypatch.setattr(sinks, "flash_backward", backward_on_cpu)
    monkeypatch.setattr(segments, "flash_kernel", lambda: by_documents)


def config_of(**change):
    sizes = {
        "num_layers": 2, "hidden_size": 32, "ffn_size": 48, "vocab_size": 61, "num_heads": H,
        "num_kv_heads": G, "head_size": C, "max_positions": 32, "init_std": 0.2,
        "positions": "rope",
    }  # fmt: skip
    return TransformerConfig(**(sizes | change))


def of_core(window, softmax, ends_BN, *, flash, dtype=torch.float32):
    """The context of a layer, on the device of the ends."""
    config = config_of(window=window, softmax=softmax)
    of = Segments(ends_BN, S)
    within = within_segments(of, causal=True, flash=flash, whole=config.plain_attention)
    if "bounds" not in within:
        places_1S = torch.arange(S, device=ends_BN.device)[None]
        within |= seen(config, within.get("mask"), places_1S, dtype)
    return BlockContext(**within)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("ends", [ENDS, torch.full((3, 1), S)], ids=["documents", "whole"])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("window", [None, 0, 1, 3, 40])
@pytest.mark.parametrize("flash", [False, True], ids=["mask", "kernel"])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_a_layer_attends_as_the_loops(flash_on_cpu, ends, learned, window, flash, scale):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, heads, C) for heads in (H, G, G))
    s_H, dy = torch.tensor([0.3, -2.0, 4.0, 1.0]), torch.randn(B, S, H, C)
    core = CoreAttention(0.0, scale, window)
    context = of_core(window, "learnable" if learned else "vanilla", ends, flash=flash)
    plain = window is None and not learned and ends.shape[1] == 1  # torch's, without a mask
    assert (context.bounds is not None) == (flash and not plain)
    found = []
    for double in (False, True):
        leaves = [x.to(torch.float64 if double else torch.float32) for x in (q, k, v, s_H)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        own = leaves[3] if learned else None
        if double:
            y = by_loops(*leaves[:3], ends, window, own, C**-0.5 if scale is None else scale)
        else:
            y = core(*leaves[:3], context, own)
        wanted = leaves if learned else leaves[:3]
        found.append([y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))])
    for got, exact in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


MODELS = {
    "windows": {"window": 3, "window_layers": (True, False)},
    "all windows": {"window": 5},
    "sinks": {"softmax": "learnable"},
    "both": {"window": 3, "window_layers": (False, True), "softmax": "learnable"},
    "off by one": {"window": 2, "softmax": "off-by-one"},
    "gates and positions": {
        "window": 3, "window_layers": (True, False), "rope_layers": (True, False),
        "output_gate": True, "softmax": "learnable",
    },
}  # fmt: skip


MOE = MoEConfig(hidden_size=32, ffn_hidden_size=16, num_experts=4, top_k=2)


def model_of(moe=MOE, **change):
    torch.manual_seed(3)
    model = GPT(config_of(**change, moe=moe))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_says_the_same_every_way(flash_on_cpu, monkeypatch, kind):
    """By ids, ends, and the kernel; with recompute; whole sequences and documents."""
    model = model_of(**MODELS[kind])
    tokens_BS = torch.randint(61, (B, S))
    of = Segments(ENDS, S)
    positions_BS, labels_BS = of.positions(), tokens_BS.roll(-1, 1)
    documents = {"labels_BS": labels_BS, "positions_BS": positions_BS}
    ways = [
        {**documents, "segments_BS": of.numbers()},
        {**documents, "ends_BN": ENDS},
        {"labels_BS": labels_BS},
    ]

    def run(way):
        loss = model(tokens_BS, **way).losses["lm loss"]
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    by_ids, by_ends, whole = map(run, ways)
    torch.testing.assert_close(by_ids, by_ends, rtol=0, atol=0)
    assert (whole[0] - by_ends[0]).abs() > 1e-4
    monkeypatch.setattr(gpt, "flash_takes", lambda *about, **more: True)
    torch.testing.assert_close(run(ways[1]), by_ends)
    torch.testing.assert_close(run(ways[2]), whole)
    logits = model.logits(tokens_BS)
    monkeypatch.undo()
    torch.testing.assert_close(model.logits(tokens_BS), logits)
    plain = GPT(replace(model.config, window=None, window_layers=None, softmax="vanilla"))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert (plain.logits(tokens_BS) - logits).abs().max() > 1e-3
    cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
    apply_recompute(cores, "full")
    torch.testing.assert_close(run(ways[1]), by_ends)


@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_has_windows_and_sinks_too(kind):
    """Two rows of unequal length, step by step, far beyond the window and a cache's first room."""
    model = model_of(**MODELS[kind]).eval()
    tokens_BS = torch.randint(61, (2, 75))
    cache, seen_B = KVCache(2, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    for new in ([9, 4], [1, 1], [3, 2], [1, 1], [55, 60]):
        new_B = torch.tensor(new)
        places = seen_B[:, None] + torch.arange(max(new))
        cache.reserve(max(new))
        got = model.go_on(tokens_BS.gather(1, places.clamp(max=74)), new_B, cache)
        seen_B = seen_B + new_B
        for row, length in enumerate(seen_B.tolist()):
            want = model.logits(tokens_BS[row : row + 1, :length])[0, -1]
            torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-4)


def test_masks_are_made_once_for_each_kind_of_layer():
    """Numbers, which attention takes as they are, and no mask that no layer would use."""
    places_1S = torch.arange(S)[None]
    for dtype in (torch.float32, torch.bfloat16):
        two = seen(config_of(**MODELS["both"]), None, places_1S, dtype)
        assert two.keys() == {"mask", "near"}
        assert {(m.dtype, m.shape) for m in two.values()} == {(dtype, (1, 1, S, S + 1))}
    assert seen(config_of(**MODELS["windows"]), None, places_1S, dtype).keys() == {"near"}
    mask = segment_mask(Segments(ENDS, S).numbers(), causal=True)
    assert seen(config_of(**MODELS["all windows"]), mask, places_1S, dtype).keys() == {"near"}
    assert seen(config_of(**MODELS["windows"]), mask, places_1S, dtype).keys() == {"mask", "near"}
    plain = config_of()
    assert seen(plain, None, places_1S, dtype) == {}
    assert seen(plain, mask, places_1S, dtype)["mask"] is mask


def test_a_sink_of_0_is_off_by_one():
    learned, fixed = (Attention(config_of(softmax=kind)) for kind in ("learnable", "off-by-one"))
    assert learned.sinks.shape == (H,)
    assert not learned.sinks.any()
    assert fixed.sinks is None
    fixed.load_state_dict({n: w for n, w in learned.state_dict().items() if n != "sinks"})
    x = torch.randn(2, S, 32)
    context = of_core(None, "learnable", torch.full((2, 1), S), flash=False)
    torch.testing.assert_close(learned(x, context), fixed(x, context), rtol=0, atol=0)


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_a_block_with_them_is_one_graph(softmax):
    config = config_of(window=3, softmax=softmax)
    block = Block(config, 0, compute_dtype=torch.bfloat16)
    ends = torch.tensor([[5, S], [S, S]])
    context = BlockContext(**within_segments(Segments(ends, S), causal=True, flash=True))
    x = torch.randn(2, S, 32, dtype=torch.bfloat16)
    traced = []

    def only_traced(graph, inputs):
        traced.append(graph.print_readable(print_output=False))
        raise RuntimeError("traced to its end")

    compiled = torch.compile(block, fullgraph=True, backend=only_traced)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="traced to its end"):
        compiled(x, context)
    assert ("flash_with_sinks" if softmax == "learnable" else "varlen_attn") in traced[0]


def test_compiled_gradients_are_those_of_the_op(flash_on_cpu):
    """Traced with its backward pass: what the fakes promise is what comes."""
    torch._dynamo.reset()
    config = config_of(window=3, softmax="learnable")
    torch.manual_seed(0)
    block = Block(config, 0)
    with torch.no_grad():
        block.attention.sinks.normal_()
    context = of_core(3, "learnable", ENDS, flash=True)
    x = torch.randn(B, S, 32)
    found = []
    for call in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = call(x, context).x_BSD
        found.append([y, *torch.autograd.grad(y.square().sum(), list(block.parameters()))])
    torch.testing.assert_close(*found)


def test_the_op_is_what_it_says(flash_on_cpu):
    q, k, v = (torch.randn(20, heads, C).requires_grad_() for heads in (H, G, G))
    edges = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    own = torch.randn(H).requires_grad_()
    how = (q, k, v, own, edges, edges, 13, 13, 0.3, 4, 0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.mb_train.flash_with_sinks.default, how, test_utils=checks)
    y = sinks.flash_with_sinks(
        q, k, v, own, (edges, edges), (13, 13), scale=0.3, window_size=(4, 0)
    )
    (first,) = torch.autograd.grad(y.sum(), own, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(first.sum(), own)


def test_where_they_cannot_be_is_said():
    with pytest.raises(ValueError, match="vanilla softmax for a BERT, got a window of None"):
        Bert(config_of(positions="learned", softmax="learnable"))
    with pytest.raises(ValueError, match="one flag per layer in window_layers, 2, got 1"):
        config_of(window=3, window_layers=(True,))
    with pytest.raises(ValueError, match="window of at least 0 tokens, got -1"):
        config_of(window=-1)
    with pytest.raises(ValueError, match="softmax to be one of vanilla, off-by-one, learnable"):
        config_of(softmax="sharp")
    latent = {"latent": LatentSizes(None, 8, 4, 4, 8), "num_kv_heads": H, "qk_norm": "latent"}
    for change in ({"window": 3}, {"softmax": "learnable"}):
        with pytest.raises(ValueError, match="with latent attention, got"):
            config_of(**latent, **change)
    assert config_of(**latent).plain_attention


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [ENDS, torch.full((3, 1), S)], ids=["documents", "whole"])
@pytest.mark.parametrize("learned", [True, False], ids=["sinks", ""])
@pytest.mark.parametrize("window", [None, 0, 3, 40])
@pytest.mark.parametrize("width", [64, 24, 128])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 1), (6, 2)])
def test_flash_attention_is_the_masked_one(ends, learned, window, width, heads, groups):
    """Outputs and all gradients are as near to those in fp64 as torch's own under a mask."""
    repeats, dtype = 30, torch.bfloat16
    starts = torch.arange(repeats).repeat_interleave(ends.shape[1]) * S
    ends = (ends.repeat(1, repeats) + starts).cuda()  # sequences long enough for several tiles
    if ends.shape[1] == repeats:
        ends = ends[:, -1:]
    length = S * repeats
    torch.manual_seed(0)
    config = config_of(
        num_heads=heads, num_kv_heads=groups, head_size=width, window=window,
        softmax="learnable" if learned else "vanilla",
    )  # fmt: skip
    assert flash_takes(config, dtype, ends.device, training=True)
    of, core = Segments(ends, length), CoreAttention(0.0, None, window)
    q, k, v, dy = (
        torch.randn(B, length, n, width, device="cuda", dtype=dtype)
        for n in (heads, groups, groups, heads)
    )
    s_H = torch.linspace(-2, 4, heads, device="cuda").to(dtype)  # as the mask's way has them
    mask = segment_mask(of.numbers(), causal=True)
    places_1S = torch.arange(length, device="cuda")[None]

    def run(flash, dtype):
        within = {"causal": True}
        if flash:
            within = within_segments(of, causal=True, flash=True, whole=False)
        else:
            within |= seen(config, mask, places_1S, dtype)
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        own = s_H.to(torch.float32 if flash else dtype, copy=True).requires_grad_()
        y = core(*leaves, BlockContext(**within), own if learned else None)
        wanted = [*leaves, own] if learned else leaves
        return [y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))]

    ours, torchs, exacts = run(True, dtype), run(False, dtype), run(False, torch.float64)
    for got, other, exact in zip(ours, torchs, exacts, strict=True):
        error, allowed = ((x - exact).abs().max().item() for x in (got, other))
        scale = exact.abs().max().item()
        assert error <= 2 * allowed + scale * torch.finfo(dtype).eps, (error, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["both", "gates and positions"])
def test_a_model_with_them_computes_the_same_compiled_and_with_the_mask(monkeypatch, kind):
    """GPT-OSS's kind of layers in bf16: flash attention, the same compiled, and a mask."""
    assert flash_kernel() is not None
    model = model_of(moe=None, **MODELS[kind]).cuda()  # in 16 bits experts might change
    model.compute_dtype = torch.bfloat16
    tokens_BS = torch.randint(61, (B, S), device="cuda")
    batch = {"labels_BS": tokens_BS.roll(-1, 1), "ends_BN": ENDS.cuda()}

    def run():
        loss = model(tokens_BS, **batch).losses["lm loss"]
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    eager = run()
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "flash_takes", lambda *about, **more: False)
        masked = run()
    for block in model.stack.blocks.values():
        block.compile()
    for got in (run(), masked):
        for one, other in zip(got, eager, strict=True):
            error = (one - other).norm() / other.norm().clamp(min=1e-6)
            assert error < 0.05, error
