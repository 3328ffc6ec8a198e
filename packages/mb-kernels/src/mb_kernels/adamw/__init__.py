"""AdamW over many tensors in one pass: clip, update and the copy in compute dtype together."""

from mb_kernels.adamw.op import adamw_step as adamw_step
