"""BERT, T5 and ICT against plainer computations: losses, padding, balance loss, gathered blocks."""

import json
from dataclasses import replace
from functools import partial

import mb_data
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig
from mb_parallel import ParallelDims
from mb_train.config import TrainConfig
from mb_train.convert.hugging_face import write_run
from mb_train.data.batches import batches
from mb_train.from_bert import begin_from_bert
from mb_train.machine.signals import StopFlag
from mb_train.models.attention import BlockContext, CoreAttention
from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.ict import ICT
from mb_train.models.relative import RelativeBias, by_pairs, near_scores, relative_buckets
from mb_train.models.segments import Segments, within_segments
from mb_train.models.t5 import T5
from mb_train.tasks.bert import BertTask
from mb_train.tasks.bm25 import BM25, rank_of, recall
from mb_train.tasks.make import whole_model
from mb_train.tasks.packed import sample_lengths
from mb_train.tasks.t5 import T5Task

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
    "rope, post-norm": replace(EXPERTS, positions="rope", post_norm=True),
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
    return T5(config, decoder_layers=1, head_bias=True, scale_head=True)


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


@pytest.mark.parametrize("shared", [False, True])
def test_towers_begin_from_a_bert(tmp_path, shared):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(V - 7))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": S}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0}
    run |= {"vocab_file": str(tmp_path / "vocab.txt"), "make_vocab_size_divisible_by": V}
    run |= {"moe_num_experts": 4, "moe_top_k": 2, "moe_shared_expert_intermediate_size": 8}
    config = TrainConfig(**sizes, **run, model="bert")
    bert = whole_model(config, vocab_size=V)
    write_run(tmp_path / "bert", config, bert.state_dict(), say=lambda line: None)

    def ict(folder="bert", **change):
        one = {"biencoder_shared_query_context_model": shared, "biencoder_projection_dim": 8}
        config = TrainConfig(**{**sizes, **run, "model": "ict", **one, **change})
        model = whole_model(config, vocab_size=V)
        begin_from_bert(model, str(tmp_path / folder))
        return model

    model = ict()
    for tower in (model.query, model.block):
        for name, tensor in tower.bert.state_dict().items():
            assert torch.equal(tensor, bert.state_dict()[name]), name
    assert (model.query is model.block) == shared
    for change, says in (
        ({"num_layers": 1}, "num_layers 1, moe_layers .* got num_layers 2, moe_layers"),
        ({"moe_top_k": 1}, "--moe-top-k 1 in .* got --moe-top-k 2"),
        ({"moe_shared_expert_intermediate_size": None}, "--moe-shared-expert-inter.* None .* 8"),
        (
            {"moe_router_bias": True, "seq_length": S + 1},
            f"--max-position-embeddings {S + 1}, --moe-router-bias True in .* {S}, .* False",
        ),
    ):
        with pytest.raises(ValueError, match=rf"this model's .*{says}"):
            ict(**change)
    ict(moe_capacity_factor=2.0, moe_loss_weight=0.5, moe_recompute=True)
    run["position_embedding_type"] = "relative"
    config = TrainConfig(**sizes, **run, model="bert")
    relative = whole_model(config, vocab_size=V).state_dict()
    write_run(tmp_path / "relative", config, relative, say=lambda line: None)
    ict(seq_length=2 * S, folder="relative")


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


def test_a_bert_takes_the_places_to_restore_first():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": "bert", "mask_prob": 0.3}
    task = BertTask(TrainConfig(**sizes, **run), None, vocab_size=V)
    labels = [[-1, 7, -1, -1, 9, -1, -1, -1], [-1] * 8]
    sample = {"text": np.arange(8), "types": np.zeros(8), "padding_mask": np.ones(8)}
    sample["is_random"] = 1
    batch = task.collate([sample | {"labels": np.array(row)} for row in labels])
    assert batch["ends_BN"].tolist() == [[8], [8]]
    assert batch["masked_BM"].shape == (2, 3)
    assert batch["masked_BM"][0, :2].tolist() == [1, 4]
    assert batch["labels_BM"].tolist()[0][:2] == [7, 9]
    assert batch["weights_BM"].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert ((batch["labels_BM"] >= 0) == batch["weights_BM"]).all()


