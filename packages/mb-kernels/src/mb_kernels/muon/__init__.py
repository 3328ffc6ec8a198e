"""Muon's element-wise work before and after its orthogonalisation."""

from mb_kernels.muon.op import muon_momentum as muon_momentum
from mb_kernels.muon.op import muon_step as muon_step
