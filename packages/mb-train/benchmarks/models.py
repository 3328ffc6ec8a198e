"""BERT and T5 beside transformers' compiled implementation, on one GPU, in one run.

    python packages/mb-train/benchmarks/models.py [bert] [t5]

BERT-110M: 64 sequences of 512, samples of 64 to 512 tokens, a seventh of them masked; padded, one
sample to a sequence, and packed, as many as fit: theirs is padded, for its BERT knows no segments
in a sequence. T5-220M: 32 sequences of 512 for the encoder and 114 for the decoder, relative
positions. Both sides in bf16 autocast or its like, no dropout, compiled, AdamW in one pass; a step
is forward, backward, clipping and optimizer. Counted are real tokens, not padding. Theirs gets SDPA
and a head over masked places alone is not to be had: it scores every token, as people run it.
Random tokens. Medians of the steps after the warm-up; a table, then one JSON document, come last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from mb_parallel import ParallelDims
from mb_parallel.optimizer import clip_and_step
from mb_train.assemble import assemble
from mb_train.config import TrainConfig
from mb_train.execute import weigh
from mb_train.optimizer import build_optimizer
from mb_train.recipes import recipe
from mb_train.tasks.make import make_task

WARM_UP, STEPS, VOCAB, LENGTH, TARGET = 5, 20, 30592, 512, 114
BERT_ROWS, T5_ROWS = 64, 32
DEVICE = torch.device("cuda")


def time_steps(step: Callable[[], int]) -> dict[str, float]:
    """Median tokens per second, the relative spread, and the memory at most."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        step()
    seconds, tokens = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        tokens.append(step())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    rates = [count / s for count, s in zip(tokens, seconds, strict=True)]
    middle = statistics.median(rates)
    return {
        "tokens_per_s": middle,
        "spread": (max(rates) - min(rates)) / middle,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def samples(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """What BERT's dataset gives: samples of 64 to LENGTH tokens."""
    made = []
    for _ in range(count):
        n = int(rng.integers(64, LENGTH + 1))
        text, types, valid = np.zeros((3, LENGTH), np.int64)
        text[:n], valid[:n], types[n // 2 : n] = rng.integers(5, 30000, n), 1, 1
        labels = np.full(LENGTH, -1)
        hidden = rng.choice(n, round(0.15 * n), replace=False)
        labels[hidden] = text[hidden]
        made.append({"text": text, "types": types, "padding_mask": valid, "labels": labels})
    return made


def packed(made: list[dict[str, Any]], rows: int, most: int) -> list[list[dict[str, Any]]]:
    """Sequences of samples by next fit, `rows` of them."""
    found, used = [[]], 0
    for sample in made:
        length = int(sample["padding_mask"].sum())
        if used + length > LENGTH or len(found[-1]) == most:
            found.append([])
            used = 0
        found[-1].append(sample)
        used += length
    return found[:rows]


def ours(name: str, batches: list[dict[str, np.ndarray]], **change: Any) -> dict[str, float]:
    """Our training step over batches of arrays, round and round."""
    fields = recipe(name) | {
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "save": None, "train_iters": 100,
    } | change  # fmt: skip
    config = TrainConfig(**fields)
    mesh = ParallelDims().build("cuda")
    task = make_task(config, None, vocab_size=VOCAB, mesh=mesh)
    model = assemble(task, config, mesh, DEVICE, torch.bfloat16)
    optimizer = build_optimizer(model, config)
    model.train()
    stream = _round(batches)

    def step() -> int:
        batch, tokens = next(stream)
        weigh(task, mesh, [batch])
        model.executor.step(
            [batch], loss_scale=1.0, before=lambda index: None, measured=lambda metrics: None
        )
        clip_and_step(optimizer, max_norm=1.0, mesh=mesh)
        optimizer.zero_grad(set_to_none=True)
        return tokens

    return time_steps(step)


def theirs(model: torch.nn.Module, batches: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """The step of a transformers model, compiled whole."""
    model = model.to(DEVICE).train()
    run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    stream = _round(batches)

    def step() -> int:
        batch, tokens = next(stream)
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens

    return time_steps(step)


def _round(batches: list[dict[str, np.ndarray]]) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """Batches on the device, again and again, and how many real tokens each has."""
    counts = [
        sum(int(a.sum()) for n, a in batch.items() if "valid" in n or "attention_mask" in n)
        for batch in batches
    ]
    there = [
        {n: torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE) for n, a in batch.items()}
        for batch in batches
    ]
    while True:
        for batch, count in zip(there, counts, strict=True):
            yield dict(batch), count


def bert() -> dict[str, dict[str, float]]:
    """Ours padded and packed, theirs padded."""
    from transformers import BertConfig, BertForMaskedLM

    rng, rows, most = np.random.default_rng(0), BERT_ROWS, 6
    plain = [samples(rng, rows) for _ in range(3)]
    change = {"bert_binary_head": False, "micro_batch_size": rows, "global_batch_size": rows}
    found = {}
    for label, samples_per_sequence in (("padded", 1), ("packed", most)):
        given = change | {"samples_per_sequence": samples_per_sequence}
        config = TrainConfig(**(recipe("bert-110m") | given))
        task = make_task(config, None, vocab_size=VOCAB, mesh=ParallelDims().build("cuda"))
        chosen: list[Any] = plain
        if samples_per_sequence > 1:
            chosen = [packed(samples(rng, 2 * rows), rows, most) for _ in range(3)]
        found[label] = ours("bert-110m", [task.collate(part) for part in chosen], **given)
    config = BertConfig(
        vocab_size=VOCAB, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    batches = [
        {
            "input_ids": np.stack([s["text"] for s in part]),
            "token_type_ids": np.stack([s["types"] for s in part]),
            "attention_mask": np.stack([s["padding_mask"] for s in part]),
            "labels": np.stack([np.where(s["labels"] < 0, -100, s["labels"]) for s in part]),
        }
        for part in plain
    ]
    return found | {"transformers, padded": theirs(BertForMaskedLM(config), batches)}


def t5() -> dict[str, dict[str, float]]:
    """Ours with T5's relative positions, and with learned ones; theirs."""
    from transformers import T5Config, T5ForConditionalGeneration

    rng, rows = np.random.default_rng(0), T5_ROWS
    encoder = [rng.integers(5, 30000, (rows, LENGTH)) for _ in range(3)]
    decoder = [rng.integers(5, 30000, (rows, TARGET)) for _ in range(3)]
    ones = np.ones((rows, LENGTH), np.int64)
    lengths = rng.integers(64, LENGTH + 1, (3, rows))
    valid = [(np.arange(LENGTH) < n[:, None]).astype(np.int64) * ones for n in lengths]
    batches = [
        {
            "tokens_BS": x, "ends_BN": np.stack([v.sum(1), np.full(rows, LENGTH)], 1),
            "valid_BS": v, "decoder_tokens_BR": y, "labels_BR": y,
            "decoder_ends_BN": np.full((rows, 2), TARGET),
            "decoder_valid_BR": np.ones_like(y), "weights_BR": np.ones(y.shape, np.float32),
        }
        for x, y, v in zip(encoder, decoder, valid, strict=True)
    ]  # fmt: skip
    found = {}
    for positions in ("relative", "learned"):
        found[f"padded, {positions}"] = ours(
            "t5-220m", batches, micro_batch_size=rows, global_batch_size=rows,
            decoder_seq_length=TARGET, position_embedding_type=positions,
        )  # fmt: skip
    config = T5Config(
        vocab_size=VOCAB, d_model=768, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    given = [
        {
            "input_ids": x, "attention_mask": v, "decoder_input_ids": y,
            "decoder_attention_mask": np.ones_like(y), "labels": y,
        }
        for x, y, v in zip(encoder, decoder, valid, strict=True)
    ]  # fmt: skip
    return found | {"transformers, padded": theirs(T5ForConditionalGeneration(config), given)}


def main(names: list[str]) -> None:
    """Run what is asked for, and print the table."""
    torch.set_float32_matmul_precision("high")
    results = {}
    for name, measure in (("bert", bert), ("t5", t5)):
        if not names or name in names:
            results[name] = measure()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, rows in results.items():
        base = rows["transformers, padded"]["tokens_per_s"]
        for label, row in rows.items():
            rate, spread = row["tokens_per_s"], row["spread"]
            print(
                f"{name:5} {label:22} {rate:11,.0f} tokens/s  {rate / base:5.2f} x  spread "
                f"{spread:4.0%}  {row['memory_gib']:5.1f} GiB"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