def test_bm25_ranks_by_rare_words_and_short_texts():
    texts = [[1, 2, 3], [1, 1, 4, 5, 6, 7, 8], [1, 9], [4, 2]]
    scores = BM25(texts).scores([4])
    assert scores[3] > scores[1] > scores[0] == scores[2] == 0
    # By hand: 1 is in three of four texts, whose mean length is 3.5.
    weight = torch.log1p(torch.tensor((4 - 3 + 0.5) / 3.5)).item()
    norm = 1.2 * (0.25 + 0.75 * 2 / 3.5)
    assert BM25(texts).scores([1])[2] == pytest.approx(weight * 2.2 / (1 + norm))
    assert rank_of(scores, 3) == 0
    assert rank_of(scores, 0) == 3  # a tie is no find
    assert rank_of(np.full(4, np.nan), 0) == 3  # nor is what a diverged model computes
    assert recall([0, 4, 5, 9], 5) == 0.5


def packed_task(**change):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": S}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": "bert", "mask_prob": 0.3}
    config = TrainConfig(**{**sizes, **run, "samples_per_sequence": 3, **change})
    return BertTask(config, None, vocab_size=V)


def bert_sample(length, seed):
    g = np.random.default_rng(seed)
    text, types, labels, valid = np.zeros((4, S), np.int64)
    text[:length], types[length // 2 : length], valid[:length] = g.integers(V, size=length), 1, 1
    labels -= 1
    labels[length - 1] = g.integers(V)
    order = {"is_random": seed % 2}
    return {"text": text, "types": types, "labels": labels, "padding_mask": valid} | order


@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
@pytest.mark.parametrize("binary_head", [True, False], ids=["order", "no order"])
def test_packed_samples_give_the_losses_of_each_by_itself(positions, binary_head):
    """And its gradients; experts get the same tokens."""
    task = packed_task(bert_binary_head=binary_head)
    samples = [bert_sample(n, seed) for seed, n in enumerate([4, 3, 2, S, 5, 1])]
    packed = task.collate([samples[:3], samples[3:4], samples[4:]])
    assert packed.keys() >= set(task.loss_weights.values())
    single = task.collate(samples)
    assert packed["ends_BN"].tolist() == [[4, 7, 9, 10], [10, 10, 10, 10], [5, 6, 6, 10]]
    torch.manual_seed(0)
    model = Bert(replace(EXPERTS, positions=positions), binary_head=binary_head)
    found = []
    for arrays in (packed, single):
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        output = model(batch.pop("tokens_BS"), **batch)
        loss = torch.stack(list(output.losses.values())).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        found.append((output, [g for g in grads if g is not None]))
    _assert_alike(*found)


def _assert_alike(one, other):
    """Outputs and gradients."""
    (one, grads), (other, others) = one, other
    torch.testing.assert_close(one.losses, other.losses)
    torch.testing.assert_close(grads, others, rtol=1e-4, atol=1e-4)
    counts = "tokens_per_expert"
    assert torch.equal(one.metrics[counts], other.metrics[counts])


def t5_sample(read, written, seed):
    g = np.random.default_rng(seed)
    sample = {name: np.zeros(S, np.int64) for name in ("text_enc", "enc_mask")}
    sample |= {name: np.zeros(R, np.int64) for name in ("text_dec", "dec_mask", "loss_mask")}
    sample["labels"] = np.full(R, -1)
    sample["text_enc"][:read], sample["enc_mask"][:read] = g.integers(V, size=read), 1
    for name in ("text_dec", "labels"):
        sample[name][:written] = g.integers(V, size=written)
    sample["dec_mask"][:written] = sample["loss_mask"][:written] = 1
    return sample


@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_packed_samples_of_a_t5_give_the_losses_of_each_by_itself(positions):
    """Also where one of the two sequences has no padding, or both are full."""
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": S}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": "t5"}
    more = {"decoder_seq_length": R, "samples_per_sequence": 3}
    task = T5Task(TrainConfig(**sizes, **run, **more), None, vocab_size=V)
    lengths = [(4, 3), (3, 1), (3, 2), (S, R), (5, 1), (2, 2)]
    samples = [t5_sample(*both, seed) for seed, both in enumerate(lengths)]
    packed = task.collate([samples[:3], samples[3:4], samples[4:]])
    assert packed["ends_BN"].tolist() == [[4, 7, 10, 10], [10, 10, 10, 10], [5, 7, 7, 10]]
    assert packed["decoder_ends_BN"].tolist() == [[3, 4, 6, 7], [7, 7, 7, 7], [1, 3, 3, 7]]
    torch.manual_seed(0)
    model = T5(replace(EXPERTS, positions=positions), decoder_layers=1)
    found = []
    for arrays in (packed, task.collate(samples)):
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        output = model(batch.pop("tokens_BS"), **batch)
        grads = torch.autograd.grad(output.losses["lm loss"], list(model.parameters()))
        found.append((output, grads))
    _assert_alike(*found)


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


