"""The whole expert computation, gather to combine, as one differentiable op."""

from mb_kernels.expert_mlp.grouped import grouped_experts as grouped_experts
from mb_kernels.expert_mlp.op import expert_mlp as expert_mlp
