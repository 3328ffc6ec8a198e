"""What Muon does to each number before and after it orthogonalises matrices."""

from mb_kernels.muon.op import muon_momentum as muon_momentum
from mb_kernels.muon.op import muon_step as muon_step
