"""Tensor and sequence parallelism: plans of styles, applied to a model from outside."""

from mb_parallel.tensor_parallel.apply import Plan as Plan
from mb_parallel.tensor_parallel.apply import parallelize_tensors as parallelize_tensors
from mb_parallel.tensor_parallel.experts import ExpertLayer as ExpertLayer
from mb_parallel.tensor_parallel.plans import block_plan as block_plan
from mb_parallel.tensor_parallel.plans import convolution_plan as convolution_plan
from mb_parallel.tensor_parallel.plans import delta_plan as delta_plan
from mb_parallel.tensor_parallel.plans import embedding_plan as embedding_plan
from mb_parallel.tensor_parallel.plans import mamba_plan as mamba_plan
from mb_parallel.tensor_parallel.split_norm import SplitNorm as SplitNorm
from mb_parallel.tensor_parallel.styles import ColumnParallel as ColumnParallel
from mb_parallel.tensor_parallel.styles import DistinctRandom as DistinctRandom
from mb_parallel.tensor_parallel.styles import JoinOutput as JoinOutput
from mb_parallel.tensor_parallel.styles import ParallelInput as ParallelInput
from mb_parallel.tensor_parallel.styles import PartialGradients as PartialGradients
from mb_parallel.tensor_parallel.styles import Region as Region
from mb_parallel.tensor_parallel.styles import Replicated as Replicated
from mb_parallel.tensor_parallel.styles import RowParallel as RowParallel
from mb_parallel.tensor_parallel.styles import SequenceParallel as SequenceParallel
from mb_parallel.tensor_parallel.styles import Sharded as Sharded
from mb_parallel.tensor_parallel.styles import SplitSequence as SplitSequence
from mb_parallel.tensor_parallel.styles import Style as Style
from mb_parallel.tensor_parallel.styles import UnitInCommon as UnitInCommon
from mb_parallel.tensor_parallel.vocabulary import (
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from mb_parallel.tensor_parallel.vocabulary import VocabParallelLoss as VocabParallelLoss
