"""Training steps per second on one GPU, beside what people would otherwise run.

    python packages/mb-train/benchmarks/run.py [dense] [dmoe] [paper] [step] [olmoe] [deepseek]
                                                [gpt-oss] [qwen3-next] [nemotron] [fp8]
                                                [paper:MoE ...]

    torchrun --nproc_per_node 2 packages/mb-train/benchmarks/run.py scaling [dispatchers] [long]

`paper:MoE` is the rows of `paper` with "MoE" in their names.

`paper`: GPT-2 125M with 64 GELU experts in every layer, beside its dense counterpart and capacity
factor 1. `step`: the same models in the recipes' steps of 512 sequences, of several micro-batches,
so that the optimizer's share is that of the recipe on one GPU. `olmoe`: four layers of
OLMoE-1B-7B, 16 sequences of 1024 a step. `deepseek`: the same of DeepSeek-V2-Lite, whose first
layer is dense, with GPT-2's vocabulary. `gpt-oss`: four layers of gpt-oss-20b, with that
vocabulary too; transformers' attention there is `flex_attention`, whose sinks it puts in
afterwards, or eager. `qwen3-next`: four layers of Qwen3-Next-80B-A3B, three of them with a state
(flash-linear-attention's kernels, if that is installed, on both sides), with 128 of its 512
experts and that vocabulary; `plain` without those kernels. `nemotron`: six halves of blocks of
Nemotron-3-Nano-30B-A3B, three Mamba-2 and two experts, two sequences of 8192, with that vocabulary.
`fp8`: four layers of OLMoE-1B-7B, two of Mixtral-8x7B, four of Llama-3-8B, each in bf16 and with
`--fp8-format`. `scaling`: under torchrun, tokens of all GPUs, beside what each of them does alone
at the same time; `dispatchers`: the other ways of tokens to experts, and experts with a capacity.
`long`: GPT-2 125M, and with 64 top-1 experts, on sequences of 32,768 tokens, one for each GPU and
step: of which all GPUs have a part (context parallelism), or each its own, and what one GPU alone
does with a step of one; `long:documents` within documents of some 1000 tokens.
`dense`: GPT-2 125M, 32 sequences of 1024, against the same model written by hand in plain PyTorch
(bf16 autocast, fused AdamW), eager and compiled. `dmoe`: 64 top-1 SwiGLU experts of width 2048 in
every layer, 16 sequences.
transformers' models of the same shapes have `grouped_mm` experts, are compiled whole and have no
balance loss. Their weights are in bf16: `grouped_mm` is not autocast, and of fp32 weights it
multiplies in fp32. "fp32 masters" are what AdamW steps then, as in our rows; without, weights and
moments are bf16 too, which moves half of the bytes and loses small updates.
Random tokens, no dropout; a step is forward, backward, clipping and optimizer. Medians over the
steps after the warm-up, and the quicker quarter, which a busy host disturbs less; host: the
milliseconds that Python takes for a step, from an empty queue. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mb_parallel import ParallelDims, ParallelMesh, distributed, rank, world_size
from mb_train.assembly.assemble import assemble
from mb_train.assembly.balance import LoadBalance
from mb_train.assembly.layout import parallel_dims
from mb_train.assembly.optimizer import build_optimizer, build_scaler
from mb_train.checkpoint.read import Progress
from mb_train.config import TrainConfig, whole
from mb_train.config.recipes import recipe
from mb_train.logs.metrics import Accumulator
from mb_train.logs.timers import Timers
from mb_train.machine.device import compute_dtype
from mb_train.models import gated_delta
from mb_train.schedule import BatchSizes, build_schedule
from mb_train.tasks import GPTTask
from mb_train.train.step import train_step
from torch import Tensor, nn

V, S, WARM_UP, STEPS, HOST_STEPS = 50304, 1024, 5, 30, 3
EOD, DOCUMENT, LONG = 50256, 1000, 32_768
DEVICE = "cuda"  # a test takes "cpu"


def time_steps(step: Callable[[], None], tokens: int) -> dict[str, float]:
    """Median tokens per second of steps of so many, their spread, and how long until warm."""
    begun = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - begun
    # The host is not held back: it may prepare the next step while this one runs, as in training.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    seconds = [one.elapsed_time(next_) / 1000 for one, next_ in itertools.pairwise(marks)]
    median = statistics.median(seconds)
    host = []
    for _ in range(HOST_STEPS):
        begun = time.perf_counter()
        step()
        host.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    return {
        "tokens_per_s": tokens / median,
        "quicker_quarter": tokens / statistics.quantiles(seconds, n=4)[0],
        "host_ms": 1000 * min(host),
        "spread": (max(seconds) - min(seconds)) / median,
        "warm_s": warm_s,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def random_batches(sequences: int) -> itertools.cycle[dict[str, Tensor]]:
    made = [torch.randint(50257, (sequences, S + 1), device=DEVICE) for _ in range(4)]
    ones = torch.ones(sequences, S, device=DEVICE)
    return itertools.cycle(
        {
            "tokens_BS": b[:, :-1].contiguous(),
            "labels_BS": b[:, 1:].contiguous(),
            "weights_BS": ones,
        }
        for b in made
    )


def batches_of(task: GPTTask, sequences: int, length: int) -> itertools.cycle[dict[str, Tensor]]:
    """A rank's, of random tokens that end a document now and then."""
    random = np.random.default_rng(0)
    samples = random.integers(50257, size=(4, sequences, length + 1))
    samples[random.random(samples.shape) < 1 / DOCUMENT] = EOD
    return itertools.cycle(
        {
            name: torch.tensor(array, device=DEVICE)
            for name, array in task.collate(list(one)).items()
        }
        for one in samples
    )


