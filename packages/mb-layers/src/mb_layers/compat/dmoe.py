"""Stands in for `megablocks.layers.dmoe`."""

from mb_layers.compat.moe import dMoE as dMoE
