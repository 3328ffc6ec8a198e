"""Pipeline parallelism: stages, schedules by name, tied parameters, losses and metrics."""

from mb_parallel.pipeline_parallel.pipeline import Pipeline as Pipeline
from mb_parallel.pipeline_parallel.placement import SCHEDULES as SCHEDULES
from mb_parallel.pipeline_parallel.placement import check_micro_batches as check_micro_batches
from mb_parallel.pipeline_parallel.placement import passes_kept as passes_kept
from mb_parallel.pipeline_parallel.placement import split_layers as split_layers
from mb_parallel.pipeline_parallel.placement import stage_indices as stage_indices
from mb_parallel.pipeline_parallel.placement import waiting_share as waiting_share
from mb_parallel.pipeline_parallel.stage import StageOutput as StageOutput
