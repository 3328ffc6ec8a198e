"""A model put together for a run: cut into stages, shared out over ranks, made ready to train.

The order is that of the interfaces: stages, tensors, experts, recompute, context, compile, offload,
and outermost the sharding of data parallelism. A model's own text knows of none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from mb_layers.router import Router
from mb_parallel import (
    ParallelMesh,
    any_rank,
    apply_data_parallel,
    of_all_ranks,
    parallelize_experts,
)
from mb_parallel.context_parallel import parallelize_context
from mb_parallel.engines import torch_release
from mb_parallel.expert_parallel import budgets_of, choose_dispatcher
from mb_parallel.offload import Offload
from mb_parallel.optimizer import WorkingCopies, hold_working_copies
from mb_parallel.pipeline_parallel import SCHEDULES, Pipeline, stage_indices
from mb_parallel.recompute import apply_recompute
from mb_parallel.tensor_parallel import parallelize_tensors
from torch import nn

from mb_train.assembly.execute import Executor, Piped, Sequential, WithinBudget
from mb_train.assembly.graphs import Graphed, check_capturable, peer_buffers
from mb_train.assembly.layout import stage_layers
from mb_train.assembly.offloading import keep_on_host, offload_of
from mb_train.config import TrainConfig, whole
from mb_train.models.attention import CoreAttention
from mb_train.models.classifier import Classifier
from mb_train.models.delta_net import DeltaGates
from mb_train.models.gated_delta import delta_note
from mb_train.models.gpt import GPT
from mb_train.models.ict import ICT
from mb_train.models.mamba import MambaGates, scan_note
from mb_train.models.states import StateCore
from mb_train.models.transformer import Block
from mb_train.tasks import Task
from mb_train.tasks.base import FIRST_INPUT, Borders


@dataclass
class Assembled:
    """What a rank trains.

    parts: the stages on this rank, one but for interleaved schedules; parameter names in each are
        those of the whole model.
    executor: runs micro-batches through them, and through the other ranks'.
    parameters: number of parameters of the whole model.
    copies: parameters that another stage has too: no part of a norm over the model.
    notes: what was decided on the way, to be printed.
    working_copies: of weights, in the dtype to compute with; the optimizer is to write them.
    """

    parts: list[nn.Module]
    executor: Executor
    parameters: int
    copies: list[nn.Parameter] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    working_copies: WorkingCopies = field(default_factory=lambda: WorkingCopies({}))

    @property
    def steps_redone(self) -> int:
        """Steps since the start that ran again, see `WithinBudget`."""
        return self.executor.steps_redone if isinstance(self.executor, WithinBudget) else 0

    def train(self, mode: bool = True) -> None:
        """Switch the parts to training or to evaluation."""
        for part in self.parts:
            part.train(mode)


def assemble(
    task: Task,
    config: TrainConfig,
    mesh: ParallelMesh,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> Assembled:
    """Build the model of a run and spread it as its flags say.

    Every rank draws the whole model's weights from the seed and keeps its share, so they do not
    depend on how it is spread.

    Raises:
        ValueError: sizes that the parallel sizes do not divide, or a way that the model cannot go.
    """
    if config.cuda_graph:
        check_capturable(config, device, mesh.dims)
    runs = stage_layers(config, task.workload.layers, mesh.pp_size)
    borders = task.borders(runs) if mesh.pp_size > 1 else None
    indices = stage_indices(
        config.schedule_in_force,
        pp_size=mesh.pp_size,
        pp_rank=mesh.pp_rank,
        stages_per_rank=len(runs) // mesh.pp_size,
    )
    parts, total = [], 0
    offload = offload_of(config, device)
    notes: dict[int, list[str]] = {}
    for index in indices:
        model = _initialized(task, config, device, compute_dtype)
        total = sum(p.numel() for p in model.parameters())
        if len(runs) > 1:
            model.keep(runs[index], first=index == 0, last=index == len(runs) - 1)
        notes[index] = _spread(model, task, config, mesh, device, compute_dtype, offload)
        parts.append(model)
    # Schedules in halves compute the gradients of parameters, and would leave out those of copies.
    in_halves = SCHEDULES[config.schedule_in_force].in_halves
    working_copies = hold_working_copies([] if in_halves else parts, compute_dtype)
    executor: Executor
    copies: list[nn.Parameter] = []
    if borders is not None:
        pipeline = _pipeline(parts, borders, config, mesh, compute_dtype)
        executor, copies = Piped(pipeline), pipeline.copies
    elif config.cuda_graph:
        buffers = peer_buffers(parts[0])
        executor = Graphed(parts[0], working_copies, buffers, dp_size=mesh.dp_size)
    else:
        executor = Sequential(parts[0], dp_size=mesh.dp_size)
    if config.moe_row_policy == "budget" and any_rank(bool(budgets_of(parts))):
        executor = WithinBudget(executor, parts, device)
    said = _of_all_stages(notes, mesh)
    if config.moe_rebalance_interval and mesh.ep_size == 1:
        said.append("--moe-rebalance-interval: nothing to share out, all ranks hold all experts")
    if config.compile and device.type != "cuda":
        said.append("--compile: no effect without a GPU")
    if config.optimizer_cpu_offload and device.type != "cuda":
        said.append("--optimizer-cpu-offload: no effect without a GPU")
    if config.offloads is not None and offload is None:
        said.append(f"{config.offloads}: no effect without a GPU")
    return Assembled(parts, executor, total, copies, said, working_copies)


def _initialized(
    task: Task, config: TrainConfig, device: torch.device, compute_dtype: torch.dtype
) -> Any:
    """As `Task.build_model`, drawn from the seed, or begun from a BERT by `--bert-load`."""
    torch.manual_seed(config.seed)
    with device:
        model = task.build_model(compute_dtype=compute_dtype)
        if config.bert_load is not None and isinstance(model, (ICT, Classifier)):
            # Here: few runs wait for these readers.
            from mb_train.convert.from_bert import begin_from_bert

            begin_from_bert(model, config.bert_load)
    return model


def _pipeline(
    parts: list[nn.Module],
    borders: Borders,
    config: TrainConfig,
    mesh: ParallelMesh,
    compute_dtype: torch.dtype,
) -> Pipeline:
    return Pipeline(
        parts,
        mesh,
        schedule=config.schedule_in_force,
        first_input=FIRST_INPUT,
        hidden_size=whole(config.hidden_size),
        dtype=torch.float32 if config.fp32_residual_connection else compute_dtype,
        sequence_parallel=config.sequence_parallel,
        streams=borders.streams,
        tied=borders.tied,
    )


def _of_all_stages(notes: dict[int, list[str]], mesh: ParallelMesh) -> list[str]:
    """The notes of all ranks' stages, those that are alike as one."""
    axis = mesh.axis("pp")
    if axis is None:
        return notes[0]
    ranks = of_all_ranks(notes, axis.get_group())
    by_stage = {stage: told for of_rank in ranks for stage, told in of_rank.items()}
    stages: dict[str, list[str]] = {}
    for stage, told in sorted(by_stage.items()):
        for note in told:
            stages.setdefault(note, []).append(str(stage))
    return [
        f"stage{'s' if len(alike) > 1 else ''} {', '.join(alike)}: {note}"
        for note, alike in stages.items()
    ]


