"""What a run will need, before it is started: parameters, memory, time of a step.

Memory is counted from what our text keeps: fp32 weights, gradients and optimizer state, weights in
the dtype of the arithmetic, and what `kept` says of the forward pass. The most is needed where the
backward pass begins, when all layers have left theirs and the loss has its logits or, behind it,
the last block what it computes again; or in its last block, when nearly all gradients are there.
Seconds are `step_time`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mb_parallel import ParallelDims
from mb_parallel.pipeline_parallel import passes_kept, stage_indices, waiting_share
from torch import nn

from mb_train.assembly.graphs import check_capturable
from mb_train.assembly.layout import check_schedule, parallel_dims, stage_layers
from mb_train.assembly.optimizer import parameter_groups
from mb_train.config import TrainConfig, whole
from mb_train.machine.device import compute_dtype
from mb_train.models.unfilled import unfilled
from mb_train.models.workload import Workload
from mb_train.plan.devices import data_sheet
from mb_train.plan.flops import expert_weights, flops, flops_again, flops_in_fp8, visited
from mb_train.plan.kept import (
    activations_bytes,
    away_by_layer,
    kept_by_layer,
    loss_bytes,
    recomputes,
)
from mb_train.plan.rounding import rounding
from mb_train.plan.step_time import (
    Demand,
    attending,
    between_kernels,
    keeping,
    meeting_few_rows,
    orthogonalising,
    scoring,
    waiting,
)
from mb_train.schedule import BatchSizes
from mb_train.tasks import Task
from mb_train.tasks.make import one_process_task

# Fragmentation, workspaces of the matrix products, tensors that live for one layer's backward.
_SLACK = 1.05
# Numbers of optimizer state for each parameter; Adafactor's few are not counted. A matrix of Muon's
# has one, in fp32 whatever is said of the others.
_MOMENTS = {"adam": 2, "muon": 2, "sgd": 1, "adafactor": 0}


@dataclass(frozen=True)
class Sizes:
    """What a rank of a run needs; of a pipeline the first stage, which keeps most activations.

    Its parameters are those of the last stage where this has more: modules for further tokens.

    Attributes:
        parameters: of the whole model; active: without the experts that a token does not visit,
            in the mean.
        weights, gradients, optimizer, activations: bytes of a rank; activations with the loss.
        block: of the activations, those of one block.
        offloaded, kept_on_host: bytes besides, of a rank, in the host's memory: of the optimizer,
            and of activations.
        gradients_at_loss: of those bytes, what earlier micro-batches left; 0 for the first.
        checkpoint: bytes of one, of all ranks together.
        step_tokens, step_flops: of all ranks together.
        step_s: seconds; None for a device whose peak is not known, and in fp32.
    """

    parameters: int
    active: int
    weights: int
    gradients: int
    optimizer: int
    offloaded: int
    activations: int
    block: int
    kept_on_host: int
    gradients_at_loss: int
    checkpoint: int
    step_tokens: int
    step_flops: float
    step_s: float | None

    @property
    def memory(self) -> int:
        """Bytes of a rank, all in all, without those in the host's memory."""
        passing = max(self.gradients + self.block, self.gradients_at_loss + self.activations)
        return int((self.weights + self.optimizer + passing) * _SLACK)

    @property
    def on_host(self) -> int:
        """Bytes of a rank in pinned memory of the host."""
        return self.offloaded + self.kept_on_host


