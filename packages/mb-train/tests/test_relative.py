"""Relative positions: what the table says of a distance, and where heads begin to look."""

from dataclasses import replace

import pytest
import torch
from mb_train.models.config import TransformerConfig
from mb_train.models.relative import RelativeBias, by_pairs, near_scores, relative_buckets
from mb_train.models.segments import Segments
from mb_train.models.t5 import T5

S, V = 10, 37
SMALL = TransformerConfig(
    num_layers=2, hidden_size=16, ffn_size=24, vocab_size=V, num_heads=4, num_kv_heads=4,
    head_size=4, max_positions=2 * S, init_std=0.3, output_init_std=0.3,
)  # fmt: skip


@pytest.mark.parametrize("bidirectional", [True, False])
def test_heads_begin_near(bidirectional):
    scores = near_scores(4, bidirectional=bidirectional)
    buckets = relative_buckets(torch.arange(-3, 4), bidirectional=bidirectional)
    first = scores[buckets, 0].tolist()
    if bidirectional:  # it looks back
        assert first == [-3, -2, -1, -3, -4, -5, -6]
        assert scores[buckets, 1].tolist() == [-6, -5, -4, -3, -1, -2, -3]
        assert scores[buckets[:3], 2].tolist() == [-3 / 16, -2 / 16, -1 / 16]
    else:
        assert first[:4] == [-3, -2, -1, 0]
        assert scores[buckets[:3], 3].tolist() == [-3 / 64, -2 / 64, -1 / 64]
    assert scores.min() >= -8


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_t5s(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-300, 301)
    want = t5.T5Attention._relative_position_bucket(distance, bidirectional=bidirectional)
    assert torch.equal(relative_buckets(distance, bidirectional=bidirectional), want)
    # What heads begin with is drawn around their scores.
    bias = RelativeBias(SMALL, bidirectional=bidirectional)
    drawn = bias.table.weight - near_scores(4, bidirectional=bidirectional)
    assert drawn.std().item() == pytest.approx(SMALL.init_std, rel=0.3)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7, 300])
def test_a_bias_is_the_tables_row_of_the_distance(bidirectional, length):
    torch.manual_seed(0)
    bias = RelativeBias(SMALL, bidirectional=bidirectional)
    places = torch.arange(length)
    buckets = relative_buckets(places - places[:, None], bidirectional=bidirectional)
    want, got = bias.table(buckets).permute(2, 0, 1), by_pairs(bias(length))
    assert torch.equal(got, want)
    assert got.is_contiguous()
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad((x * weight).sum(), bias.table.weight)[0] for x in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-2)


@torch.no_grad()
def test_a_decoders_token_begins_by_looking_for_itself():
    """Where both sides have it; and embeddings have variance 1."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_size": 16}
    config = replace(SMALL, **sizes, positions="relative", init_std=0.1, output_init_std=0.1)
    model = T5(config, decoder_layers=1, scale_head=True)
    assert model.embedding.tokens.weight.std() == pytest.approx(1, abs=0.1)
    found = []
    model.decoder.blocks["0"].cross.core.register_forward_pre_hook(
        lambda core, arguments: found.extend(arguments[:2])
    )
    tokens, ones, whole = torch.arange(8)[None], torch.ones(1, 8).long(), torch.tensor([[8]])
    read = Segments(whole, 8)
    memory, _ = model.encode(tokens, read, ones)
    model.decode(tokens, read, ones, memory, read)
    q, k = (x[0].transpose(0, 1) for x in found)
    own = (q @ k.mT / 4).softmax(-1).diagonal(dim1=1, dim2=2).mean(1)
    assert own.min() > 0.7
