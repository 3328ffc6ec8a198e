"""For people who come from MegaBlocks.

    layer = layer_from_arguments(Arguments(hidden_size=1024, ...))   # or a dict, or a namespace
    layer.load_state_dict(from_megablocks(checkpoint, layer.config))

`mb_layers.compat.dmoe`, `.moe`, `.router` and `.arguments` stand in for the modules of these names
in `megablocks.layers`: the same calls, parameter names and returns, losses collected in a list as
there. `mb_layers.compat.ops` stands in for `megablocks.ops`, for layers of people's own.
"""

from mb_layers.compat.arguments import FIELDS as FIELDS
from mb_layers.compat.arguments import Arguments as Arguments
from mb_layers.compat.arguments import config_from_arguments as config_from_arguments
from mb_layers.compat.arguments import from_megatron as from_megatron
from mb_layers.compat.arguments import layer_from_arguments as layer_from_arguments
from mb_layers.compat.checkpoints import from_megablocks as from_megablocks
from mb_layers.compat.checkpoints import to_megablocks as to_megablocks
from mb_layers.compat.moe import MoE as MoE
from mb_layers.compat.moe import dMoE as dMoE
from mb_layers.compat.moe import get_load_balancing_loss as get_load_balancing_loss
