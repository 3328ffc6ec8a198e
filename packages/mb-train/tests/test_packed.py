"""Several short samples in a sequence: the losses of each by itself, in the same order."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import mb_data
import numpy as np
import pytest
import torch
from mb_layers import MoEConfig
from mb_parallel import ParallelDims
from mb_train.config import TrainConfig
from mb_train.data.batches import batches
from mb_train.machine.signals import StopFlag
from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig
from mb_train.models.segments import Segments
from mb_train.models.t5 import T5
from mb_train.tasks.bert import BertTask
from mb_train.tasks.packed import pack
from mb_train.tasks.t5 import T5Task

S, R, V = 10, 7, 37
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
    task = t5_task(samples_per_sequence=3)
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


def test_a_bert_is_measured_by_its_first_choices():
    """Labels are made of these: right are half of the tokens, and the order of three in four."""
    task = packed_task()
    torch.manual_seed(0)
    model = Bert(SMALL, binary_head=True).eval()
    samples = [bert_sample(6 + seed % 4, seed) for seed in range(40)]  # more than one batch
    for number, sample in enumerate(samples):
        tokens, types, valid = (
            torch.from_numpy(sample[name][None]) for name in ("text", "types", "padding_mask")
        )
        x_BSD, _ = model.encode(tokens, types, torch.tensor([[6 + number % 4, S]]), valid)
        one, other = model.logits(x_BSD, torch.tensor([[1, 4]])).argmax(2)[0].tolist()
        sample["labels"][:] = -1
        sample["labels"][[1, 4]] = one, (other + 1) % V
        told = int(model.order(x_BSD, torch.tensor([[0]])).argmax())
        sample["is_random"] = told if number % 4 else 1 - told
    labels = Counter(label for sample in samples for label in sample["labels"].tolist())
    del labels[-1]
    assert task.evaluate_more(model, samples, 40) == pytest.approx(
        {
            "masked accuracy": 0.5,
            "most frequent token": max(labels.values()) / 80,
            "order accuracy": 0.75,
        }
    )


def t5_task(**change):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": S}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": "t5"}
    config = TrainConfig(**sizes, **run, decoder_seq_length=R, **change)
    return T5Task(config, None, vocab_size=V)


def test_a_t5_is_measured_by_its_first_choices_and_by_what_it_writes(monkeypatch):
    task, special = t5_task(), (30, 31, 32)
    task._tokenizer = SimpleNamespace(extra_ids=special[:2], eos=special[2])
    torch.manual_seed(0)
    model = T5(SMALL, decoder_layers=1).eval()
    samples = [t5_sample(5, 6, seed) for seed in range(40)]
    right, labels, spans, rows = 0, Counter(), Counter(), []
    for number, sample in enumerate(samples):
        sample["text_dec"][0] = 33
        batch = {name: torch.from_numpy(a) for name, a in task.collate([sample]).items()}
        read, written = (
            Segments(batch[f"{side}ends_BN"], size) for side, size in (("", S), ("decoder_", R))
        )
        memory, _ = model.encode(batch["tokens_BS"], read, batch["valid_BS"])
        states, _ = model.decode(
            batch["decoder_tokens_BR"], written, batch["decoder_valid_BR"], memory, read
        )
        choices = model.logits(states)[0].argmax(1).tolist()
        a, b, c = (choices[1], number % 5, number % 3)
        sample["labels"][:6] = 30, a, 31, b, c, 32
        for place, label in ((1, a), (3, b), (4, c)):
            if label not in special:
                right += choices[place] == label
                labels[label] += 1
        first = () if a in special else (a,)
        spans.update((first, (b, c)))
        # The second span of every other text is written wrong, and nothing counts behind the end.
        rows.append([30, *first, 31, b, c + number % 2, 32, *[b] * (2 - len(first))])
    queue = iter(rows)

    def write(tokens_BS, ends_BN, valid_BS, *, first, length):
        assert (first, length) == (33, 6)
        return torch.tensor([next(queue) for _ in tokens_BS])

    monkeypatch.setattr(model, "write", write)
    assert task.evaluate_more(model, samples, 40) == pytest.approx(
        {
            "token accuracy": right / labels.total(),
            "most frequent token": max(labels.values()) / labels.total(),
            "exact match of spans": 0.75,
            "most frequent span": max(spans.values()) / 80,
        }
    )
    assert right >= 30


@torch.no_grad()
def test_a_t5_writes_its_first_choices():
    torch.manual_seed(1)
    model = T5(SMALL, decoder_layers=1).eval()
    tokens = torch.randint(V, (3, S))
    ends, valid = torch.tensor([[S, S], [4, S], [7, S]]), torch.ones(3, S, dtype=torch.int64)
    valid[1, 4:] = valid[2, 7:] = 0
    written = model.write(tokens, ends, valid, first=3, length=R)
    assert written.shape == (3, R)
    assert len(written.unique()) > 3
    read = Segments(ends, S)
    memory, _ = model.encode(tokens, read, valid)
    before = torch.cat([torch.full((3, 1), 3), written[:, :-1]], dim=1)
    own = Segments(torch.full_like(ends, R), R)
    states, _ = model.decode(before, own, torch.ones_like(before), memory, read)
    assert torch.equal(model.logits(states).argmax(2), written)


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
    tokenizer = mb_data.load_tokenizer(str(tmp_path / "vocab.txt"))
    options = {"tokenizer": tokenizer, "workers": 1, "split_sentences": True}
    for name, part in (("x", rows), ("y", [". ".join([row, row]) for row in rows])):
        text = tmp_path / "text.jsonl"
        text.write_text("".join(json.dumps({"text": row}) + "\n" for row in part))
        mb_data.preprocess(text, tmp_path / name, **options)
    task = packed_task(seq_length=40)
    task._tokenizer = tokenizer
    prefix, other = (str(tmp_path / f"{name}_text_sentence") for name in "xy")
    parts = task.build_datasets([prefix], (30, 10, 0))
    assert len(parts[0]) >= 30
    assert len(parts[1]) >= 10
    alone, *others = task.build_datasets([prefix], (30, None, None))
    assert (len(alone), others) == (len(parts[0]), [None, None])
    train = parts[0]
    for index in range(len(train)):
        found = [int(sample["padding_mask"].sum()) for sample in train[index]]
        assert sum(found) <= 40
    mixed, _, _ = task.build_datasets(["0.3", prefix, "0.7", other], (30, None, None))
    for packed in (train, mixed):
        lengths = packed.dataset.lengths().tolist()
        assert lengths == [[int(sample["padding_mask"].sum())] for sample in packed.dataset]
    assert pack(lambda wanted: wanted, (5, None, 2), rooms=[4], most=1) == (5, None, 2)
    assert max(len(train[index]) for index in range(len(train))) > 1
    kept, apart = (
        batches(task, train, torch.device("cpu"), ParallelDims().build("cpu"), consumed_samples=4,
                micro_batch_size=3, workers=workers, vocab_size=128, apart=True, stop=StopFlag())
        for workers in (0, 2)
    )  # fmt: skip
    for _ in range(3):
        torch.testing.assert_close(next(apart), next(kept), rtol=0, atol=0)
    apart.close()
