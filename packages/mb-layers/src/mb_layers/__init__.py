"""MoE and dMoE layers for any PyTorch model.

    layer = dMoE(MoEConfig(hidden_size=64, ffn_hidden_size=128, num_experts=8, top_k=2))
    y, aux_loss, metrics = layer(x)    # x: [..., 64]; add aux_loss to the loss

- Layers: `MoEConfig`, `dMoE`, `MoE`, `MoEOutput`; their parts `Router`, `RouterOutput`, `Experts`.
- Other routers: `ExpertChoiceRouter`, `SinkhornRouter`, `NoisyTopKRouter`, `SparseMixerRouter`.
- Losses: `load_balancing_loss`, `sequence_load_balancing_loss`, `z_loss`, `attach_aux_loss`.
- Balancing by bias: `update_balancing_bias`, `update_balancing_biases`.
- A whole model: `collect`, `Collected`, `AsMLP`.
- Routing again: `record_routing`, `replay_routing`, `RecordedRouting`.
- Adapters: `add_lora`, `merge_lora`, `freeze_in_bits`, `FrozenWeight`.
- For libraries of parallelism: `TokenDispatcher`, `LocalDispatcher`, `Dispatched`, `capacity`.
- Compiling ahead: `warm_up`.

`mb_layers.compat` is for people who come from MegaBlocks, `mb_layers.transformers` for models of
Hugging Face. `help(mb_layers.MoEConfig)` has every setting.
"""

import types as _types

from mb_layers.config import MoEConfig as MoEConfig
from mb_layers.dispatch import Dispatched as Dispatched
from mb_layers.dispatch import LocalDispatcher as LocalDispatcher
from mb_layers.dispatch import TokenDispatcher as TokenDispatcher
from mb_layers.dispatch import capacity as capacity
from mb_layers.experts import Experts as Experts
from mb_layers.factored import add_lora as add_lora
from mb_layers.factored import merge_lora as merge_lora
from mb_layers.frozen import FrozenWeight as FrozenWeight
from mb_layers.frozen import freeze_in_bits as freeze_in_bits
from mb_layers.losses import attach_aux_loss as attach_aux_loss
from mb_layers.losses import load_balancing_loss as load_balancing_loss
from mb_layers.losses import sequence_load_balancing_loss as sequence_load_balancing_loss
from mb_layers.losses import z_loss as z_loss
from mb_layers.model import AsMLP as AsMLP
from mb_layers.model import Collected as Collected
from mb_layers.model import collect as collect
from mb_layers.model import update_balancing_biases as update_balancing_biases
from mb_layers.moe import MoE as MoE
from mb_layers.moe import MoEOutput as MoEOutput
from mb_layers.moe import dMoE as dMoE
from mb_layers.replay import RecordedRouting as RecordedRouting
from mb_layers.replay import record_routing as record_routing
from mb_layers.replay import replay_routing as replay_routing
from mb_layers.router import Router as Router
from mb_layers.router import RouterOutput as RouterOutput
from mb_layers.router import update_balancing_bias as update_balancing_bias
from mb_layers.routers import ExpertChoiceRouter as ExpertChoiceRouter
from mb_layers.routers import NoisyTopKRouter as NoisyTopKRouter
from mb_layers.routers import SinkhornRouter as SinkhornRouter
from mb_layers.routers import SparseMixerRouter as SparseMixerRouter
from mb_layers.warm_up import warm_up as warm_up

__version__ = "0.1.0"
# Without modules: `import *` would put one of ours in the place of the real `transformers`.
__all__ = [n for n, v in globals().items() if n[0] != "_" and not isinstance(v, _types.ModuleType)]
