"""Router logits to routing weights, and routed slots to bins by expert."""

from mb_kernels.routing.op import Bins as Bins
from mb_kernels.routing.op import bin_tokens as bin_tokens
from mb_kernels.routing.op import topk_ids as topk_ids
from mb_kernels.routing.op import topk_softmax as topk_softmax