def ours(
    sequences: int,
    *,
    compiled: bool,
    ranks: int = 1,
    passes: int = 1,
    name: str = "dense-125m",
    **change: object,
) -> dict[str, float]:
    """This package's own step, on all ranks if there are several.

    `sequences` are those of a rank's micro-batch, of which it has so many `passes` in a step; they
    are shared where the change says so.
    """
    same = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "compile": compiled}
    groups = ranks // int(change.get("context_parallel_size", 1))
    step_size = sequences * groups * passes
    batch = {"micro_batch_size": sequences, "global_batch_size": step_size}
    config = TrainConfig(**(recipe(name) | same | batch | change))
    device = torch.empty(0, device=DEVICE).device  # with the number of the current GPU
    mesh = ParallelMesh(ParallelDims(), None, None, None)  # alone, in whatever world
    if ranks > 1:
        mesh = parallel_dims(config, ranks).build(DEVICE)
    task = GPTTask(config, vocab_size=V, eod=EOD, mesh=mesh)
    model = assemble(task, config, mesh, device, compute_dtype(config, device.type))
    run = SimpleNamespace(
        config=config, device=device, mesh=mesh, task=task, model=model,
        optimizer=build_optimizer(model, config), scaler=build_scaler(config), skipped_samples=0,
        load_balance=LoadBalance(model.parts, config, mesh),
        schedule=build_schedule(config, step_size),
        batch_sizes=BatchSizes(config, step_size, step=sequences * groups),
        timers=Timers(device, level=0, option="minmax"),
        progress=Progress(0, 0), iterations=10**6, sign_of_life=lambda _: None,
    )  # fmt: skip
    stream = batches_of(task, sequences, whole(config.seq_length))

    def step() -> None:
        train_step(run, stream, Accumulator(mesh))

    return {
        **time_steps(step, step_size * whole(config.seq_length)),
        "chosen": " ".join(model.notes),
    }


class HandBlock(nn.Module):
    """A GPT-2 block as one writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class HandGPT(nn.Module):
    """GPT-2 125M as one writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, 768), nn.Embedding(S, 768)
        self.blocks = nn.ModuleList(HandBlock(768, 12) for _ in range(12))
        self.norm = nn.LayerNorm(768)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


adamw = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)


