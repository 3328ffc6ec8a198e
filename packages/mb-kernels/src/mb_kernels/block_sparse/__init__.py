"""Products of block-sparse and dense matrices, and the expert MLP made of them."""

from mb_kernels.block_sparse.mlp import pad_bins as pad_bins
from mb_kernels.block_sparse.mlp import sparse_expert_mlp as sparse_expert_mlp
from mb_kernels.block_sparse.mlp import topology as topology
from mb_kernels.block_sparse.op import BLOCK as BLOCK
from mb_kernels.block_sparse.op import dds as dds
from mb_kernels.block_sparse.op import dsd as dsd
from mb_kernels.block_sparse.op import sdd as sdd