def test_samples_are_packed_in_their_order():
    lengths = np.array([4, 3, 2, 2, 10, 1, 1, 1, 1])
    packed = mb_data.PackedSamples(list(range(9)), lengths[:, None], rooms=[10], most=3)
    assert [packed[i] for i in range(len(packed))] == [[0, 1, 2], [3], [4], [5, 6, 7], [8]]
    two = np.stack([lengths, [1, 1, 1, 5, 1, 5, 1, 1, 1]], axis=1)
    packed = mb_data.PackedSamples(list(range(9)), two, rooms=[10, 5], most=3)
    assert [packed[i] for i in range(len(packed))] == [[0, 1, 2], [3], [4], [5], [6, 7, 8]]


def test_fewer_sequences_take_the_same_samples(tmp_path):
    """Over a corpus: as many sequences as are asked for, lengths known before a sample is read."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(20))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    g = np.random.default_rng(0)

    def sentence():
        return " ".join(f"w{i}" for i in g.integers(20, size=g.integers(1, 6)))

    rows = [". ".join(sentence() for _ in range(3)) for _ in range(60)]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    tokenizer = mb_data.load_tokenizer(str(tmp_path / "vocab.txt"))
    mb_data.preprocess(text, tmp_path / "x", tokenizer=tokenizer, workers=1, split_sentences=True)
    task = packed_task(seq_length=40)
    task._tokenizer = tokenizer
    prefix = str(tmp_path / "x_text_sentence")
    parts = task.build_datasets([prefix], (30, 10, 0))
    assert len(parts[0]) >= 30
    assert len(parts[1]) >= 10
    train = parts[0]
    for index in range(len(train)):
        found = [int(sample["padding_mask"].sum()) for sample in train[index]]
        assert sum(found) <= 40
    lengths = sample_lengths(train.dataset).tolist()
    assert lengths == [[int(sample["padding_mask"].sum())] for sample in train.dataset]
    assert max(len(train[index]) for index in range(len(train))) > 1
    kept, apart = (
        batches(task, train, torch.device("cpu"), ParallelDims().build("cpu"), consumed_samples=4,
                micro_batch_size=3, workers=workers, vocab_size=128, apart=True, stop=StopFlag())
        for workers in (0, 2)
    )  # fmt: skip
    for _ in range(3):
        torch.testing.assert_close(next(apart), next(kept), rtol=0, atol=0)
    apart.close()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_heads_begin_near(bidirectional):
    scores = near_scores(4, bidirectional=bidirectional)
    buckets = relative_buckets(torch.arange(-3, 4), bidirectional=bidirectional)
    first = scores[buckets, 0].tolist()
    if bidirectional:  # it looks back
        assert first == [-3, -2, -1, -3, -4, -5, -6]
        assert scores[buckets, 1].tolist() == [-6, -5, -4, -3, -1, -2, -3]
    else:
        assert first[:4] == [-3, -2, -1, 0]
    assert scores.min() >= -8


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
