"""`mb-train plan`: what a run will need, before it is started: parameters, memory, time of a step.

Memory is counted from what our text keeps: fp32 weights, gradients and optimizer state, weights in
the dtype of the arithmetic, and of every layer the tensors that its backward pass reads. The most
is needed at the loss, when all layers have left theirs, or at the end of the backward pass, when
all gradients are there. Time is arithmetic at the share of the peak that a dense model reaches, and
traffic of the weights at the memory's bandwidth; what ranks tell each other is not counted.

Letters: T tokens of a micro-batch, D hidden, F ffn width, H query heads, G key-value heads, C width
of a head, K experts per token, L layers, E experts.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from mb_parallel import ParallelDims
from mb_parallel.expert_parallel import choose_dispatcher
from torch import nn

from mb_train.config import TrainConfig, whole
from mb_train.flops import flops_per_token, peak_flops
from mb_train.layout import parallel_dims
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

GIB = 2**30
# GPT-2 125M, compiled, on one H200: 523 k and 566 k tokens/s of 0.86 GFLOP each, in steps of 32 and
# of 64 sequences, are 0.46 and 0.50 of 989 TFLOP/s (benchmarks/results/2026-11-22-h200.md).
_SHARE_OF_PEAK = 0.48
# The optimizer's pass over 3.7 B weights, with the norm before it: 3.4 to 3.7 of 4.8 TB/s.
_SHARE_OF_BANDWIDTH = 0.75
# Logits that the loss has at once, `linear_cross_entropy`'s on a GPU, and their tokens.
_LOGITS, _LOGIT_ROWS = 2**29, 8192
# TB/s by a part of the device's name, the more particular first: the makers' data sheets.
_BANDWIDTH_TB = {
    "GB200": 8.0, "B200": 8.0, "H200": 4.8, "H100 PCIe": 2.0, "H100": 3.35, "A100": 2.04,
    "L40S": 0.86, "MI355X": 8.0, "MI350X": 8.0, "MI325X": 6.0, "MI300X": 5.3, "MI300A": 5.3,
    "MI250": 1.64, "MI210": 1.64, "7900 XTX": 0.96,
}  # fmt: skip
# Fragmentation, workspaces of the matrix products, tensors that live for one layer's backward.
_SLACK = 1.05
# Numbers of optimizer state for each parameter; Adafactor's few are not counted.
_MOMENTS = {"adam": 2, "sgd": 1, "adafactor": 0, "muon": 1}


@dataclass(frozen=True)
class Sizes:
    """What a rank of a run needs; of a pipeline the first stage, which holds most.

    Attributes:
        parameters: of the whole model; active: of those, what a token meets.
        weights, gradients, optimizer, activations: bytes of a rank; activations with the loss.
        gradients_at_loss: of those bytes, what earlier micro-batches left; 0 for the first.
        step_flops: of all ranks together.
        step_s: seconds; None for a device whose peak is not known.
    """

    parameters: int
    active: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    gradients_at_loss: int
    step_flops: float
    step_s: float | None

    @property
    def memory(self) -> int:
        """Bytes of a rank, all in all."""
        passing = max(self.gradients, self.gradients_at_loss + self.activations)
        return int((self.weights + self.optimizer + passing) * _SLACK)


def sizes(config: TrainConfig, vocab_size: int, ranks: int, device: str) -> Sizes:
    """Sizes of a run of a GPT.

    Args:
        vocab_size: padded.
        ranks: of the job.
        device: name of the GPU, or "CPU".

    Raises:
        ValueError: parallel sizes that do not divide the ranks, or another model than a GPT.
    """
    if config.model != "gpt":
        raise ValueError(f"Expected a GPT to plan for, got {config.model}.")
    dims = parallel_dims(config, ranks)
    with torch.device("meta"):
        model = GPT(transformer_config(config, vocab_size))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(p.numel() for p in model.parameters())
    share = config.moe_top_k / config.moe_num_experts if config.moe_num_experts else 0.0
    expert_shards = max(dims.dp * dims.tp // dims.ep // dims.dp_replicate, 1)
    narrow = 2 if device != "CPU" or config.fp16 or config.bf16 else 0
    batch = config.batch_size(dims.dp)
    flops = flops_per_token(config, vocab_size) * batch * whole(config.seq_length)
    micro_batches = batch // (whole(config.micro_batch_size) * dims.dp)
    parts = [
        _Part((total - experts) / (dims.tp * dims.pp), dims.dp_shard, copied=False),
        # Experts that nobody else has keep copies in the dtype of the arithmetic.
        _Part(experts / (dims.ep * dims.pp), expert_shards, copied=narrow > 0 and ranks == 1),
    ]
    here, sharded = sum(part.here for part in parts), sum(part.sharded for part in parts)
    # Casts to 16 bit live until the backward pass; ZeRO 3 gathers a layer at a time instead.
    cast = narrow * (here / whole(config.num_layers) if config.zero_stage == 3 else here)
    # Whole between micro-batches, which ZeRO 1 reduces once, and so does every pipeline.
    waiting = (config.zero_stage == 1 or dims.pp > 1) and micro_batches > 1

    def gradients(passes: int) -> int:
        held = (part.here if waiting else part.sharded for part in parts)
        each = (part.gradient_bytes(passes) for part in parts)
        return int(sum(map(operator.mul, each, held)))

    activations = _activations(model, config, dims, narrow or 4)
    return Sizes(
        parameters=total,
        active=int(total - experts + experts * share),
        weights=int(4 * sharded + cast),
        gradients=gradients(micro_batches),
        optimizer=int(_state_bytes(config) * sharded),
        activations=int(activations + _loss(config, vocab_size, dims, narrow or 4)),
        gradients_at_loss=0 if micro_batches == 1 else gradients(micro_batches - 1),
        step_flops=flops,
        step_s=_seconds(
            flops / ranks,
            sum(part.traffic(_state_bytes(config), micro_batches) for part in parts),
            device,
        ),
    )


@dataclass(frozen=True)
class _Part:
    """The dense parameters of a rank, or its experts.

    Attributes:
        here: parameters that the rank computes with.
        shards: ranks that share their state.
        copied: copies in 16 bit stay from step to step, which the optimizer writes.
    """

    here: float
    shards: int
    copied: bool

    @property
    def sharded(self) -> float:
        return self.here / self.shards

    def gradient_bytes(self, micro_batches: int) -> int:
        """Of each parameter after so many; beside a copy in its dtype until several add up."""
        return 2 if self.copied and micro_batches == 1 else 4

    def traffic(self, state_bytes: int, micro_batches: int) -> float:
        """Bytes that a step moves for them, products apart."""
        gradient = self.gradient_bytes(micro_batches)
        # Read and written: weights and state; read: the gradient, by the norm and by the optimizer.
        step = 2 * 4 + 2 * state_bytes + 2 * gradient + 2 * self.copied
        # Of each micro-batch: the weights are cast, the gradients too, and added to a sum in fp32.
        adding = 10 if micro_batches > 1 else 0
        each = adding if self.copied else 6 + 8
        return step * self.sharded + each * self.here * micro_batches


def _state_bytes(config: TrainConfig) -> int:
    """Bytes of optimizer state for each parameter."""
    halves = config.optimizer == "adam" and config.optimizer_state_dtype == "bf16"
    return _MOMENTS[config.optimizer] * (2 if halves else 4)


def _activations(model: nn.Module, config: TrainConfig, dims: ParallelDims, width: int) -> float:
    """Bytes that a micro-batch's forward pass leaves for its backward pass."""
    hidden, tokens = whole(config.hidden_size), whole(config.micro_batch_size)
    tokens *= whole(config.seq_length)
    heads = whole(config.num_attention_heads) * config.head_size
    kv = config.kv_heads * config.head_size
    rotated = heads + kv if config.position_embedding_type == "rope" else 0
    around = 4 * hidden  # the inputs of both norms, and what comes out of them
    if config.fp32_residual_connection:
        around += 2 * hidden * (4 - width) // width  # what goes into the norms
    if config.hidden_dropout:
        around += 2 * hidden // width  # masks of a byte
    inside = heads + 2 * kv + rotated + heads  # q, k, v, what attention returns
    gated = 2 if config.is_glu else 1
    dense = (4 if config.is_glu else 2) * config.ffn_size
    rows, tokens_here = _room(config, dims, on_gpu=width == 2)
    experts = config.moe_top_k * gated * config.expert_ffn_size * rows
    if config.moe_recompute:
        experts = 0
    elif config.moe_saved_activation_bits is not None:
        experts = experts * config.moe_saved_activation_bits // (8 * width)
    if dims.ep > 1:
        experts += hidden * tokens_here
    experts += gated * (config.moe_shared_expert_intermediate_size or 0)
    experts += (4 * (config.moe_num_experts or 0) * 3) // width  # logits and scores in fp32
    split = dims.tp if config.sequence_parallel else 1
    layers = whole(config.num_layers)
    first = -(-layers // dims.pp)
    per_layer = []
    for layer in range(first):
        ffn = experts / split if config.has_experts(layer) else dense / dims.tp
        per_layer.append(around / split + inside / dims.tp + ffn)
    kept = sum(per_layer)
    if config.recompute_granularity == "full":
        kept = first * hidden / split + max(per_layer)
    # A pipeline's first stage keeps as many micro-batches as there are stages (1F1B).
    in_flight = dims.pp
    ends = 4 * tokens * hidden * 2  # fp32 embeddings; hidden states and their gradient at the head
    return width * tokens * kept * in_flight + ends


def _room(config: TrainConfig, dims: ParallelDims, *, on_gpu: bool) -> tuple[float, float]:
    """Rows that experts have room for, over the even share; tokens that are kept, over a rank's."""
    ep, top_k = dims.ep, config.moe_top_k
    if ep == 1 or config.moe_num_experts is None:
        return 1.0, 0.0
    bounded = config.moe_row_policy != "worst"
    problem = None if on_gpu else "there is no GPU"
    chosen, _ = choose_dispatcher(config.moe_dispatcher, top_k, ep, problem, bounded=bounded)
    visited = min(top_k, ep)
    if chosen == "all_to_all" or config.moe_row_policy == "exact":
        return 1.0, visited
    if config.moe_row_policy == "budget":
        return config.moe_row_budget, visited * config.moe_row_budget
    here = max(config.moe_num_experts // ep, 1)
    return ep * min(top_k, here) / top_k, ep


def _loss(config: TrainConfig, vocab_size: int, dims: ParallelDims, width: int) -> float:
    """Bytes that the loss needs: a slice of logits, and the gradient of the head's weight."""
    tokens = whole(config.micro_batch_size) * whole(config.seq_length)
    rows = min(tokens, _LOGIT_ROWS, _LOGITS // vocab_size)
    share = vocab_size / dims.tp
    return rows * share * width + 4 * share * whole(config.hidden_size)


def _seconds(flops: float, traffic: float, device: str) -> float | None:
    """Seconds of a step on one rank, with so much arithmetic and so many bytes of weights."""
    peak = peak_flops(device)
    bandwidth = next(
        (1e12 * tb for part, tb in _BANDWIDTH_TB.items() if part.lower() in device.lower()), None
    )
    if peak is None or bandwidth is None:
        return None
    return flops / (_SHARE_OF_PEAK * peak) + traffic / (_SHARE_OF_BANDWIDTH * bandwidth)


def describe(config: TrainConfig, found: Sizes, *, ranks: int, device: str) -> list[str]:
    """The sizes as lines."""
    tokens = config.batch_size(config.data_parallel_size(ranks)) * whole(config.seq_length)
    lines = [
        f"parameters    {found.parameters:,} ({found.active:,} of them meet a token)",
        f"memory        {found.memory / GIB:.1f} GiB per rank: weights {found.weights / GIB:.1f}, "
        f"gradients {found.gradients / GIB:.1f}, optimizer {found.optimizer / GIB:.1f}, "
        f"activations {found.activations / GIB:.1f}",
        f"checkpoint    {checkpoint_bytes(config, found.parameters) / GIB:.1f} GiB",
        f"step          {tokens:,} tokens, {found.step_flops / 1e12:,.1f} TFLOP on {ranks} ranks",
    ]
    if found.step_s is not None:
        lines.append(
            f"time          {1000 * found.step_s:,.0f} ms a step on {device}, "
            f"{tokens / found.step_s:,.0f} tokens/s, communication not counted"
        )
        if config.train_iters is not None:
            hours = config.train_iters * found.step_s / 3600
            long = f"{hours:,.1f} hours" if hours >= 0.1 else f"{3600 * hours:,.0f} seconds"
            lines.append(f"training      {config.train_iters:,} steps, {long}")
    return lines


def checkpoint_bytes(config: TrainConfig, parameters: int) -> int:
    """Bytes of one checkpoint on disk."""
    state = 0 if config.no_save_optim else _state_bytes(config)
    return (4 + state) * parameters


def memory_warning(
    config: TrainConfig, vocab_size: int, ranks: int, device: torch.device, name: str
) -> str | None:
    """A line to say at the start if the run will not fit into this rank's memory, else None."""
    if config.model != "gpt":
        return None
    needed = sizes(config, vocab_size, ranks, name).memory
    if device.type == "cuda":
        there, what = torch.cuda.mem_get_info(device)[0], "free GPU memory"
    else:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        there, what = host_memory() // here, "available memory"
    if needed <= there:
        return None
    return (
        f" warning: this run needs about {needed / GIB:.1f} GiB per rank, and there are "
        f"{there / GIB:.1f} GiB of {what}. Lower --micro-batch-size, add "
        "--recompute-granularity full, or take more ranks; mb-train plan shows what takes how much."
    )


def host_memory() -> int:
    """Bytes that a process can still take on this host, by the kernel and by its control group."""
    there = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                there = 1024 * int(line.split()[1])
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            there = min(there, max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass
    return there
