"""Expert parallelism: experts spread over ranks, tokens brought to them and back."""

# Public API
from mb_parallel.expert_parallel.all_gather import AllGatherDispatcher as AllGatherDispatcher
from mb_parallel.expert_parallel.all_to_all import AllToAllDispatcher as AllToAllDispatcher
from mb_parallel.expert_parallel.apply import choose_dispatcher as choose_dispatcher
from mb_parallel.expert_parallel.apply import parallelize_experts as parallelize_experts
from mb_parallel.expert_parallel.collectives import Place as Place
from mb_parallel.expert_parallel.collectives import gather_rows as gather_rows
from mb_parallel.expert_parallel.counts import set_micro_batch as set_micro_batch
from mb_parallel.expert_parallel.counts import step_counts as step_counts
from mb_parallel.expert_parallel.fixed import FixedDispatcher as FixedDispatcher
from mb_parallel.expert_parallel.global_capacity import GlobalCapacity as GlobalCapacity
from mb_parallel.expert_parallel.peer import PeerDispatcher as PeerDispatcher
from mb_parallel.expert_parallel.peer_memory import PeerBuffers as PeerBuffers
from mb_parallel.expert_parallel.placement import Placement as Placement
from mb_parallel.expert_parallel.rebalance import Rebalanced as Rebalanced
from mb_parallel.expert_parallel.rebalance import balanced_order as balanced_order
from mb_parallel.expert_parallel.rebalance import fullest_rank as fullest_rank
from mb_parallel.expert_parallel.rebalance import rebalance_experts as rebalance_experts
from mb_parallel.expert_parallel.rows import Rows as Rows
from mb_parallel.expert_parallel.rows import budgets_of as budgets_of
from mb_parallel.expert_parallel.rows import within_budget as within_budget
