"""Fields that spread a run over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mb_train.config.field import ABOVE_1, AT_LEAST_0, AT_LEAST_1, POSITIVE, flag, flag_name
from mb_train.words import counted


def chunks_of_a_stage(layers: int, stages: int, most: int) -> int:
    """The fewest chunks of at most so many layers, equally many for each stage of a pipeline."""
    return math.ceil(layers / (stages * most))


@dataclass(frozen=True, kw_only=True)
class ParallelFields:
    """How the model and its batches are spread over the ranks."""

    tensor_model_parallel_size: int = flag(
        "ranks that share each layer's matrices",
        1,
        bounds=POSITIVE,
        also=("--model-parallel-size",),
    )
    sequence_parallel: bool = flag(
        "those ranks share the sequence between the matrices as well", False,
        needs=("tensor_model_parallel_size", ABOVE_1),
    )  # fmt: skip
    context_parallel_size: int = flag(
        "ranks that share each sequence, a successive part each, for --model gpt", 1,
        bounds=POSITIVE,
    )  # fmt: skip
    pipeline_model_parallel_size: int = flag("stages of the pipeline", 1, bounds=POSITIVE)
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "layers of one chunk at most, where a stage holds several; 0: it holds one",
        bounds=AT_LEAST_0,
    )
    pipeline_schedule: str = flag(
        "order of the micro-batches in a pipeline; all but gpipe and 1f1b need "
        "--num-layers-per-virtual-pipeline-stage, with which 1f1b is interleaved (ours)", "1f1b",
        choices=(
            "gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble",
        ),
        needs=("pipeline_model_parallel_size", ABOVE_1),
    )  # fmt: skip
    expert_model_parallel_size: int = flag(
        "ranks that share the experts of a layer",
        1,
        bounds=POSITIVE,
        instead_of=("moe_expert_model_parallelism",),
    )
    moe_expert_model_parallelism: bool = flag(
        "all data- and context-parallel ranks share the experts of a layer", False,
        also=("--expert-model-parallelism",), instead_of=("expert_model_parallel_size",),
    )  # fmt: skip
    moe_dispatcher: str = flag(
        "how tokens reach experts of other ranks; fixed: with a capacity of each rank's own, in as "
        "many rows whatever the routing (ours)", "auto",
        choices=("auto", "all_gather", "all_to_all", "peer", "fixed"),
    )  # fmt: skip
    moe_rebalance_interval: int = flag(
        "steps after which experts are shared out anew over the ranks, by the load of the last; 0: "
        "never (ours)", 0, bounds=AT_LEAST_0,
    )  # fmt: skip
    moe_row_policy: str = flag(
        "what experts save room for, where shapes are static (all_gather, peer): the worst case, "
        "a budget, with a second run of the step for more and more room after it, or what the host "
        "reads (ours)",
        "worst", choices=("worst", "budget", "exact"),
        needs=("moe_dispatcher", "auto", "all_gather", "peer"),
    )  # fmt: skip
    moe_row_budget: float = flag(
        "least room for rows of an expert-parallel rank, over the even share, for the policy "
        "budget (ours)", 2.0, bounds=AT_LEAST_1, needs=("moe_row_policy", "budget"),
    )  # fmt: skip
    moe_a2a_overlap_degree: int = flag(
        "for all_to_all: chunks of a rank's tokens, of which one is exchanged while the experts "
        "compute on another (ours)", 1, bounds=POSITIVE,
        # peer falls back to all_to_all.
        needs=("moe_dispatcher", "auto", "all_to_all", "peer"),
    )  # fmt: skip
    distributed_timeout_minutes: float = flag(
        "how long a rank waits for the others before it ends with an error", 10.0, bounds=POSITIVE,
        on_load="own",
    )  # fmt: skip
    data_parallel_replicas: int = flag(
        "replicas of the model, each sharded over its own ranks (ours)", 1, bounds=POSITIVE,
        also=("--num-distributed-optimizer-instances",),
    )  # fmt: skip
    zero_stage: int = flag(
        "data-parallel ranks share nothing (0), the optimizer's state (1), gradients between "
        "micro-batches as well (2), weights as well (3): 0 and 1 reduce once a step, the others at "
        "every micro-batch (ours)", 1, choices=(0, 1, 2, 3),
    )  # fmt: skip

    @property
    def schedule_in_force(self) -> str:
        """The pipeline's schedule; 1f1b over several chunks a rank is interleaved."""
        chunks = self.layers_of_a_chunk is not None
        return (
            "interleaved-1f1b"
            if chunks and self.pipeline_schedule == "1f1b"
            else self.pipeline_schedule
        )

    @property
    def layers_of_a_chunk(self) -> int | None:
        """Layers of each of a rank's chunks of the pipeline, at most; None where it has one."""
        return self.num_layers_per_virtual_pipeline_stage or None

    def chunks_of_a_rank(self, layers: int) -> int:
        """Chunks of a pipeline of so many layers that each rank has."""
        stages, most = self.pipeline_model_parallel_size, self.layers_of_a_chunk
        return 1 if most is None else chunks_of_a_stage(layers, stages, most)

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that train on different sequences; of those that share them, one counts.

        Raises:
            ValueError: tensor x pipeline x context parallel sizes do not divide the world.
        """
        names = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
        names += ["context_parallel_size"] if self.context_parallel_size > 1 else []
        sizes = [getattr(self, name) for name in names]
        together = math.prod(sizes)
        if world_size % together:
            raise ValueError(
                f"Expected {' x '.join(map(flag_name, names))} = {' x '.join(map(str, sizes))} to "
                f"divide the {counted(world_size, 'rank')}. Start a multiple of {together}, or "
                "lower one."
            )
        return world_size // together

    def expert_parallel_size(self, world_size: int) -> int:
        """Ranks that share the experts of a layer, of `world_size` in all."""
        if self.moe_expert_model_parallelism:
            return self.data_parallel_size(world_size) * self.context_parallel_size
        return self.expert_model_parallel_size

    def check_parallel(self, layers: int, flags: str) -> None:
        """Raise ValueError for a way of spreading that contradicts itself.

        Args:
            layers: of the whole model, which a pipeline cuts.
            flags: that say how many, for the message.
        """
        if self.moe_expert_model_parallelism and self.expert_model_parallel_size > 1:
            raise ValueError(
                "Expected one of --moe-expert-model-parallelism (all data-parallel ranks) and "
                f"--expert-model-parallel-size, got both ({self.expert_model_parallel_size})."
            )
        chunk, stages = self.layers_of_a_chunk, self.pipeline_model_parallel_size
        if stages > layers:
            raise ValueError(
                f"Expected --pipeline-model-parallel-size of at most {flags} {layers}, "
                f"got {stages}."
            )
        if stages > 1 and self.zero_stage == 0:
            raise ValueError(
                f"Expected --zero-stage 1, 2 or 3 with --pipeline-model-parallel-size {stages}, "
                "whose schedules run several backward passes a step, got 0."
            )
        chunks = self.chunks_of_a_rank(layers)
        if chunk is not None and (stages < 2 or layers < stages * chunks):
            raise ValueError(
                "Expected at least 2 stages with --num-layers-per-virtual-pipeline-stage, and a "
                f"layer of {flags} for each of their chunks, got {stages} stages, {layers} layers "
                f"and {chunk} for a chunk. 0 is for one chunk a stage."
            )
        if self.pipeline_schedule not in ("gpipe", "1f1b") and chunk is None:
            raise ValueError(
                "Expected --num-layers-per-virtual-pipeline-stage with --pipeline-schedule "
                f"{self.pipeline_schedule}, got none. Without it there are 1f1b and gpipe."
            )
        if self.pipeline_schedule == "zbv-zero-bubble" and chunks != 2:
            raise ValueError(
                "Expected two chunks a stage with --pipeline-schedule zbv-zero-bubble, got "
                f"{chunks}, as --num-layers-per-virtual-pipeline-stage {chunk} makes of {layers} "
                f"layers in {stages} stages. Take half of a stage's layers."
            )
