"""The scan of Mamba-2, forward and backward."""

from mb_kernels.state_space.op import has_state_space_kernels as has_state_space_kernels
from mb_kernels.state_space.op import state_space_scan as state_space_scan
