"""Attention within packed documents: the kernel over unequal sequences against a mask."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig
from mb_train.models import documents, gpt
from mb_train.models.attention import segment_mask
from mb_train.models.config import TransformerConfig
from mb_train.models.documents import attend, documents_of, usable
from mb_train.models.gpt import GPT
from mb_train.tasks.gpt import positions_within, starts_of

ENDS = {
    "several": [[0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0], [0] * 12, [1, 1, 1] + [0] * 8 + [1]],
    "one": [[0] * 12, [0] * 11 + [1]],
    "every": [[1] * 12],
}  # fmt: skip


def by_document(q_THC, k_THC, v_THC, edges, edges_k, longest, longest_k, *, scale, window_size):
    """`varlen_attn` in plain words, on any device."""
    assert window_size == (-1, 0)
    assert torch.equal(edges, edges_k)
    assert edges[-1] == len(q_THC)
    assert longest == longest_k >= int(edges.diff().max())
    parts = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_THC, k_THC, v_THC))
        if end > start:
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
    return torch.cat(parts, dim=1).transpose(0, 1)


def segments_of(ends_BS):
    return torch.from_numpy(np.cumsum(ends_BS, axis=1) - ends_BS)


def check(ends, heads, groups, width, scale, *, dtype, device, tolerance):
    ends_BS = np.array(ends)
    B, S = ends_BS.shape
    torch.manual_seed(0)
    found = documents_of(torch.from_numpy(starts_of(ends_BS)).to(device), S)
    mask = segment_mask(segments_of(ends_BS).to(device), causal=True)
    q, k, v = (
        torch.randn(B, S, n, width, dtype=dtype, device=device) for n in (heads, groups, groups)
    )
    dy = torch.randn(B, S, heads, width, dtype=dtype, device=device)

    def run(call):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = call(*inputs)
        y.backward(dy)
        return [y, *(x.grad for x in inputs)]

    def masked(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            *heads_first, attn_mask=mask, scale=scale, enable_gqa=heads != groups
        )
        return y.transpose(1, 2)

    pairs = zip(run(lambda *x: attend(*x, found, scale)), run(masked), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize(("heads", "groups", "scale"), [(2, 2, None), (4, 2, 0.7), (3, 1, 1.0)])
def test_documents_attend_as_under_a_mask(monkeypatch, kind, heads, groups, scale):
    monkeypatch.setattr(documents, "varlen_attn", by_document)
    check(ENDS[kind], heads, groups, 8, scale, dtype=torch.float32, device="cpu", tolerance=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize(("heads", "groups", "scale"), [(2, 2, None), (4, 2, 0.7)])
@pytest.mark.parametrize("width", [64, 128, 24])
def test_the_kernel_attends_as_under_a_mask(kind, heads, groups, scale, width):
    ends = np.tile(ENDS[kind], (1, 40))
    assert usable(torch.empty(0, device="cuda"), torch.bfloat16, width, 0.0)
    check(ends, heads, groups, width, scale, dtype=torch.bfloat16, device="cuda", tolerance=2e-2)


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_model_says_the_same_either_way(monkeypatch, positions):
    sizes = {
        "num_layers": 2, "hidden_size": 32, "ffn_size": 48, "vocab_size": 61, "num_heads": 4,
        "num_kv_heads": 2, "head_size": 8, "max_positions": 12, "init_std": 0.2,
    }  # fmt: skip
    moe = MoEConfig(hidden_size=32, ffn_hidden_size=16, num_experts=4, top_k=2)
    torch.manual_seed(3)
    model = GPT(TransformerConfig(**sizes, positions=positions, moe=moe))
    ends_BS = np.array(ENDS["several"])
    x = torch.randint(61, ends_BS.shape)
    batch = {
        "labels_BS": x.roll(-1, 1),
        "segments_BS": segments_of(ends_BS),
        "positions_BS": torch.from_numpy(positions_within(ends_BS)),
        "starts_BN": torch.from_numpy(starts_of(ends_BS)),
    }
    masked = model(x, **batch).losses["lm loss"]
    monkeypatch.setattr(documents, "varlen_attn", by_document)
    monkeypatch.setattr(gpt, "usable", lambda *about: True)
    packed = model(x, **batch).losses["lm loss"]
    torch.testing.assert_close(packed, masked)
    other = batch | {"starts_BN": torch.zeros(3, 1, dtype=torch.int32)}
    assert (model(x, **other).losses["lm loss"] - masked).abs() > 1e-4


@pytest.mark.parametrize(
    "about", [("cpu", torch.bfloat16, 64, 0.0), ("meta", torch.float32, 64, 0.0)]
)
def test_other_devices_and_dtypes_take_the_mask(about):
    device, dtype, head, dropout = about
    assert not usable(torch.empty(0, device=device), dtype, head, dropout)


def test_documents_are_counted_in_powers_of_two():
    assert starts_of(np.array(ENDS["several"])).tolist() == [
        [0, 3, 5, 10], [0, 12, 12, 12], [0, 1, 2, 3],
    ]  # fmt: skip
    assert starts_of(np.array(ENDS["one"])).tolist() == [[0], [0]]
    assert starts_of(np.array(ENDS["every"])).shape == (1, 16)
