"""Optimizers over sharded state, one gradient norm over all meshes, and the fp16 loss scale.

    step = clip_and_step(optimizer, max_norm=1.0, mesh=mesh)    # step.grad_norm, step.skipped

Every optimizer here, and torch's fused ones, takes a divisor for its gradients and a flag to skip
the step from the device (`grad_scale` and `found_inf`, torch's names). So clipping, loss scale and
the skip of a step with NaN or infinity need neither a pass over the gradients nor the host.
"""

from mb_parallel.optimizer.adafactor import Adafactor as Adafactor
from mb_parallel.optimizer.adamw import AdamW as AdamW
from mb_parallel.optimizer.groups import decay_groups as decay_groups
from mb_parallel.optimizer.groups import muon_groups as muon_groups
from mb_parallel.optimizer.muon import Muon as Muon
from mb_parallel.optimizer.norm import StepResult as StepResult
from mb_parallel.optimizer.norm import clip_and_step as clip_and_step
from mb_parallel.optimizer.norm import clip_grad_norm as clip_grad_norm
from mb_parallel.optimizer.norm import grad_norm as grad_norm
from mb_parallel.optimizer.norm import weight_norm as weight_norm
from mb_parallel.optimizer.norm import zeros_in_grad as zeros_in_grad
from mb_parallel.optimizer.rehearsal import rehearse_accumulation as rehearse_accumulation
from mb_parallel.optimizer.rehearsal import rehearse_step as rehearse_step
from mb_parallel.optimizer.scaler import GradScaler as GradScaler
from mb_parallel.optimizer.sgd import SGD as SGD
from mb_parallel.optimizer.sharded import ShardedOptimizer as ShardedOptimizer
from mb_parallel.optimizer.sharded import describe as describe
from mb_parallel.optimizer.working_copies import WorkingCopies as WorkingCopies
from mb_parallel.optimizer.working_copies import hold_working_copies as hold_working_copies
from mb_parallel.shards import local as local
