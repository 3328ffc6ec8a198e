"""Attention within packed documents: the kernel over unequal sequences against a mask."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mb_data import document_layout
from mb_layers import MoEConfig
from mb_parallel.recompute import apply_recompute
from mb_train.models import gpt, segments
from mb_train.models.attention import BlockContext, CoreAttention
from mb_train.models.config import LatentSizes, TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.segments import (
    Segments,
    attend,
    flash_takes,
    segment_mask,
    within_segments,
)
from mb_train.models.transformer import Block
from mb_train.tasks.gpt import ends_of

ENDS = {
    "several": [[0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0], [0] * 12, [1, 1, 1] + [0] * 8 + [1]],
    "one": [[0] * 12, [0] * 11 + [1]],
    "every": [[1] * 12],
}  # fmt: skip


def by_document(q_THC, k_THC, v_THC, edges, edges_k, longest, longest_k, *, scale, window_size):
    """`varlen_attn` in plain words, on any device."""
    assert window_size in ((-1, 0), (-1, -1))
    assert (edges[-1], edges_k[-1]) == (len(q_THC), len(k_THC))
    assert longest >= int(edges.diff().max())
    assert longest_k >= int(edges_k.diff().max())
    parts = []
    places = torch.stack([edges[:-1], edges[1:], edges_k[:-1], edges_k[1:]], dim=1).tolist()
    for start, end, start_k, end_k in places:
        q, k, v = (
            x[a:b].transpose(0, 1)
            for x, a, b in ((q_THC, start, end), (k_THC, start_k, end_k), (v_THC, start_k, end_k))
        )
        if end > start:
            causal = window_size == (-1, 0)
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale))
    return torch.cat(parts, dim=1).transpose(0, 1)


def segments_of(ends_BS):
    return torch.from_numpy(np.cumsum(ends_BS, axis=1) - ends_BS)


def check(ends, heads, groups, width, scale, *, dtype, device, value=None):
    """Output and gradients are as near to those in fp64 as torch's own under a mask.

    value: width of values, if another.
    """
    ends_BS = np.array(ends)
    B, S = ends_BS.shape
    torch.manual_seed(0)
    ends_BN = torch.from_numpy(ends_of(ends_BS)).to(device)
    found = within_segments(Segments(ends_BN, S), causal=True, flash=True).get("bounds")
    if found is None:  # nothing divides the sequences
        assert ends_BN.shape[1] == 1
        edges = torch.arange(0, B * S + 1, S, device=device).int()
        found = segments.Bounds(edges, edges, S, S, segments.flash_kernel())
    mask = segment_mask(segments_of(ends_BS).to(device), causal=True)
    wide = value or width
    shapes = (heads, width), (groups, width), (groups, wide), (heads, wide)
    q, k, v, dy = (torch.randn(B, S, *shape, dtype=dtype, device=device) for shape in shapes)

    def run(call, dtype=dtype):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        y = call(*inputs)
        y.backward(dy.to(dtype))
        return [y, *(x.grad for x in inputs)]

    def masked(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            *heads_first, attn_mask=mask, scale=scale, enable_gqa=heads != groups
        )
        return y.transpose(1, 2)

    # Kernels sum in fp32 each in an order of its own, and one may happen to be exact.
    least = torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    ours, torchs = run(lambda *x: attend(*x, found, causal=True, scale=scale)), run(masked)
    for got, other, exact in zip(ours, torchs, run(masked, torch.float64), strict=True):
        error, allowed = ((x - exact).abs().max().item() for x in (got, other))
        assert error <= 2 * allowed + least, (error, allowed)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize(("heads", "groups", "scale"), [(2, 2, None), (4, 2, 0.7), (3, 1, 1.0)])
def test_documents_attend_as_under_a_mask(monkeypatch, kind, heads, groups, scale):
    monkeypatch.setattr(segments, "flash_kernel", lambda: by_document)
    for value in (8, 6, 12):
        check(ENDS[kind], heads, groups, 8, scale, dtype=torch.float32, device="cpu", value=value)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize(("heads", "groups", "scale"), [(2, 2, None), (4, 2, 0.2)])
@pytest.mark.parametrize(("width", "value"), [(64, 64), (128, 128), (24, 24), (192, 128)])
def test_the_kernel_attends_as_under_a_mask(kind, heads, groups, scale, width, value):
    ends = np.tile(ENDS[kind], (1, 40))
    where = torch.device("cuda")
    assert flash_takes(_config(head_size=width), torch.bfloat16, where, training=True)
    check(ends, heads, groups, width, scale, dtype=torch.bfloat16, device="cuda", value=value)


def _config(**change):
    sizes = {
        "num_layers": 2, "hidden_size": 32, "ffn_size": 48, "vocab_size": 61, "num_heads": 4,
        "num_kv_heads": 2, "head_size": 8, "max_positions": 12, "init_std": 0.2,
    }  # fmt: skip
    return TransformerConfig(**(sizes | change))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"positions": "rope"},
        {"positions": "rope", "latent": LatentSizes(None, 8, 8, 8, 12)},
        {"positions": "rope", "latent": LatentSizes(8, 8, 4, 4, 16)},
    ],
    ids=["learned", "rope", "narrow values", "wide values"],
)
def test_a_model_says_the_same_every_way(monkeypatch, change):
    moe = MoEConfig(hidden_size=32, ffn_hidden_size=16, num_experts=4, top_k=2)
    if latent := change.get("latent"):
        change = change | {"num_kv_heads": 4, "head_size": latent.content + latent.rotated}
    torch.manual_seed(3)
    model = GPT(_config(**change, moe=moe))
    ends_BS = np.array(ENDS["several"])
    x = torch.randint(61, ends_BS.shape)
    ends_BN = torch.from_numpy(ends_of(ends_BS))
    positions_BS = torch.from_numpy(document_layout(ends_BS, eod=1).position_ids)
    assert torch.equal(Segments(ends_BN, 12).positions(), positions_BS)
    batch = {"labels_BS": x.roll(-1, 1), "positions_BS": positions_BS}
    by_ids = model(x, **batch, segments_BS=segments_of(ends_BS)).losses["lm loss"]
    masked = model(x, **batch, ends_BN=ends_BN).losses["lm loss"]
    assert torch.equal(masked, by_ids)
    calls = []
    monkeypatch.setattr(segments, "flash_kernel", lambda: counted)

    def counted(*tensors, **how):
        calls.append(tensors)
        assert len({x.shape[-1] for x in tensors[:3]}) == 1  # flash attention knows one width
        return by_document(*tensors, **how)

    monkeypatch.setattr(gpt, "flash_takes", lambda *about, **more: True)
    packed = model(x, **batch, ends_BN=ends_BN).losses["lm loss"]
    torch.testing.assert_close(packed, masked)
    other = model(x, **batch, ends_BN=torch.full((3, 1), 12))
    assert (other.losses["lm loss"] - masked).abs() > 1e-4
    cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
    apply_recompute(cores, "full")
    grads = [torch.autograd.grad(packed, list(model.parameters()))]
    calls.clear()
    again = model(x, **batch, ends_BN=ends_BN).losses["lm loss"]
    assert torch.equal(again, packed)
    assert len(calls) == 2
    grads += [torch.autograd.grad(again, list(model.parameters()))]
    assert len(calls) == 4
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("flash", [False, True], ids=["mask", "kernel"])
def test_a_row_of_what_is_kept_attends_as_the_batch(monkeypatch, flash):
    """Within itself, and from one batch to another: outputs and gradients of real tokens."""
    monkeypatch.setattr(segments, "flash_kernel", lambda: by_document)
    torch.manual_seed(0)
    queries = Segments(torch.tensor([[4, 7, 9, 12], [12, 12, 12, 12], [0, 2, 2, 12]]), 12)
    others = Segments(torch.tensor([[3, 8, 9, 10], [10, 10, 10, 10], [1, 2, 5, 10]]), 10)
    core = CoreAttention(0.0)
    for keys, causal in ((queries, True), (queries, False), (others, False)):
        q, k = (torch.randn(3, side.length, 2, 8) for side in (queries, keys))
        real_q, real_k = ((side.numbers() < 3)[..., None, None] for side in (queries, keys))
        found = []
        for keep in (False, True):
            leaves = [(x * real).requires_grad_() for x, real in ((q, real_q), (k, real_k))]
            sides = [_kept(queries), _kept(keys)] if keep else [queries, keys]
            rows = [side.collect(x) for side, x in zip(sides, leaves, strict=True)]
            assert [len(row) for row in rows] == ([1, 1] if keep else [3, 3])
            within = within_segments(
                sides[0], causal=causal, flash=flash and keep, attended=sides[1]
            )
            assert ("bounds" in within) == (flash and keep)
            y = core(rows[0], rows[1], rows[1].flip(2), BlockContext(**within))
            y = sides[0].spread(y) * real_q
            found.append([y, *torch.autograd.grad((y**2).sum(), leaves)])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "ends", [[[4, 7, 9, 12], [12, 12, 12, 12], [0, 2, 2, 12]], [[12], [12], [12]]], ids=str
)
def test_a_bias_by_distance_is_the_same_every_way(ends, causal):
    """In a mask or in the kernel's twin, all places or those that are kept, queries in groups."""
    torch.manual_seed(0)
    whole = Segments(torch.tensor(ends), 12)
    core, bias_HA = CoreAttention(0.0), torch.randn(4, 23)
    q, kv = torch.randn(3, 12, 4, 8), torch.randn(3, 12, 2, 8)
    real = (whole.numbers() < 3)[..., None, None]
    found = []
    for flash in (False, True):
        for side in (whole, _kept(whole)):
            leaves = [x.clone().requires_grad_() for x in (q * real, kv * real, bias_HA)]
            rows = [side.collect(x) for x in leaves[:2]]
            within = within_segments(side, causal=causal, flash=flash, bias_HA=leaves[2])
            assert ("bounds" in within) == flash
            y = core(rows[0], rows[1], rows[1].flip(2), BlockContext(**within))
            y = side.spread(y) * real
            found.append([y, *torch.autograd.grad((y**2).sum(), leaves)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def _kept(segments):
    """All real tokens, and three places of padding."""
    real = (segments.numbers() < 3).flatten()
    return segments._replace(kept_T=(real | ((~real).cumsum(0) <= 3)).nonzero()[:, 0])


@pytest.mark.parametrize(
    ("device", "dtype", "dropout", "width", "relative"),
    [
        ("cpu", torch.bfloat16, 0.0, 8, False),
        ("cpu", torch.bfloat16, 0.0, 8, True),
        ("cuda", torch.float32, 0.0, 8, True),
        ("cuda", torch.bfloat16, 0.1, 8, True),
        ("cuda", torch.bfloat16, 0.0, 264, False),
        ("cuda", torch.bfloat16, 0.0, 136, True),
    ],
)
def test_what_the_kernels_lack_takes_the_mask(device, dtype, dropout, width, relative):
    config, where = _config(attention_dropout=dropout, head_size=width), torch.device(device)
    assert not flash_takes(config, dtype, where, training=True, relative=relative)


def test_documents_are_counted_in_powers_of_two():
    assert ends_of(np.array(ENDS["several"])).tolist() == [
        [3, 5, 10, 12], [12, 12, 12, 12], [1, 2, 3, 12],
    ]  # fmt: skip
    assert ends_of(np.array(ENDS["one"])).tolist() == [[12], [12]]
    assert ends_of(np.array(ENDS["every"])).shape == (1, 16)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("experts", [False, True], ids=["", "experts and a bias by distance"])
def test_a_block_over_segments_is_one_graph(experts):
    """The kernels in it: a break would cost the host as much again in every block."""
    moe = MoEConfig(hidden_size=32, ffn_hidden_size=48, num_experts=2, top_k=1)
    config = _config(num_kv_heads=4, moe=moe if experts else None)
    block = Block(config, 0, cross=True, compute_dtype=torch.bfloat16)
    ends = torch.tensor([[5, 12], [12, 12]])
    plain, own = (
        BlockContext(**within_segments(Segments(ends, 12), causal=False, flash=True, bias_HA=bias))
        for bias in (None, torch.zeros(4, 23) if experts else None)
    )
    x = torch.randn(2, 12, 32, dtype=torch.bfloat16)
    traced = []

    def only_traced(graph, inputs):
        traced.append(graph.print_readable(print_output=False))  # 2.15 empties a graph that failed
        raise RuntimeError("traced to its end")

    compiled = torch.compile(block, fullgraph=True, backend=only_traced)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="traced to its end"):
        compiled(x, own, plain._replace(source_BSD=x))
    assert ("relative_attention" in traced[0]) == experts
    assert "varlen_attn" in traced[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_over_segments_is_the_masked_one(dtype):
    """Outputs and gradients, with segments that are empty, and none to attend to."""
    torch.manual_seed(0)
    ends = torch.tensor([[4, 7, 9, 10], [10, 10, 10, 10], [5, 6, 6, 10]], device="cuda")
    sources = torch.tensor([[3, 8, 9, 9], [9, 9, 9, 9], [1, 2, 5, 9]], device="cuda")
    q = torch.randn(3, 10, 4, 16, device="cuda", dtype=dtype)
    core = CoreAttention(dropout=0.0)
    for length, attended in ((10, None), (9, Segments(sources, 9))):
        k, v = torch.randn(2, 3, length, 4, 16, device="cuda", dtype=dtype)
        masked, context = (
            BlockContext(
                **within_segments(Segments(ends, 10), causal=False, flash=flash, attended=attended)
            )
            for flash in (False, True)
        )
        assert masked.mask is not None
        plain = masked._replace(mask=masked.mask.cpu())
        found = []
        for inputs, where in (((q, k, v), context), ([x.cpu().float() for x in (q, k, v)], plain)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            y = core(*leaves, where)
            grads = torch.autograd.grad((y.float() ** 2).sum(), leaves)
            found.append([x.cpu().float() for x in (y, *grads)])
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
