"""How the ranks of a run are divided."""

from __future__ import annotations

from mb_parallel import ParallelDims
from mb_parallel.expert_parallel import Placement
from mb_parallel.pipeline_parallel import check_micro_batches, split_layers

from mb_train.config import TrainConfig
from mb_train.config.field import in_flags

# The field behind each size that mb_parallel names.
FIELDS = {
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp_replicate": "data_parallel_replicas",
}
# And behind what else it names of a model that it refuses.
NAMED = FIELDS | {
    "sequence_parallel": "sequence_parallel",
    "zero_stage": "zero_stage",
    "num_experts": "moe_num_experts",
    "balance_over": "moe_balance_over",
    "mlp_impl": "moe_mlp_impl",
}


def parallel_dims(config: TrainConfig, ranks: int) -> ParallelDims:
    """How a run is spread over `ranks` ranks.

    Raises:
        ValueError: sizes that do not divide it, or experts that they do not divide; or a
            retriever's rank would be alone with one block at a time, whose softmax is 1 whatever it
            learns.
    """
    sizes = {name: getattr(config, field) for name, field in FIELDS.items()}
    with in_flags(NAMED):
        dims = ParallelDims.for_world(ranks, **sizes | {"ep": config.expert_parallel_size(ranks)})
        if config.moe_num_experts is not None:
            Placement(config.moe_num_experts, dims.ep, rank=0)  # or refuse
    if config.blocks_at_once == dims.data == 1:
        raise ValueError(
            "Expected --micro-batch-size of at least 2 with --model ict on one data-parallel rank, "
            "got 1: there is no other block to tell a query's own from. Raise it."
        )
    return dims


def stage_layers(config: TrainConfig, layers: int, pp: int) -> list[range]:
    """The layers of each stage of a pipeline over `pp` ranks, of which each may have several.

    Raises:
        ValueError: a stage would be without layers.
    """
    return split_layers(layers, pp * config.chunks_of_a_rank(layers))


def check_schedule(config: TrainConfig, micro_batches: list[int]) -> None:
    """Raise ValueError if a pipeline cannot run steps of so many micro-batches."""
    with in_flags(FIELDS):
        for number in micro_batches:
            check_micro_batches(
                config.schedule_in_force, number, pp_size=config.pipeline_model_parallel_size
            )