def _spread(
    model: nn.Module,
    task: Task,
    config: TrainConfig,
    mesh: ParallelMesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    offload: Offload | None,
) -> list[str]:
    """Share `model` out in place; returns what was decided."""
    if mesh.tp_size > 1:
        parallelize_tensors(
            model, mesh, task.tensor_plan(), sequence_parallel=config.sequence_parallel
        )
    notes = []
    if config.moe_num_experts is not None:
        chosen = parallelize_experts(
            model,
            mesh,
            dispatcher=dispatcher_of(config, mesh.ep_size),
            sequence_parallel=config.sequence_parallel,
            equal_tokens=True,
            chunks=config.moe_a2a_overlap_degree,
            row_policy=config.moe_row_policy,
            row_budget=config.moe_row_budget,
            timeout_s=60 * config.distributed_timeout_minutes,
        )
        notes.append(chosen)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    kinds = task.workload.passes[0].blocks
    if kinds.delta is not None:
        notes.append(delta_note(kinds.delta.key, device))
    if kinds.mamba is not None:
        notes.append(scan_note(kinds.mamba, device, compute_dtype))
    _recompute(blocks, config)
    if mesh.cp_size > 1:
        assert isinstance(model, GPT)
        parallelize_context(_cores(blocks), mesh)
        model.parts = mesh.cp_size
    if config.compile and device.type == "cuda":
        compile_blocks(blocks, config, tp_size=mesh.tp_size)
    if offload is not None:
        keep_on_host(blocks, config, offload)
    apply_data_parallel(
        model,
        mesh,
        blocks=blocks,
        compute_dtype=compute_dtype,
        keep_fp32=[m for m in model.modules() if isinstance(m, Router | DeltaGates | MambaGates)],
        in_training=_in_training(model),
        zero_stage=config.zero_stage,
        cast_inputs=False,  # the models cast what they compute with, and only that
    )
    return notes


