"""The parameters of experts as DTensors over the ep axis, each rank keeping its part.

Names and global shapes, [E, F, D], stay the same, so that checkpoints load on any number of ranks.

Letters: E experts, F expert ffn width, D hidden, s ranks per expert.
"""

from __future__ import annotations

from collections.abc import Iterable

from mb_layers.experts import Experts
from mb_layers.frozen import FrozenWeight
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mb_parallel.engines import is_dtensor
from mb_parallel.expert_parallel.collectives import Place
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.expert_parallel.width import WidthShardedExperts
from mb_parallel.mesh import ParallelMesh, keep_timeout
from mb_parallel.shards import part_of
from mb_parallel.world import of_all_ranks


def is_spread(experts: Experts) -> bool:
    """Whether a parameter is a DTensor already."""
    return any(is_dtensor(weight) for weight in experts.parameters())


def experts_meshes(mesh: ParallelMesh, numbers: Iterable[int]) -> dict[int, DeviceMesh]:
    """The mesh for layers of each number of experts, by that number; every rank calls it.

    This is the ep axis or, if there are more ranks than experts, a mesh (experts, width). That
    needs new groups, which all ranks have to make in the same order. So the pipeline's stages tell
    each other what their layers need, also those without layers. There is none where ep = 1.
    """
    ep, pp = mesh.axis("ep"), mesh.axis("pp")
    if ep is None:
        return {}
    here = set(numbers)
    everywhere = here if pp is None else set().union(*of_all_ranks(here, pp.get_group()))
    found = {}
    for number in sorted(everywhere):
        found[number] = ep
        shards = Placement(number, ep.size(), ep.get_local_rank()).width_shards
        if shards > 1:
            found[number] = ep._unflatten(0, (number, shards), ("ep_expert", "ep_width"))
            keep_timeout(found[number].get_all_groups())
    return found


def check_splits(experts: Experts, placement: Placement, name: str) -> None:
    """Raise ValueError if `shard_experts` cannot split such experts.

    s has to divide F (or D, with biases), for sparse products into multiples of 128, and weights
    have to be of a form that is split.
    """
    shards = placement.width_shards
    adapted = len(list(experts.modules())) > 1
    frozen = any(isinstance(w, FrozenWeight) for w in experts.parameters())
    if frozen or (adapted and shards > 1):
        held = "weights frozen in bits" if frozen else "adapters where ranks share an expert"
        raise ValueError(
            f"Expected plain experts in {name} to spread over {placement.ranks} ranks, got {held}. "
            "Lower ep, or merge_lora first."
        )
    config = experts.config
    if config.ffn_hidden_size % shards or (config.mlp_bias and config.hidden_size % shards):
        raise ValueError(
            f"Expected the {shards} ranks that share an expert of {name} to divide its width, got "
            f"ffn_hidden_size = {config.ffn_hidden_size}, hidden_size = {config.hidden_size}. "
            "Lower ep or change the width."
        )
    if config.mlp_impl == "sparse" and config.ffn_hidden_size // shards % 128:
        raise ValueError(
            f"Expected parts in multiples of 128 for mlp_impl='sparse' where {shards} ranks share "
            f"an expert of {name}, got ffn_hidden_size = {config.ffn_hidden_size}. Lower ep, or "
            "pass mlp_impl='grouped'."
        )


def shard_experts(
    experts: Experts,
    mesh: DeviceMesh,
    placement: Placement,
    name: str,
    spread: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Keep this rank's part of each parameter, as a DTensor of the global shape over `mesh`.

    Experts, and adapters on them, are split along E or, if there are more ranks than experts, along
    E and F (b2: along E and D).

    Args:
        mesh: from `experts_meshes`.
        spread: the new parameters by the old ones, added to. A parameter that is in it, since an
            earlier module shares it, is replaced by the same new one.
    """
    shared = placement.width_shards > 1
    if shared:
        experts.__class__ = WidthShardedExperts  # as FSDP2 does: same parameters, other `forward`
        assert isinstance(experts, WidthShardedExperts)
        experts.width = Place(mesh["ep_width"].get_group(), name)
    for module in list(experts.modules()):
        for weight_name, weight in list(module.named_parameters(recurse=False)):
            if weight not in spread:
                width_dim = 2 if weight_name == "w2" else 1
                spread[weight] = part_of(weight, mesh, [0, width_dim] if shared else [0])
            module.register_parameter(weight_name, spread[weight])
