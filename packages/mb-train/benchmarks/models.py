"""BERT, T5 and a retriever's towers beside transformers' compiled ones, on one GPU, in one run.

    python packages/mb-train/benchmarks/models.py [row ...]     rows by the start of their names
    python packages/mb-train/benchmarks/models.py --tiny        the same text on a CPU, slowly

| row | what it trains |
|---|---|
| bert | BERT-110M, 32 sequences of 512, a seventh of the tokens masked |
| t5 | T5-220M, 32 sequences of 512 to read and 128 to write, T5's positions or Megatron's |
| ict | two towers of BERT-110M, 64 queries and 64 blocks of 256 |

Samples have 64 to 512 tokens (a T5's decoder a quarter), a retriever's queries 8 to 64; "padded"
has one in a sequence, "packed" as many as fit. transformers' models know no segments in a sequence
and no positions of Megatron's: theirs are padded, and T5's own. Both sides: bf16 over fp32 weights
(theirs by autocast), no dropout, compiled (ours block by block, theirs whole), AdamW in one pass,
clipping; a step is all of that. Ours runs as users are told to on one GPU, with --cuda-graph
(--eager: without); --their-mode reduce-overhead lets torch.compile make graphs of theirs. Theirs
gets SDPA; a head over masked places alone, or blocks without padding, are not to be had there.
Counted are real tokens.

Every row is a process that builds, compiles and warms up beside the others; then each has the GPU
for itself in turn. A rate is the median of windows of some steps; ours over theirs; "host" is the
share of a window after which all its steps were queued: near 100 % the GPU waited for Python. One
JSON document is the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray]
Step = Callable[[], int]

# Rounds over all batches until each shape is compiled, has run as it is, and is captured.
WARM_UP, WINDOWS, STEPS, BATCHES, MOST = 4, 5, 4, 3, 6
_TURN = 60  # seconds that a row may measure for
TINY = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64}


class Sizes:
    """Of a run on a GPU, or of one that shows on a CPU that nothing is broken."""

    def __init__(self, tiny: bool, *, eager: bool = False, their_mode: str = "default") -> None:
        self.tiny, self.graph, self.their_mode = tiny, not (tiny or eager), their_mode
        self.device = torch.device("cpu" if tiny else "cuda")
        self.vocab, self.length, self.target = (256, 48, 12) if tiny else (30592, 512, 128)
        self.shortest, self.rows = (6, 4) if tiny else (64, 32)

    def recipe(self, name: str, **change: Any) -> dict[str, Any]:
        """Fields of a run: a recipe's, without dropout."""
        from mb_train.config.recipes import recipe

        fields = recipe(name) | {
            "attention_dropout": 0.0, "hidden_dropout": 0.0, "save": None, "train_iters": 100,
            "micro_batch_size": self.rows, "global_batch_size": self.rows,
            "cuda_graph": self.graph,
        }  # fmt: skip
        if self.tiny:
            fields |= TINY | {"bf16": False, "compile": False, "seq_length": self.length}
            fields.pop("kv_channels", None)
        return fields | change

    def lengths(self, rng: np.random.Generator, count: int) -> list[int]:
        """Tokens of some samples."""
        return rng.integers(self.shortest, self.length + 1, count).tolist()


def on_device(
    batches: list[Arrays], counted: tuple[str, ...], device: torch.device
) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """Batches again and again, and how many real tokens each has."""
    counts = [sum(int(batch[name].sum()) for name in counted) for batch in batches]
    there = [
        {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in batch.items()}
        for batch in batches
    ]
    while True:
        for batch, count in zip(there, counts, strict=True):
            yield dict(batch), count


def our_step(fields: dict[str, Any], make: Callable[[Any], list[Arrays]], sizes: Sizes) -> Step:
    """Our training step over the batches that `make` makes with the task."""
    from mb_parallel import ParallelDims
    from mb_parallel.optimizer import clip_and_step
    from mb_train.assembly.assemble import assemble
    from mb_train.assembly.execute import Work, weigh
    from mb_train.assembly.optimizer import build_optimizer
    from mb_train.config import TrainConfig
    from mb_train.tasks.make import make_task

    config = TrainConfig(**fields)
    mesh = ParallelDims().build(sizes.device.type)
    task = make_task(config, None, vocab_size=sizes.vocab, mesh=mesh)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    model = assemble(task, config, mesh, sizes.device, dtype)
    optimizer = build_optimizer(model, config)
    model.train()
    batches = make(task)
    counted = tuple(name for name in batches[0] if "valid" in name)
    stream = on_device(batches, counted, sizes.device)

    def step() -> int:
        batch, tokens = next(stream)
        weigh(task, mesh, [batch])
        model.executor.step(Work([batch], 1.0, lambda index: None, lambda metrics: None))
        clip_and_step(optimizer, max_norm=1.0, mesh=mesh)
        optimizer.zero_grad(set_to_none=True)
        return tokens

    return step