class Masters:
    """AdamW over fp32 copies of a bf16 model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        self.optimizer = adamw(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)


def plain(
    model: nn.Module,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    sequences: int,
    *,
    masters: bool = False,
) -> dict[str, float]:
    """A plain bf16-autocast step of any model."""
    optimizer = Masters(model) if masters else adamw(model.parameters())
    stream = random_batches(sequences)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            batch = next(stream)
            loss = loss_of(batch["tokens_BS"], batch["labels_BS"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return time_steps(step, sequences * S)


def hand(*, compiled: bool) -> dict[str, float]:
    with torch.device("cuda"):
        model = HandGPT()
    return plain(model, torch.compile(model) if compiled else model, 32)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=V, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=12, num_local_experts=64,
        num_experts_per_tok=1, max_position_embeddings=S, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def olmoe() -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    shape = {"vocab_size": V, "intermediate_size": 1024, "num_hidden_layers": 4, "use_cache": False}
    return OlmoeForCausalLM(OlmoeConfig(**shape))


def deepseek() -> nn.Module:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=V, hidden_size=2048, intermediate_size=10_944, moe_intermediate_size=1408,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
        first_k_dense_replace=1, num_experts_per_tok=6, use_cache=False,
    )  # fmt: skip
    return DeepseekV2ForCausalLM(config)


def gpt_oss(attention: str) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=V, num_hidden_layers=4, num_local_experts=32, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def qwen3_next() -> nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shape = {"vocab_size": V, "num_experts": 128, "num_hidden_layers": 4, "use_cache": False}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**shape))


def theirs(make: Callable[[], nn.Module], *, masters: bool) -> dict[str, float]:
    """A model of transformers' in bf16, compiled whole."""
    with torch.device("cuda"):
        model: Any = make().bfloat16()
    model.set_experts_implementation("grouped_mm")
    model.compile()
    return plain(model, lambda tokens, _: model(tokens, labels=tokens).loss, 16, masters=masters)


def shallow(name: str, **change: object) -> dict[str, float]:
    """Four layers of a published model, or as many as the change says."""
    sizes = {"num_layers": 4, "seq_length": S} | change
    return ours(16, compiled=True, name=name, **sizes)


our_olmoe = functools.partial(shallow, "olmoe-1b-7b")
our_deepseek = functools.partial(shallow, "deepseek-v2-lite", moe_loss_weight=0.003)
our_gpt_oss = functools.partial(shallow, "gpt-oss-20b", moe_loss_weight=0.0)
our_qwen3_next = functools.partial(
    shallow, "qwen3-next-80b-a3b", moe_num_experts=128, moe_loss_weight=0.0
)


our_nemotron = functools.partial(
    ours, 2, compiled=True, name="nemotron-3-nano-30b-a3b", num_layers=6,
    hybrid_layer_pattern="MEM*EM", moe_loss_weight=0.0,
)  # fmt: skip


def plain_qwen3_next() -> dict[str, float]:
    """Ours without flash-linear-attention, as where it is not installed."""
    with unittest.mock.patch.object(gated_delta, "installed_kernel", return_value=None):
        return our_qwen3_next()


LLAMA = {
    "hidden_size": 4096, "ffn_hidden_size": 14_336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "qk_layernorm": False,
}  # fmt: skip
our_llama = functools.partial(shallow, "olmoe-1b-7b", **LLAMA, moe_num_experts=None)
our_mixtral = functools.partial(
    *(shallow, "olmoe-1b-7b"), **LLAMA, num_layers=2, moe_num_experts=8, moe_top_k=2
)


MOE = {
    "moe_num_experts": 64, "moe_top_k": 1, "activation": "swiglu", "ffn_hidden_size": 2048,
    "moe_loss_weight": 0.01,
}  # fmt: skip
PAPER = {"moe_num_experts": 64, "moe_top_k": 1, "moe_loss_weight": 0.1}  # GELU, F 3072
# The ROCm post's; from 2^32 on the scale would be searched for by steps that update nothing.
POST = PAPER | {
    "moe_capacity_factor": 1.0, "fp16": True, "bf16": False, "initial_loss_scale": 4096.0
}  # fmt: skip