def sizes(config: TrainConfig, vocab_size: int, ranks: int, device: str) -> Sizes:
    """Sizes of a run.

    Args:
        vocab_size: padded.
        ranks: of the job.
        device: name of the GPU, or "CPU".

    Raises:
        ValueError: parallel sizes that do not divide the ranks or the model, no passes for
            --cuda-graph, or FP8 on a GPU that has none.
    """
    dims = parallel_dims(config, ranks)
    sheet = data_sheet(device)
    if config.fp8_format is not None and sheet is not None and not sheet.fp8:
        raise ValueError(
            f"Expected a GPU from Ada or Hopper on, or an MI300, MI350 or RX 9070, for "
            f"--fp8-format, got {device}. Leave it out."
        )
    if config.cuda_graph:
        check_capturable(config, torch.device("cuda"), dims)
    task = one_process_task(config, None, vocab_size=vocab_size)
    work = task.workload
    with unfilled():
        model = task.build_model(compute_dtype=torch.float32)
    on_gpu = device != "CPU"
    width = compute_dtype(config, "cuda" if on_gpu else "cpu").itemsize
    narrow = width if width < 4 else 0
    batch = config.batch_size(dims.data)
    batches = BatchSizes(config, batch, step=whole(config.micro_batch_size) * dims.data)
    check_schedule(config, list(map(batches.micro_batches, batches.all)))
    micro_batches = batches.micro_batches(batch)
    whole_state = ranks == 1 or config.zero_stage == 0
    copied = narrow > 0 and whole_state
    parts = _parts([model], config, dims, stages=dims.pp, copied=copied)
    held = parts
    if dims.pp > 1:  # embeddings are on the first stage, none of its share of them
        held = _parts(_fullest_rank(task, config, dims), config, dims, stages=1, copied=copied)
    total, experts = sum(part.total for part in parts), parts[1].total
    share = 0.0
    if (number := config.moe_num_experts) is not None:
        share = visited(config.moe_top_k, number, config.moe_num_zero_experts) / number
    # Casts to 16 bit live until the backward pass; blocks that compute again cast again. What ZeRO
    # gathers is cast already, at stage 3 a layer at a time. Copies stay.
    alive = 1.0
    if whole_state:
        again = recomputes(config, -(-work.layers // dims.pp))
        alive -= (sum(again) - any(again)) / len(again)
    elif config.zero_stage == 3:
        alive /= -(-work.layers // dims.pp)
    cast = narrow * sum(part.here * (1.0 if part.copied else alive) for part in held)
    # Whole between micro-batches, which ZeRO 1 reduces once, and so does every pipeline.
    waiting = (config.zero_stage == 1 or dims.pp > 1) and micro_batches > 1

    def of_part(part: _Part, passes: int) -> float:
        # What a first micro-batch's graph leaves stays where it is, beside sums of further ones.
        beside = 2 if config.cuda_graph and part.copied and passes > 1 else 0
        number = part.here if waiting else part.sharded
        return (part.gradient_bytes(passes) + beside) * number

    def gradients(passes: int) -> int:
        return int(sum(of_part(part, passes) for part in held))

    under_way, idle = 1.0, 0.0
    if dims.pp > 1:
        turns: dict[str, Any] = {
            "micro_batches": micro_batches,
            "pp_size": dims.pp,
            "stages_per_rank": len(stage_layers(config, work.layers, dims.pp)) // dims.pp,
        }
        under_way = passes_kept(config.schedule_in_force, **turns)
        idle = waiting_share(config.schedule_in_force, **turns)
    activations = activations_bytes(work, config, dims, width, on_gpu=on_gpu, under_way=under_way)
    step_s = _step_s(work, config, dims, parts, micro_batches, device, idle=idle)
    held_state = sum(part.state_bytes * part.sharded for part in held)
    offloaded = held_state * config.offload_fraction if on_gpu else 0
    state = 0 if config.no_save_optim else sum(part.state_bytes * part.total for part in parts)
    return Sizes(
        parameters=total,
        active=int(total - experts + experts * share),
        weights=int(4 * sum(part.sharded for part in held) + cast),
        gradients=gradients(micro_batches),
        optimizer=int(held_state - offloaded),
        offloaded=int(offloaded),
        activations=int(
            activations.here + max(loss_bytes(work, config, dims, width), activations.again)
        ),
        block=int(activations.block),
        kept_on_host=int(activations.there),
        gradients_at_loss=0 if micro_batches == 1 else gradients(micro_batches - 1),
        checkpoint=int(4 * total + state),
        step_tokens=work.tokens * batch,
        step_flops=sum(flops(work)) * batch,
        # Peaks are those of 16 bits.
        step_s=step_s if narrow else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The dense parameters of a model, or its experts.

    Attributes:
        total: how many of the modules; here: those that a rank computes with, in the mean over the
            stages that the modules make up.
        shards: ranks that share their state.
        copied: copies in 16 bit stay from step to step, which the optimizer writes.
        state_bytes: of the optimizer for each, in the mean.
        turning: what Muon's iterations take a rank.
    """

    total: int
    here: float
    shards: int
    copied: bool
    state_bytes: float
    turning: Demand

    @property
    def sharded(self) -> float:
        return self.here / self.shards

    def gradient_bytes(self, micro_batches: int) -> int:
        """Of each parameter after so many; beside a copy in its dtype until several add up."""
        return 2 if self.copied and micro_batches == 1 else 4

    def traffic(self, micro_batches: int, offload_fraction: float) -> Demand:
        """What a step moves for them, products apart."""
        gradient = self.gradient_bytes(micro_batches)
        away = self.state_bytes * offload_fraction
        here = self.state_bytes - away
        # Read and written: weights and state; read: the gradient, by the norm and by the optimizer.
        step = 2 * 4 + 2 * here + 2 * gradient + 2 * self.copied
        # Of each micro-batch: the weights are cast, the gradients too, and added to a sum in fp32.
        # Beside copies a second gradient makes the sum of two, and further ones are added to it.
        summed = 8 * (micro_batches > 1) + 10 * max(micro_batches - 2, 0)
        of_all = summed if self.copied else (6 + 8) * micro_batches
        moved = step * self.sharded + of_all * self.here
        return Demand(moved=moved, linked=away * self.sharded)


def _fullest_rank(task: Task, config: TrainConfig, dims: ParallelDims) -> list[nn.Module]:
    """The stages of a pipeline's first rank, or of its last if there is more on it."""
    ends = [_stages(task, config, dims, rank) for rank in (0, dims.pp - 1)]
    return max(ends, key=lambda models: sum(p.numel() for m in models for p in m.parameters()))


def _stages(task: Task, config: TrainConfig, dims: ParallelDims, rank: int) -> list[nn.Module]:
    """Those of a rank of a pipeline, as `assemble` gives it."""
    runs = stage_layers(config, task.workload.layers, dims.pp)
    task.borders(runs)  # or refuse
    per_rank = len(runs) // dims.pp
    found = []
    for index in stage_indices(
        config.schedule_in_force, pp_size=dims.pp, pp_rank=rank, stages_per_rank=per_rank
    ):
        with unfilled():
            model = task.build_model(compute_dtype=torch.float32)
        model.keep(runs[index], first=index == 0, last=index == len(runs) - 1)
        found.append(model)
    return found


def _parts(
    models: list[nn.Module], config: TrainConfig, dims: ParallelDims, *, stages: int, copied: bool
) -> list[_Part]:
    """The dense parameters and the experts of modules, as a rank has them."""
    named = (named for model in models for named in model.named_parameters())
    experts = {p for name, p in named if ".experts." in name}
    shared, of_experts = dims.dp_shard, max(dims.dp * dims.tp // dims.ep // dims.dp_replicate, 1)
    if config.zero_stage == 0:
        shared = of_experts = 1
    found = []
    for owned, ranks, shards in (
        (False, dims.tp * stages, shared),
        (True, dims.ep * stages, of_experts),
    ):
        total, state, turning = 0, 0, Demand()
        for group in parameter_groups(models, config):
            muon = bool(group.get("muon"))
            own = [p for p in group["params"] if (p in experts) == owned]
            numbers = sum(p.numel() for p in own)
            total += numbers
            state += numbers * _state_bytes(config, muon=muon)
            if muon:
                turning += orthogonalising(own, group["fused"], config.muon_num_ns_steps)
        # An expert is turned by its owner; dense matrices are dealt out among those that have parts
        # of them, but where data and tensor parallelism cut them both: there all turn all of them.
        dealt = max(shared, dims.tp) if min(shared, dims.tp) == 1 else 1
        turned_by = ranks * shards if owned else stages * dealt
        found.append(
            _Part(
                total=total,
                here=total / ranks,
                shards=shards,
                # Experts that nobody else has keep copies in the dtype of the arithmetic.
                copied=copied and owned,
                state_bytes=state / max(total, 1),
                turning=turning.shared(turned_by),
            )
        )
    return found


def _state_bytes(config: TrainConfig, *, muon: bool) -> int:
    """Bytes of optimizer state for each parameter, of Muon's matrices or of others."""
    if muon:
        return 4
    halves = config.optimizer in ("adam", "muon") and config.optimizer_state_dtype == "bf16"
    return _MOMENTS[config.optimizer] * (2 if halves else 4)


def _step_s(
    work: Workload,
    config: TrainConfig,
    dims: ParallelDims,
    parts: list[_Part],
    micro_batches: int,
    device: str,
    *,
    idle: float,
) -> float | None:
    """Seconds of a step; of a pipeline in the mean over its stages.

    Args:
        idle: what a rank waits for others, over what its forward and backward passes take.
    """
    samples = micro_batches * whole(config.micro_batch_size)
    layers = kept_by_layer(work, config, dims, 2)
    # A block that computes its forward pass again does the fourth third of its products.
    repeated = sum(recomputes(config, len(layers))) / len(layers)
    again = 1 + repeated / 3
    blocks, attention, heads = flops(work)
    # In FP8 all but the gradients of weights, a third, take half the time.
    halved = flops_in_fp8(work) * (again - 1 / 3)
    products = blocks * again + flops_again(work) - halved / 2
    logits = sum(head.places * head.outputs for head in work.heads)
    ranks = dims.cp_tp * dims.pp
    of_gpt = config.model == "gpt"
    dropout = bool(config.attention_dropout)
    kept, sentences = 2 * sum(layer.all + layer.again for layer in layers) * samples, not of_gpt
    in_blocks = [
        Demand(products=products * samples / ranks),
        attending(attention * again * samples / ranks, causal=of_gpt, dropout=dropout),
        keeping(kept, sentences=sentences, compiled=config.compile),
        between_kernels(len(layers) * micro_batches, compiled=config.compile),
    ]
    in_passes = [
        *in_blocks,
        Demand(products=heads * samples / ranks),
        scoring(2 * logits * samples / ranks),
        rounding(
            *(work, dims),
            micro_batch=whole(config.micro_batch_size),
            micro_batches=micro_batches,
            repeated=repeated,
        ),
    ]
    update = [part.traffic(micro_batches, config.offload_fraction) + part.turning for part in parts]
    micro_batch = whole(config.micro_batch_size)
    away = [2 * numbers * micro_batch for numbers in away_by_layer(config, layers)]
    waits = waiting(away, sum(in_blocks, Demand()).shared(micro_batches), device)
    few_rows = _few_rows(work, dims, micro_batch, device)
    passes, updates = (sum(of, Demand()).seconds(device) for of in (in_passes, update))
    if passes is None or updates is None or waits is None or few_rows is None:
        return None
    return (passes + micro_batches * (waits + few_rows)) * (1 + idle) + updates


def _few_rows(work: Workload, dims: ParallelDims, micro_batch: int, device: str) -> float | None:
    """Seconds that the experts of a stage take beyond the products of a micro-batch's rows."""
    found = 0.0
    for each in (*work.passes, *work.behind):
        config, moe = each.blocks, each.blocks.moe
        if moe is None:
            continue
        chosen = visited(moe.top_k, moe.num_experts, moe.num_zero_experts)
        rows = micro_batch * each.tokens / dims.cp_tp * chosen * dims.ep / moe.num_experts
        weights = expert_weights(config) / dims.ep
        for layer in filter(config.has_experts, range(config.num_layers)):
            taken = meeting_few_rows(weights, rows, device, in_fp8=config.in_fp8(layer))
            if taken is None:
                return None
            found += taken
    return found / dims.pp
