"""`parallelize_experts`: expert parallelism put into a model from outside, by one call.

Every `Experts` module keeps its name and its global shapes: its parameters become DTensors
[E, F, D] sharded over the ep axis, so a checkpoint written by any number of ranks loads on any.
Every layer that owns one gets a dispatcher, which moves the rows. The rule that chooses it is short
enough to print.

Letters: E experts, F expert ffn width, D hidden, K top-k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mb_layers import Experts
from mb_layers.config import MoEConfig
from mb_layers.dispatch import LocalDispatcher, TokenDispatcher
from mb_layers.moe import MoELayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mb_parallel.arguments import above_0, at_least_1, one_module, one_of, unwrapped
from mb_parallel.expert_parallel.all_gather import AllGatherDispatcher
from mb_parallel.expert_parallel.all_to_all import AllToAllDispatcher
from mb_parallel.expert_parallel.collectives import Place
from mb_parallel.expert_parallel.fixed import FixedDispatcher
from mb_parallel.expert_parallel.overlap import compute_in_chunks
from mb_parallel.expert_parallel.peer import PeerDispatcher
from mb_parallel.expert_parallel.peer_memory import PeerBuffers, peer_problem
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.expert_parallel.rows import Rows
from mb_parallel.expert_parallel.shard import check_splits, experts_meshes, is_spread, shard_experts
from mb_parallel.expert_parallel.surround import is_surrounded, surround
from mb_parallel.gradient_sync import replacing
from mb_parallel.mesh import ParallelMesh, check_mesh, keep_sizes, refused_alike
from mb_parallel.tensor_parallel.experts import (
    check_sequence_parallel,
    kept_sequence_parallel,
)
from mb_parallel.world import check_same

DispatcherName = Literal["auto", "all_gather", "all_to_all", "peer", "fixed"]

# What tells the sizes of exchanges, of a layer's config.
_SIZES = (
    "num_experts", "experts_hidden_size", "ffn_hidden_size", "top_k", "capacity_factor",
    "eval_capacity_factor", "min_capacity", "drop_policy",
)  # fmt: skip

# "all_gather" and "peer" have room for the worst case, ep times the rows of balanced experts, in
# what the experts save too. Up to so many ranks that is a fair price.
_WORST_CASE_RANKS = 4


def parallelize_experts(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    dispatcher: str = "auto",
    sequence_parallel: bool | None = None,
    equal_tokens: bool = False,
    max_tokens: int | None = None,
    keep_rows: bool | None = None,
    chunks: int = 1,
    row_policy: str = "worst",
    row_budget: float = 2.0,
    timeout_s: float = 600.0,
) -> str:
    """Spread the experts of every `MoE` and `dMoE` in `model` over the ep axis, in place.

    Call it on every rank, also for pipeline stages without such layers, with equal parameters (same
    seed, or the meta device), after `parallelize_tensors` and before `apply_data_parallel`. An
    expert's gradient becomes the sum over the ranks of its ep group, and `apply_data_parallel` sums
    it over the copies of the expert. Layers that share experts, or some of their parameters, still
    do so afterwards.

    Args:
        model: any module that holds layers of mb_layers.
        mesh: from `ParallelDims.build`.
        dispatcher: what moves rows between ranks; "auto" chooses, see `choose_dispatcher`. "fixed"
            is only for `MoE`, and its capacity then counts each rank's own tokens.
        sequence_parallel: whether each tensor-parallel rank brings its own part of the sequence.
            False: they all bring the same tokens, and each sends a part of them. None: as
            `parallelize_tensors` was told; without it you have to say so. Unused where tp is 1.
        equal_tokens: promises that all ranks always bring equally many tokens to a layer. Then no
            counts are exchanged, and with "all_gather" and "fixed" the host never waits for the
            device.
        max_tokens: for "peer": the most tokens a rank ever brings to a layer. None: the most that
            any rank brings to the first one, and with `equal_tokens` more, if more come later.
        keep_rows: for "peer": keep received tokens for the backward instead of sending them again.
            None: only where the experts keep them anyway, with one choice of a token on a rank.
        chunks: for "all_to_all": cut a rank's tokens into so many parts, and exchange one while the
            experts compute on another. Worth it if the exchange takes as long as the products,
            since each part reads the experts' weights once more.
        row_policy: for "all_gather" and "peer", whose shapes are static: how many rows the experts
            have room for. "worst": whatever could come. "exact": what came, which the host reads
            once a layer. "budget": `row_budget` times the slots of balanced routing. A rank that
            gets more returns NaN, so that all ranks skip the optimizer step, and `within_budget`
            runs the step again, and makes more room for the next ones. Nothing is ever dropped.
        row_budget: for "budget" the least room, at least 1.
        timeout_s: for "peer": how long a kernel waits for another rank.

    Returns:
        What was chosen and why, to be printed. Where peers cannot write each other's memory,
        "peer" falls back to another dispatcher, and this says so.

    Raises:
        ValueError: an unknown dispatcher or policy, numbers out of range, sizes that do not divide,
            layers or arguments that differ between the ranks of ep, another `sequence_parallel`
            than that of `parallelize_tensors` or neither with tp > 1, a capacity with cp > 1 and
            tp > 1 but no sequence parallelism, a mesh of other sizes than in an earlier call, a
            layer that cannot be spread this way, "fixed" for a `dMoE`, or a model that is wrapped
            by DDP or FSDP already.
    """
    check_mesh(mesh, model)
    with refused_alike(mesh):
        one_of(get_args(DispatcherName), dispatcher=dispatcher)
        one_module(model)
        at_least_1(chunks=chunks, max_tokens=1 if max_tokens is None else max_tokens)
        above_0(timeout_s=timeout_s)
        rows = Rows(row_policy, row_budget)
    modules = model.named_modules()
    layers = {name or "the layer": m for name, m in modules if isinstance(m, MoELayer)}
    ep = mesh.axis("ep")
    with refused_alike(mesh):
        in_parts = {name: _in_parts(name, m, mesh, sequence_parallel) for name, m in layers.items()}
        if ep is not None:
            alike = _alike(
                layers, dispatcher=dispatcher, sequence_parallel=list(in_parts.values()),
                equal_tokens=equal_tokens, keep_rows=keep_rows, chunks=chunks,
                row_policy=row_policy, row_budget=row_budget,
            )  # fmt: skip
            check_same(alike, "what parallelize_experts is given", group=ep.get_group())
        for name, layer in layers.items():
            _refuse(name, layer, mesh, in_parts[name], dispatcher)
        if ep is not None:
            _refuse_held(model, layers, ep)
    meshes = experts_meshes(mesh, {layer.config.num_experts for layer in layers.values()})
    if not layers:
        return "expert parallelism: no MoE layers of mb_layers in the model, nothing to spread"
    told: Counter[str] = Counter()
    if ep is not None:
        everywhere = Place(ep.get_group(), "the model")
        problem = None
        if dispatcher in ("auto", "peer"):
            widths = sorted({layer.config.experts_hidden_size for layer in layers.values()})
            problem = peer_problem(everywhere, ep.device_type, widths)
        buffers = PeerBuffers(
            everywhere, max_tokens=max_tokens, equal_tokens=equal_tokens, timeout_s=timeout_s
        )
        spreading = _Spreading(ep, meshes, buffers, rows, keep_rows, equal_tokens, chunks)
        with replacing(model):
            for name, layer in layers.items():
                top_k = layer.config.top_k
                bounded = row_policy != "worst" or layer.config.capacity_factor is not None
                chosen, why = choose_dispatcher(
                    dispatcher, top_k, ep.size(), problem, bounded=bounded
                )
                held = spreading.spread(layer, name, chosen)
                pieces = f" in {chunks} chunks" if chunks > 1 and chosen == "all_to_all" else ""
                told[f"{held} by {chosen}{pieces}, {why}"] += 1
    for name, layer in layers.items():
        surround(layer, mesh, name, in_parts[name], equal_tokens)
    keep_sizes(mesh, model)
    if ep is None:
        return f"expert parallelism: ep = 1, all experts of {_layers(len(layers))} on every rank"
    lines = [f"{_layers(count)}: {line}" for line, count in told.items()]
    return f"expert parallelism over ep = {mesh.ep_size}: " + "; ".join(lines)


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def choose_dispatcher(
    wanted: str, top_k: int, ep: int, peer_problem: str | None, *, bounded: bool = False
) -> tuple[str, str]:
    """The dispatcher for top-k routing over `ep` ranks, and the reason in a few words.

    Stores into peers' memory are fastest where they are possible, while their worst-case shapes are
    affordable. Else, gathering sends a token to all ep - 1 other ranks; exchanging sends it to
    those it needs, at most top_k, for the price of a count exchange that the host waits for: from
    top_k = 2 ep on a token needs nearly every rank anyway.

    Args:
        wanted: what the user asked for.
        peer_problem: why peers cannot write each other's memory, or None.
        bounded: whether a `row_policy` other than "worst" or a capacity bounds the rows, so that
            the worst case costs nothing.
    """
    if wanted in ("all_gather", "all_to_all", "fixed"):
        return wanted, "as asked for"
    if wanted == "peer" and peer_problem is None:
        return "peer", "as asked for"
    if wanted == "auto" and peer_problem is None and (bounded or ep <= _WORST_CASE_RANKS):
        affordable = "rows are bounded" if bounded else f"ep <= {_WORST_CASE_RANKS}"
        return "peer", f"since the GPUs reach each other's memory and {affordable}"
    instead = f", not peer: {peer_problem}" if wanted == "peer" else ""
    if wanted == "auto" and peer_problem is None:
        most = f"with more than {_WORST_CASE_RANKS} ranks"
        instead = f'; peer wants bounded rows {most}: see the row policy "budget"'
    if top_k >= 2 * ep:
        why = f"since top_k = {top_k} >= 2 ep, a token needs nearly every rank"
        return "all_gather", why + instead
    return "all_to_all", f"since top_k = {top_k} < 2 ep, a token needs few of the ranks{instead}"


def _alike(layers: Mapping[str, MoELayer], **arguments: Any) -> dict[str, Any]:
    """What ranks that exchange tokens have in common; else they would wait for each other."""
    sizes = {
        f"{name}.{field}": getattr(layer.config, field)
        for name, layer in layers.items()
        for field in _SIZES
    }
    return {**arguments, "layers": list(layers), **sizes}


def _in_parts(name: str, layer: MoELayer, mesh: ParallelMesh, given: bool | None) -> bool:
    """Whether each tp rank brings tokens of its own to the layer."""
    if mesh.tp_size == 1:
        return False
    noted = kept_sequence_parallel(layer) if given is None else given
    if noted is None:
        raise ValueError(
            f"Expected sequence_parallel=True or False for {name} with tp = {mesh.tp_size}, got "
            "neither. Say whether each tensor-parallel rank brings its own part of the sequence, "
            "or call parallelize_tensors before."
        )
    return noted


def _refuse(
    name: str, layer: MoELayer, mesh: ParallelMesh, in_parts: bool, dispatcher: str
) -> None:
    if is_surrounded(layer):
        local = isinstance(layer.dispatcher, LocalDispatcher)
        got = "an earlier call's" if local else type(layer.dispatcher).__name__
        raise ValueError(
            f"Expected a LocalDispatcher in {name}, got {got}. Call parallelize_experts once, on a "
            "model whose experts are not spread yet."
        )
    if dispatcher == "fixed" and layer.config.capacity_factor is None:
        raise ValueError(
            f"Expected a capacity for dispatcher='fixed' in {name}, got a dMoE, which drops no "
            "token. Take another dispatcher, or MoE."
        )
    check_sequence_parallel(layer, in_parts)
    factors = (layer.config.capacity_factor, layer.config.eval_capacity_factor)
    limited = dispatcher != "fixed" and any(factor is not None for factor in factors)
    if limited and mesh.cp_size > 1 and mesh.tp_size > 1 and not in_parts:
        # Shares of parts are in no order of a batch of several sequences.
        raise ValueError(
            f"Expected sequence_parallel=True for the capacity of {name} with cp = {mesh.cp_size} "
            f"and tp = {mesh.tp_size}, got False. Spread the sequences over tp as well, or use "
            "dMoE."
        )


def _refuse_held(model: nn.Module, layers: dict[str, MoELayer], ep: DeviceMesh) -> None:
    """Refuse parameters that cannot be split, or whose other holders would train the old ones."""
    unwrapped(model)
    of_experts = {m for layer in layers.values() for m in layer.experts.modules()}
    elsewhere = set(model.modules()) - of_experts
    others = {parameter for m in elsewhere for parameter in m.parameters(recurse=False)}
    for name, layer in layers.items():
        if not isinstance(layer.experts, Experts):
            raise ValueError(
                f"Expected mb_layers' Experts in {name}, got {type(layer.experts).__name__}, which "
                "cannot be split. What wraps them, adapters say, comes after parallelize_experts; "
                "adapters of mb_layers.add_lora wrap nothing."
            )
        if is_spread(layer.experts):
            raise ValueError(
                f"Expected plain parameters in {name}, got DTensors. Call parallelize_experts "
                "before apply_data_parallel or fully_shard."
            )
        if layer.experts.working_copies:
            raise ValueError(
                f"Expected the experts of {name} without working copies, which would stay behind. "
                "Call hold_working_copies last."
            )
        if not others.isdisjoint(layer.experts.parameters()):
            raise ValueError(
                f"Expected the experts of {name} to share parameters with other experts alone, got "
                "one that is some other module's too. Give that its own."
            )
        placement = Placement(layer.config.num_experts, ep.size(), ep.get_local_rank())
        check_splits(layer.experts, placement, name)


@dataclass(frozen=True)
class _Spreading:
    """How the layers of a model are spread: `parallelize_experts`' arguments, and what they share.

    meshes: what layers are spread over, by their number of experts.
    shared: what became of parameters, by what they were, for those that several layers have.
    """

    ep: DeviceMesh
    meshes: Mapping[int, DeviceMesh]
    buffers: PeerBuffers
    rows: Rows
    keep_rows: bool | None
    equal_tokens: bool
    chunks: int
    shared: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def spread(self, layer: MoELayer, name: str, dispatcher: str) -> str:
        """Shard the experts' parameters, give the layer its dispatcher; says what a rank holds."""
        experts = layer.config.num_experts
        place = Place(self.ep.get_group(), name)
        placement = Placement(experts, place.size, place.rank)
        if not is_spread(layer.experts):  # else they are an earlier layer's too
            shard_experts(layer.experts, self.meshes[experts], placement, name, self.shared)
            if self.chunks > 1:  # whichever dispatcher this layer has: a later one may share them
                compute_in_chunks(layer.experts)
        layer.dispatcher = self._dispatcher(layer, place, placement, dispatcher)
        if dispatcher == "fixed" and layer.eval_dispatcher is not None:
            layer.eval_dispatcher = self._fixed(layer.eval_dispatcher, place)
        held = f"{placement.experts_per_rank} of {experts} experts a rank"
        if placement.width_shards > 1:
            held = f"1/{placement.width_shards} of the width of " + held
        return held

    def _dispatcher(
        self, layer: MoELayer, place: Place, placement: Placement, name: str
    ) -> TokenDispatcher:
        experts, rows = placement.num_experts, self.rows
        if name == "all_gather":
            return AllGatherDispatcher(experts, place, equal_tokens=self.equal_tokens, rows=rows)
        if name == "all_to_all":
            return AllToAllDispatcher(experts, place, chunks=self.chunks)
        if name == "fixed":
            return self._fixed(layer.dispatcher, place)
        keep_rows = self.keep_rows
        if keep_rows is None:
            keep_rows = keeps_rows_anyway(layer.config, placement)
        home = layer.experts.stores_home
        return PeerDispatcher(
            experts, place, self.buffers, keep_rows=keep_rows, rows=rows, stores_home=home
        )

    def _fixed(self, local: TokenDispatcher, place: Place) -> FixedDispatcher:
        assert isinstance(local, LocalDispatcher)
        return FixedDispatcher(local, place, equal_tokens=self.equal_tokens)


def keeps_rows_anyway(config: MoEConfig, placement: Placement) -> bool:
    """Whether the experts save rows of their own, not the tokens that came: for one row a token."""
    fused = config.mlp_impl == "grouped" and not config.recompute
    return fused and min(config.top_k, placement.experts_per_rank) == 1
