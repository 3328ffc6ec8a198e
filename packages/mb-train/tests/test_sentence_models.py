"""BERT, T5 and ICT against plainer computations: losses, padding, balance loss, gathered blocks."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig
from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.ict import ICT
from mb_train.models.segments import Segments
from mb_train.models.t5 import T5

B, S, R, M, V = 3, 10, 7, 3, 37
LENGTHS, WRITTEN = torch.tensor([10, 6, 1]), torch.tensor([7, 3, 2])
SMALL = TransformerConfig(
    num_layers=2, hidden_size=16, ffn_size=24, vocab_size=V, num_heads=4, num_kv_heads=4,
    head_size=4, max_positions=2 * S, init_std=0.3, output_init_std=0.3,
)  # fmt: skip
EXPERTS = replace(
    SMALL,
    moe=MoEConfig(
        hidden_size=16, ffn_hidden_size=12, num_experts=4, top_k=2, load_balancing_loss_weight=0.7,
        init_method_std=0.5, output_init_std=0.5,
    ),
)  # fmt: skip
CONFIGS = {
    "dense": SMALL,
    "experts": EXPERTS,
    "rope, post-norm": replace(EXPERTS, positions="rope", norms="sum"),
}


def ends_of(lengths, size):
    return F.pad(lengths[:, None], (0, 1), value=size)


def bert_batch(size=S):
    """Rows of LENGTHS tokens, padded to `size` with token 5."""
    g = torch.Generator().manual_seed(0)
    valid = (torch.arange(size) < LENGTHS[:, None]).long()

    def row(high):
        return F.pad(torch.randint(high, (B, S), generator=g), (0, size - S))

    places = torch.stack([torch.randint(int(n), (M,), generator=g) for n in LENGTHS])
    tokens = torch.where(valid > 0, row(V), 5)
    return tokens, {
        "token_types_BS": row(2) * valid,
        "ends_BN": ends_of(LENGTHS, size),
        "valid_BS": valid,
        "masked_BM": places,
        "labels_BM": torch.randint(V, (B, M), generator=g),
        "weights_BM": torch.rand(B, M, generator=g),
        "first_BP": torch.zeros(B, 1).long(),
        "order_BP": torch.tensor([[0], [1], [1]]),
        "order_weights_BP": torch.rand(B, 1, generator=g),
    }


def t5_batch(size=S):
    g = torch.Generator().manual_seed(0)
    extra = size - S
    valid = (torch.arange(size) < LENGTHS[:, None]).long()
    decoder_valid = (torch.arange(R + extra) < WRITTEN[:, None]).long()
    tokens = torch.where(valid > 0, F.pad(torch.randint(V, (B, S), generator=g), (0, extra)), 5)
    labels, written = (
        F.pad(torch.randint(V, (B, R), generator=g), (0, extra)) * decoder_valid for _ in range(2)
    )
    return tokens, {
        "ends_BN": ends_of(LENGTHS, size),
        "valid_BS": valid,
        "decoder_tokens_BR": written,
        "decoder_ends_BN": ends_of(WRITTEN, R + extra),
        "decoder_valid_BR": decoder_valid,
        "labels_BR": labels,
        "weights_BR": decoder_valid.float(),
    }


def ict_batch(size=S):
    g = torch.Generator().manual_seed(0)
    valid = (torch.arange(size) < LENGTHS[:, None]).long()
    queries, blocks = (
        torch.where(valid > 0, F.pad(torch.randint(V, (B, S), generator=g), (0, size - S)), 5)
        for _ in range(2)
    )
    return queries, {
        "query_valid_BS": valid,
        "block_BS": blocks,
        "block_valid_BS": valid,
        "weights_B": torch.tensor([0.5, 1.0, 0.25]),
    }


def t5(config):
    if config.positions == "learned":
        config = replace(config, positions="relative")
    return T5(replace(config, head_bias=True), decoder_layers=1, scale_head=True)


MODELS = {
    "bert": (Bert, bert_batch),
    "t5": (t5, t5_batch),
    "ict": (ICT, ict_batch),
    "ict, one tower": (partial(ICT, shared=True, projection=8, scale_scores=True), ict_batch),
}
pairs = pytest.mark.parametrize("kind", CONFIGS)
models = pytest.mark.parametrize("name", MODELS)


def gpt_batch():
    g = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(V, (B, S), generator=g) for _ in range(2))
    return tokens, {"labels_BS": labels}


def made(name, kind):
    torch.manual_seed(4)
    model = ({"gpt": (GPT,)} | MODELS)[name][0](CONFIGS[kind])
    for parameter in model.parameters():  # biases and norms that do something
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pairs
def test_berts_losses_are_cross_entropies_one_sample_at_a_time(kind):
    model, (tokens, rest) = made("bert", kind), bert_batch()
    got = model(tokens, **rest).losses
    lm = order = 0.0
    for b, length in enumerate(LENGTHS.tolist()):
        ones = torch.ones(1, length, dtype=torch.int64)
        types = rest["token_types_BS"][b : b + 1, :length]
        ends = torch.tensor([[length]])
        x, _ = model.encode(tokens[b : b + 1, :length], types, ends, ones)
        head, weight = model.lm_head, model.embedding.tokens.weight
        states = head.norm(F.gelu(head.dense(x[0, rest["masked_BM"][b]])))
        losses = F.cross_entropy(
            states @ weight.T + head.bias, rest["labels_BM"][b], reduction="none"
        )
        lm = lm + (losses * rest["weights_BM"][b]).sum()
        scores = model.order_head(torch.tanh(model.pooler.dense(x[0, 0])))
        order = (
            order + F.cross_entropy(scores, rest["order_BP"][b, 0]) * rest["order_weights_BP"][b, 0]
        )
    torch.testing.assert_close(got["lm loss"], lm)
    torch.testing.assert_close(got["sop loss"], order)


@pairs
def test_t5s_loss_is_the_cross_entropy_one_sample_at_a_time(kind):
    model, (tokens, rest) = made("t5", kind), t5_batch()
    got, want = model(tokens, **rest).losses["lm loss"], 0.0
    for b, length in enumerate(LENGTHS.tolist()):
        outputs = int(rest["decoder_valid_BR"][b].sum())
        ones, below = torch.ones(1, length).long(), torch.ones(1, outputs).long()
        read = Segments(torch.tensor([[length]]), length)
        memory, _ = model.encode(tokens[b : b + 1, :length], read, ones)
        written = rest["decoder_tokens_BR"][b : b + 1, :outputs]
        own = Segments(torch.tensor([[outputs]]), outputs)
        x, _ = model.decode(written, own, below, memory, read)
        scores = x[0] * 16**-0.5 @ model.embedding.tokens.weight.T + model.head_bias
        torch.testing.assert_close(model.logits(x)[0], scores)
        want = want + F.cross_entropy(scores, rest["labels_BR"][b, :outputs], reduction="sum")
    torch.testing.assert_close(got, want)


@pairs
def test_icts_loss_is_the_softmax_over_all_blocks(kind):
    model, (queries, rest) = made("ict", kind), ict_batch()
    q = model.query(queries, rest["query_valid_BS"])[0]
    k = model.block(rest["block_BS"], rest["block_valid_BS"])[0]
    log_probs = torch.log_softmax(q @ k.T, dim=1).diagonal()
    got = model(queries, **rest).losses["retrieval loss"]
    torch.testing.assert_close(got, -(log_probs * rest["weights_B"]).sum())


@pairs
@models
def test_padding_changes_nothing(name, kind):
    """Neither losses, balance loss and its counts, nor a gradient: computed, left out, or some."""
    found = []
    for size, left in ((S, None), (S + 5, None), (S, 0), (S + 5, 4)):
        model = made(name, kind)
        tokens, rest = MODELS[name][1](size)
        rest |= {} if left is None else kept_of(rest, left)
        output = model(tokens, **rest)
        output.total().backward()
        found.append(
            (output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    (one, expected), *others = found
    layers = {"bert": [17, 17], "t5": [17, 17, 12]}.get(name, [17] * 4)
    for other, gradients in others:
        torch.testing.assert_close(other.losses, one.losses)
        assert gradients.keys() == expected.keys()
        for parameter, grad in expected.items():
            error = (gradients[parameter] - grad).norm() / grad.norm().clamp(min=1.0)
            assert error < 1e-4, parameter
        if kind != "dense":
            torch.testing.assert_close(other.aux_loss, one.aux_loss)
            counts = other.metrics["tokens_per_expert"]
            assert torch.equal(counts, one.metrics["tokens_per_expert"])
            assert counts.sum(1).tolist() == [2 * tokens for tokens in layers]


def kept_of(batch, left):
    """What to keep of a batch: its tokens, and `left` places of padding."""
    found = {}
    for name, valid in batch.items():
        if "valid" in name:
            places = torch.cat([valid.flatten().nonzero(), (1 - valid).flatten().nonzero()[:left]])
            found[name.replace("valid_BS", "kept_T").replace("valid_BR", "kept_T")] = (
                places.flatten().sort().values
            )
    return found


@pytest.mark.parametrize("name", ["gpt", *MODELS])
def test_the_balance_loss_has_its_gradient(name):
    """By central differences along a direction; the experts chosen stay the same."""
    model = made(name, "experts").double()
    model.compute_dtype = torch.float64
    for part in model.modules():
        if isinstance(part, Bert):
            part.compute_dtype = torch.float64
    tokens, rest = gpt_batch() if name == "gpt" else MODELS[name][1]()
    output = model(tokens, **rest)
    parameters = [p for n, p in model.named_parameters() if "router" in n or "tokens" in n]
    grads = torch.autograd.grad(output.aux_loss, parameters)
    torch.manual_seed(0)
    ways = [torch.randn_like(p) for p in parameters]
    step, values = 1e-4, []
    with torch.no_grad():
        for sign in (1, -1):
            for p, way in zip(parameters, ways, strict=True):
                p += sign * step * way
            moved = model(tokens, **rest)
            values.append(moved.aux_loss.item())
            counts = "tokens_per_expert"
            assert torch.equal(moved.metrics[counts], output.metrics[counts])
            for p, way in zip(parameters, ways, strict=True):
                p -= sign * step * way
    slope = sum(float((g * way).sum()) for g, way in zip(grads, ways, strict=True))
    assert abs(slope) > 1e-3
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-3)


def test_greedy_writing_takes_the_likeliest_token_each_time():
    model, (tokens, rest) = made("t5", "experts").eval(), t5_batch()
    ends, valid = rest["ends_BN"], rest["valid_BS"]
    written = model.write(tokens, ends, valid, first=3, length=5)
    before = torch.cat([torch.full((B, 1), 3), written[:, :-1]], dim=1)
    read = Segments(ends, S)
    memory, _ = model.encode(tokens, read, valid)
    own = Segments(torch.full_like(ends, before.shape[1]), before.shape[1])
    x, _ = model.decode(before, own, torch.ones_like(before), memory, read)
    assert torch.equal(model.logits(x).argmax(2), written)


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_states_of_a_t5_travel_in_fp32_if_the_residual_stream_is(kind):
    """Those of the whole encoder too, which its norm leaves in 16 bit."""

    def model():
        torch.manual_seed(0)
        config = replace(CONFIGS[kind], fp32_residual=True)
        return T5(config, decoder_layers=2, compute_dtype=torch.bfloat16)

    x, batch = t5_batch()
    expected = model()(x, **batch).losses["lm loss"]
    for layer in range(4):
        stage = model()
        stage.keep(range(layer, layer + 1), first=layer == 0, last=layer == 3)
        output = stage(x, **batch)
        x = output.x
        sent = {0: 1, 1: 1, 2: 2, 3: 0}[layer]
        streams = x if isinstance(x, tuple) else [] if x is None else [x]
        assert [stream.dtype for stream in streams] == [torch.float32] * sent
    assert torch.equal(output.losses["lm loss"], expected)


@pytest.mark.parametrize("positions", ["relative", "learned"])
def test_norms_of_what_positions_turn_are_none_where_nothing_turns(positions):
    """The flag is said to have no effect then; what attends to an encoder turns nowhere."""
    tokens, batch = t5_batch()
    losses = []
    for qk_norm in ("none", "l2"):
        torch.manual_seed(4)
        config = replace(SMALL, positions=positions, qk_norm=qk_norm)
        losses.append(T5(config, decoder_layers=1)(tokens, **batch).losses["lm loss"])
    assert torch.equal(*losses)