def their_step(model: torch.nn.Module, batches: list[Arrays], sizes: Sizes) -> Step:
    """The step of a transformers model, compiled whole."""
    model = model.to(sizes.device).train()
    run = model if sizes.tiny else torch.compile(model, mode=sizes.their_mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    counted = tuple(name for name in batches[0] if "attention_mask" in name)
    stream = on_device(batches, counted, sizes.device)

    def step() -> int:
        batch, tokens = next(stream)
        with torch.autocast(sizes.device.type, torch.bfloat16, enabled=not sizes.tiny):
            loss = run(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens

    return step


def bert_samples(sizes: Sizes, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """What a BERT's dataset gives."""
    made = []
    for n in sizes.lengths(rng, count):
        text, types, valid = np.zeros((3, sizes.length), np.int64)
        text[:n], valid[:n], types[n // 2 : n] = rng.integers(5, sizes.vocab - 92, n), 1, 1
        labels = np.full(sizes.length, -1)
        hidden = rng.choice(n, max(round(0.15 * n), 1), replace=False)
        labels[hidden] = text[hidden]
        made.append({"text": text, "types": types, "padding_mask": valid, "labels": labels})
    return made


def t5_samples(sizes: Sizes, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """What a T5's dataset gives: a quarter as much to write as to read."""
    made = []
    for n in sizes.lengths(rng, count):
        sample: dict[str, Any] = {}
        for side, length, real in (("enc", sizes.length, n), ("dec", sizes.target, n // 4)):
            text, valid = np.zeros((2, length), np.int64)
            text[:real], valid[:real] = rng.integers(5, sizes.vocab - 92, real), 1
            sample |= {f"text_{side}": text, f"{side}_mask": valid}
        written = sample["dec_mask"]
        labels = np.where(written > 0, np.roll(sample["text_dec"], -1), -1)
        made.append(sample | {"labels": labels, "loss_mask": written})
    return made


def packed(made: list[dict[str, Any]], valid: str, sizes: Sizes) -> list[list[dict[str, Any]]]:
    """Sequences of samples by next fit."""
    found, used = [[]], 0
    for sample in made:
        length = int(sample[valid].sum())
        if used + length > sizes.length or len(found[-1]) == MOST:
            found.append([])
            used = 0
        found[-1].append(sample)
        used += length
    return found[: sizes.rows]


def ours_of_text(name: str, *, packing: bool, **change: Any) -> Callable[[Sizes], Step]:
    """A row of ours: BERT or T5."""
    make, valid, model = (
        (bert_samples, "padding_mask", "bert-110m") if name == "bert"
        else (t5_samples, "enc_mask", "t5-220m")
    )  # fmt: skip

    def build(sizes: Sizes) -> Step:
        fields = sizes.recipe(model, samples_per_sequence=MOST if packing else 1, **change)
        if name == "t5":
            fields["decoder_seq_length"] = sizes.target

        def batches(task: Any) -> list[Arrays]:
            rng = np.random.default_rng(0)
            if not packing:
                return [task.collate(make(sizes, rng, sizes.rows)) for _ in range(BATCHES)]
            many = (make(sizes, rng, 3 * sizes.rows) for _ in range(BATCHES))
            return [task.collate(packed(part, valid, sizes)) for part in many]

        return our_step(fields, batches, sizes)

    return build


def their_bert(sizes: Sizes) -> Step:
    """BertForMaskedLM."""
    from transformers import BertForMaskedLM

    rng = np.random.default_rng(0)
    batches = [
        {
            "input_ids": np.stack([s["text"] for s in part]),
            "token_type_ids": np.stack([s["types"] for s in part]),
            "attention_mask": np.stack([s["padding_mask"] for s in part]),
            "labels": np.stack([np.where(s["labels"] < 0, -100, s["labels"]) for s in part]),
        }
        for part in (bert_samples(sizes, rng, sizes.rows) for _ in range(BATCHES))
    ]
    return their_step(BertForMaskedLM(_bert_config(sizes)), batches, sizes)


def their_t5(sizes: Sizes) -> Step:
    """T5ForConditionalGeneration."""
    from transformers import T5Config, T5ForConditionalGeneration

    rng = np.random.default_rng(0)
    names = {"text_enc": "input_ids", "enc_mask": "attention_mask",
             "text_dec": "decoder_input_ids", "dec_mask": "decoder_attention_mask"}  # fmt: skip
    batches = []
    for _ in range(BATCHES):
        part = t5_samples(sizes, rng, sizes.rows)
        batch = {theirs: np.stack([s[ours] for s in part]) for ours, theirs in names.items()}
        labels = np.stack([s["labels"] for s in part])
        batches.append(batch | {"labels": np.where(labels < 0, -100, labels)})
    width = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    base = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    config = T5Config(
        vocab_size=sizes.vocab, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
        **(width if sizes.tiny else base),
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return their_step(T5ForConditionalGeneration(config), batches, sizes)


def pairs(sizes: Sizes) -> list[Arrays]:
    """Queries and blocks for a retriever, [2 rows, half a length]."""
    rng, rows, length = np.random.default_rng(0), 2 * sizes.rows, sizes.length // 2
    found = []
    for _ in range(BATCHES):
        batch: Arrays = {}
        for side, least, most in (("query", 8, length // 4), ("block", length // 2, length)):
            n = rng.integers(min(least, most), most + 1, rows)
            valid = (np.arange(length) < n[:, None]).astype(np.int64)
            batch[f"{side}_BS"] = rng.integers(5, sizes.vocab - 92, (rows, length)) * valid
            batch[f"{side}_valid_BS"] = valid
        found.append(batch)
    return found


def our_ict(sizes: Sizes) -> Step:
    """Two towers of ours."""

    def batches(task: Any) -> list[Arrays]:
        def samples(batch: Arrays) -> list[Arrays]:
            names = {f"{side}_{entry}": batch[f"{side}_{ours}"] for side in ("query", "block")
                     for entry, ours in (("tokens", "BS"), ("pad_mask", "valid_BS"))}  # fmt: skip
            return [{name: array[row] for name, array in names.items()}
                    for row in range(2 * sizes.rows)]  # fmt: skip

        return [task.collate(samples(batch)) for batch in pairs(sizes)]

    rows = {"micro_batch_size": 2 * sizes.rows, "global_batch_size": 2 * sizes.rows}
    fields = sizes.recipe("ict-bert", **rows, seq_length=sizes.length // 2)
    return our_step(fields, batches, sizes)


def their_ict(sizes: Sizes) -> Step:
    """Two BertModels and the same loss."""
    from transformers import BertModel

    class Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = _bert_config(sizes)
            self.towers = torch.nn.ModuleList(
                BertModel(config, add_pooling_layer=False) for _ in range(2)
            )
            self.maps = torch.nn.ModuleList(
                torch.nn.Linear(config.hidden_size, 128) for _ in range(2)
            )
            self.scale = config.hidden_size**-0.5

        def forward(self, **batch: torch.Tensor) -> Any:
            found = []
            for side, tower, to in zip(("query", "block"), self.towers, self.maps, strict=True):
                ids, mask = batch[f"{side}_BS"], batch[f"{side}_attention_mask"]
                states = tower(input_ids=ids, attention_mask=mask).last_hidden_state
                found.append(to(states[:, 0]))
            scores = found[0].float() @ found[1].float().t() * self.scale
            own = torch.arange(len(scores), device=scores.device)
            return argparse.Namespace(loss=torch.nn.functional.cross_entropy(scores, own))

    batches = [
        {name.replace("valid_BS", "attention_mask"): a for name, a in batch.items()}
        for batch in pairs(sizes)
    ]
    return their_step(Towers(), batches, sizes)


def _bert_config(sizes: Sizes) -> Any:
    from transformers import BertConfig

    width = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 64}  # fmt: skip
    return BertConfig(
        vocab_size=sizes.vocab, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa", **(width if sizes.tiny else {}),
    )  # fmt: skip


_RELATIVE = {"position_embedding_type": "relative"}


def under_a_mask(build: Callable[[Sizes], Step]) -> Callable[[Sizes], Step]:
    """A row whose bias by distance is spread over all pairs, as where there is no kernel for it."""

    def masked(sizes: Sizes) -> Step:
        from mb_train.models import segments

        segments._MAX_RELATIVE_HEAD = 0
        return build(sizes)

    return masked


_NO_ORDER = {"bert_binary_head": False}
ROWS: dict[str, Callable[[Sizes], Step]] = {
    "bert transformers": their_bert,
    "bert padded": ours_of_text("bert", packing=False, **_NO_ORDER),
    "bert packed": ours_of_text("bert", packing=True, **_NO_ORDER),
    "t5 transformers": their_t5,
    "t5 padded, T5's positions": ours_of_text("t5", packing=False, **_RELATIVE),
    "t5 packed, T5's positions": ours_of_text("t5", packing=True, **_RELATIVE),
    "t5 padded, its bias in a mask": under_a_mask(ours_of_text("t5", packing=False, **_RELATIVE)),
    "t5 padded, Megatron's": ours_of_text("t5", packing=False),
    "t5 packed, Megatron's": ours_of_text("t5", packing=True),
    "ict transformers": their_ict,
    "ict padded": our_ict,
}


def measure(row: str, sizes: Sizes, parent: Connection) -> None:
    """A row's process: get ready, say so, wait for its turn, answer."""
    os.setsid()  # so that its compiling helpers end with it
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    torch.set_float32_matmul_precision("high")
    tiny = sizes.tiny
    wait = (lambda: None) if tiny else torch.cuda.synchronize
    begun = time.perf_counter()
    step = ROWS[row](sizes)
    for _ in range(1 if tiny else WARM_UP * BATCHES):
        step()
    wait()
    parent.send(time.perf_counter() - begun)
    parent.recv()
    rates, host = [], []
    for _ in range(1 if tiny else WINDOWS):
        wait()
        begun, tokens = time.perf_counter(), 0
        for _ in range(STEPS):
            tokens += step()
        queued = time.perf_counter() - begun
        wait()
        seconds = time.perf_counter() - begun
        rates.append(tokens / seconds)
        host.append(queued / seconds)
    middle = statistics.median(rates)
    found = {"tokens_per_s": middle, "spread": (max(rates) - min(rates)) / middle}
    found["host"] = statistics.median(host)
    if not tiny:
        found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    parent.send(found)


def main() -> None:
    """Run what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", help="which, by the start of their names; default all")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it runs")
    parser.add_argument("--ready-by", type=float, default=110.0, help="seconds to get ready in")
    parser.add_argument("--eager", action="store_true", help="ours without CUDA graphs")
    parser.add_argument("--their-mode", default="default", help="of torch.compile")
    options = parser.parse_args()
    sizes = Sizes(options.tiny, eager=options.eager, their_mode=options.their_mode)
    chosen = [r for r in ROWS if not options.rows or r.startswith(tuple(options.rows))]
    spawn, begun, there = get_context("spawn"), time.monotonic(), {}
    for row in chosen:
        here, far = spawn.Pipe()
        process = spawn.Process(target=measure, args=(row, sizes, far), daemon=True)
        process.start()
        far.close()
        there[row] = process, here
    ready = []
    for row, (process, here) in there.items():
        try:
            if here.poll(max(options.ready_by - (time.monotonic() - begun), 0.1)):
                print(f"{row}: ready in {here.recv():.0f} s", flush=True)
                ready.append(row)
                continue
            print(f"{row}: not ready in time", flush=True)
        except EOFError:
            print(f"{row}: failed", flush=True)
        process.kill()
        with contextlib.suppress(ProcessLookupError):  # it may not have come to its group
            os.killpg(process.pid, signal.SIGKILL)
    results: dict[str, dict[str, float]] = {}
    for row in ready:
        process, here = there[row]
        here.send("go")
        try:
            if not here.poll(_TURN):
                print(f"{row}: no answer in {_TURN} s", flush=True)
                process.kill()
                continue
            found = results[row] = here.recv()
        except EOFError:
            print(f"{row}: failed", flush=True)
            continue
        process.join()
        base = results.get(f"{row.split()[0]} transformers", {}).get("tokens_per_s")
        share = "" if base is None else f"  {found['tokens_per_s'] / base:5.2f} x"
        print(
            f"{row:26} {found['tokens_per_s']:11,.0f} tokens/s{share}  spread "
            f"{found['spread']:4.0%}  host {found['host']:4.0%}  "
            f"{found.get('memory_gib', 0):5.1f} GiB",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