def spread(sequences: int, **change: object) -> dict[str, float]:
    return ours(sequences, compiled=True, ranks=world_size(), **change)


def by_experts(dispatcher: str, **change: object) -> dict[str, float]:
    ep = {"expert_model_parallel_size": world_size(), "moe_dispatcher": dispatcher}
    return spread(64, **PAPER, **ep, **change)


def long(*, shared: bool, alone: bool = False, **change: object) -> dict[str, float]:
    """A step of a long sequence for each GPU; of each all have a part if sequences are shared."""
    ranks = 1 if alone else world_size()
    length = {"seq_length": LONG, "max_position_embeddings": LONG}
    cp = {"context_parallel_size": ranks} if shared else {}
    return ours(
        1, compiled=True, ranks=ranks, passes=ranks if shared else 1, **length, **cp, **change
    )


WITHIN = {"reset_attention_mask": True, "reset_position_ids": True}

CASES: dict[str, dict[str, Callable[[], dict[str, float]]]] = {
    "dense": {
        "by hand, eager": lambda: hand(compiled=False),
        "by hand, compiled": lambda: hand(compiled=True),
        "mb-train": lambda: ours(32, compiled=False),
        "mb-train --compile": lambda: ours(32, compiled=True),
    },
    "dmoe": {
        "mb-train": lambda: ours(16, compiled=False, **MOE),
        "mb-train --compile": lambda: ours(16, compiled=True, **MOE),
        "mb-train --compile --cuda-graph": lambda: ours(16, compiled=True, cuda_graph=True, **MOE),
        "transformers, fp32 masters": lambda: theirs(mixtral, masters=True),
        "transformers, bf16": lambda: theirs(mixtral, masters=False),
    },
    "paper": {
        "dense --compile, 64 sequences": lambda: ours(64, compiled=True),
        "dense --compile --cuda-graph": lambda: ours(64, compiled=True, cuda_graph=True),
        "dMoE --compile, 64 sequences": lambda: ours(64, compiled=True, **PAPER),
        "dMoE --compile --cuda-graph": lambda: ours(64, compiled=True, cuda_graph=True, **PAPER),
        "dMoE, bf16 moments": lambda: ours(
            64, compiled=True, **PAPER, optimizer_state_dtype="bf16"
        ),
        "MoE cf 1 --compile": lambda: ours(64, compiled=True, **PAPER, moe_capacity_factor=1.0),
        "MoE cf 1, fp16": lambda: ours(64, compiled=True, **POST),
        "MoE cf 1, fp16, --cuda-graph": lambda: ours(64, compiled=True, cuda_graph=True, **POST),
        "dMoE --compile, 16 sequences": lambda: ours(16, compiled=True, **PAPER),
        "dMoE, 16, --cuda-graph": lambda: ours(16, compiled=True, cuda_graph=True, **PAPER),
        "dMoE, 16, graph, bf16 moments": lambda: ours(
            16, compiled=True, cuda_graph=True, **PAPER, optimizer_state_dtype="bf16"
        ),
    },
    "step": {
        "dense --compile, 8 of 64": lambda: ours(64, compiled=True, passes=8),
        "dense --compile, 4 of 128": lambda: ours(128, compiled=True, passes=4),
        "dMoE --compile, 8 of 64": lambda: ours(64, compiled=True, passes=8, **PAPER),
        "dMoE --compile --cuda-graph, 4 of 16": lambda: ours(
            16, compiled=True, passes=4, cuda_graph=True, **PAPER
        ),
    },
    "olmoe": {
        "mb-train --compile": our_olmoe,
        "mb-train --compile, bf16 moments": lambda: our_olmoe(optimizer_state_dtype="bf16"),
        "transformers, fp32 masters": lambda: theirs(olmoe, masters=True),
        "transformers, bf16": lambda: theirs(olmoe, masters=False),
    },
    "deepseek": {
        "mb-train --compile": our_deepseek,
        "mb-train --compile, bf16 moments": lambda: our_deepseek(optimizer_state_dtype="bf16"),
        "transformers, fp32 masters": lambda: theirs(deepseek, masters=True),
        "transformers, bf16": lambda: theirs(deepseek, masters=False),
    },
    "gpt-oss": {
        "mb-train --compile": our_gpt_oss,
        "mb-train --compile, bf16 moments": lambda: our_gpt_oss(optimizer_state_dtype="bf16"),
        **{
            f"transformers, {attention}, {precision}": functools.partial(
                theirs, functools.partial(gpt_oss, attention), masters=precision != "bf16"
            )
            for attention in ("flex_attention", "eager")
            for precision in ("fp32 masters", "bf16")
        },
    },
    "qwen3-next": {
        "mb-train --compile": our_qwen3_next,
        "transformers, fp32 masters": lambda: theirs(qwen3_next, masters=True),
        "mb-train --compile, bf16 moments": lambda: our_qwen3_next(optimizer_state_dtype="bf16"),
        "transformers, bf16": lambda: theirs(qwen3_next, masters=False),
        "mb-train --compile, plain": plain_qwen3_next,
    },
    "nemotron": {"mb-train --compile": our_nemotron},
    "fp8": {
        f"{name}, {kind}": functools.partial(model, fp8_format=format)
        for name, model in (("OLMoE", our_olmoe), ("Mixtral", our_mixtral), ("Llama", our_llama))
        for kind, format in (("bf16", None), ("fp8", "hybrid"))
    },
    "scaling": {
        "dMoE ep, peer": lambda: by_experts("peer"),
        "dMoE, a GPU alone": lambda: ours(64, compiled=True, **PAPER),
        "dense, 64 sequences a GPU": lambda: spread(64),
        "dense, a GPU alone": lambda: ours(64, compiled=True),
    },
    "dispatchers": {
        "dMoE ep, all_to_all": lambda: by_experts("all_to_all"),
        "dMoE ep, all_gather": lambda: by_experts("all_gather"),
        "MoE cf 1 ep, peer": lambda: by_experts("peer", moe_capacity_factor=1.0),
        "MoE cf 1 ep, fixed": lambda: by_experts("fixed", moe_capacity_factor=1.0),
    },
    "long": {
        "dense, shared": lambda: long(shared=True),
        "dense, one each": lambda: long(shared=False),
        "dense, a GPU alone": lambda: long(shared=False, alone=True),
        "dense, documents, shared": lambda: long(shared=True, **WITHIN),
        "dense, documents, one each": lambda: long(shared=False, **WITHIN),
        "dMoE, shared": lambda: long(shared=True, **PAPER),
        "dMoE, one each": lambda: long(shared=False, **PAPER),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["dense", "dmoe", "paper"])
    cases = parser.parse_args().cases
    if unknown := [case for case in cases if case.partition(":")[0] not in CASES]:
        parser.error(f"expected {', '.join(CASES)}, got {', '.join(unknown)}")
    with (
        distributed("cuda"),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stdout if rank() == 0 else nowhere),
    ):
        measure_all(cases)


def measure_all(cases: Sequence[str]) -> None:
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    columns = ("k tokens/s", "quarter", "spread", "host ms", "warm s", "GiB")
    print(f"{'case':11} {'what':34}" + "".join(f"{column:>11}" for column in columns))
    for word in cases:
        case, _, part = word.partition(":")
        for what, measure in CASES[case].items():
            if part not in what:
                continue
            gc.collect()  # models hold themselves in cycles: the case before would count
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                found = measure()
            except Exception as error:  # one that fails should not cost the others
                print(f"{case:11} {what:34} failed: {type(error).__name__}: {str(error)[:300]}")
                results.append({"case": case, "what": what, "error": type(error).__name__})
                continue
            finally:
                torch.compiler.reset()
            print(
                f"{case:11} {what:34}{found['tokens_per_s'] / 1000:11.1f}"
                f"{found['quicker_quarter'] / 1000:11.1f}{found['spread']:11.1%}"
                f"{found['host_ms']:11.1f}{found['warm_s']:11.1f}{found['gib']:11.1f}",
                flush=True,
            )
            results.append({"case": case, "what": what, **found})
    print(json.dumps({"device": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main()
