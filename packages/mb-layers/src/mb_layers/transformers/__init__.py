"""Hugging Face transformers on our kernels. Needs `pip install mb-layers[transformers]`.

Importing this package registers the implementation "mb" in transformers' `ExpertsInterface`, and
`use` moves a model's experts onto it:

    import mb_layers.transformers as mb
    mb.use(model)

From then on the experts of any MoE model that transformers stacks run through `mb_kernels`, forward
and backward; routers, losses and checkpoints stay transformers' own.

To train with this library's router, losses and metrics instead, `moe_from_block` turns a block into
a `dMoE` with the same weights, and `swap_blocks` does so for a whole model, whose checkpoints stay
transformers' own; `restore_blocks` is the way back.
"""

from mb_layers.transformers.adapters import adapters_by_expert as adapters_by_expert
from mb_layers.transformers.adapters import save_adapters as save_adapters
from mb_layers.transformers.block_adapter import BlockAdapter as BlockAdapter
from mb_layers.transformers.blocks import config_from_block as config_from_block
from mb_layers.transformers.blocks import moe_from_block as moe_from_block
from mb_layers.transformers.blocks import translate_block as translate_block
from mb_layers.transformers.blocks import translate_layer as translate_layer
from mb_layers.transformers.experts import IMPLEMENTATION as IMPLEMENTATION
from mb_layers.transformers.experts import experts_forward as experts_forward
from mb_layers.transformers.swap import restore_blocks as restore_blocks
from mb_layers.transformers.swap import swap_blocks as swap_blocks
from mb_layers.transformers.use import use as use