def _in_training(model: nn.Module) -> list[nn.Module]:
    """What evaluation does without."""
    return list(model.mtp.modules()) if isinstance(model, GPT) else []


def dispatcher_of(config: TrainConfig, ep: int) -> str:
    """The dispatcher to ask for; of a schedule in halves `parallelize_experts` knows nothing."""
    if config.moe_dispatcher == "auto" and SCHEDULES[config.schedule_in_force].in_halves:
        return choose_dispatcher("auto", config.moe_top_k, ep, "not for a pass in halves")[0]
    return config.moe_dispatcher


def compile_blocks(blocks: Iterable[Block], config: TrainConfig, *, tp_size: int) -> None:
    """Let each block be compiled when it first runs.

    Raises:
        ValueError: this torch's compiler cannot, beside another flag of the run.
    """
    release = torch_release()
    # It saves the mesh of DTensors among the tensors (mb-parallel's test_tensor_parallel.py); those
    # of 2.11, 2.14 and 2.15 do not.
    if release == (2, 13) and tp_size > 1 and config.recompute_granularity is not None:
        raise ValueError(
            "Expected --compile or --recompute-granularity, not both, with "
            f"--tensor-model-parallel-size={tp_size}: the compiler of torch {torch.__version__} "
            "cannot compute shards again. Leave one out, or take torch 2.14."
        )
    # Tried: with experts gradients of 2.11 were wrong without an error, those of 2.13 right.
    if release < (2, 13) and "zero-bubble" in config.schedule_in_force:
        raise ValueError(
            f"Expected --pipeline-schedule without zero-bubble with --compile on torch "
            f"{torch.__version__}, which splits compiled backward passes wrongly, got "
            f"{config.schedule_in_force}. Take interleaved-1f1b, leave --compile out, or take "
            "torch 2.13."
        )
    for block in blocks:
        block.compile()


def _cores(blocks: list[Block]) -> list[nn.Module]:
    """The modules in which tokens meet."""
    kinds = CoreAttention | StateCore
    return [m for block in blocks for m in block.modules() if isinstance(m, kinds)]


def _recompute(blocks: list[Block], config: TrainConfig) -> None:
    """Megatron's choices; of "uniform" chunks each layer keeps its own input."""
    if config.recompute_granularity == "selective":
        apply_recompute(_cores(blocks), "full")
    elif config.recompute_granularity == "full":
        first = config.recompute_num_layers if config.recompute_method == "block" else len(blocks)
        apply_recompute(blocks[:first], "full")
