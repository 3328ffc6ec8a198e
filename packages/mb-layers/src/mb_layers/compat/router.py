"""Stands in for `megablocks.layers.router`, as far as the z-loss goes."""

from mb_layers.compat.moe import batched_router_zloss as batched_router_zloss
from mb_layers.compat.moe import clear_router_zloss as clear_router_zloss
