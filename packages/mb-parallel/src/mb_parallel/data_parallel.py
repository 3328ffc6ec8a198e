"""Data parallelism: parameters, gradients and optimizer state sharded by torch's FSDP2, or whole.

`fully_shard` is applied block by block, from the inside out: each block gathers its weights just
before it runs and reduces its gradients just after, while its neighbours compute. Small blocks are
one unit. Weights are kept in their own dtype (fp32: the master weights), computed with in
`compute_dtype`, and gradients are summed in fp32 (in fp64 where that is computed in). Master
weights and optimizer state are always sharded; the ZeRO stage (Rajbhandari et al., arXiv
1910.02054) says what else is. Bytes per parameter on each of N ranks, with bf16 compute and AdamW,
in a step of several micro-batches:

    stage   master, moments   compute weight          gradient
      0         12            2, cast on use          4, reduced once, after the last micro-batch
      1         12 / N        2, gathered once        4, reduced once, at the last micro-batch
      2         12 / N        2, gathered once        4 / N, reduced at every micro-batch
      3         12 / N        a block's 2 at a time   4 / N, reduced at every micro-batch

In stage 1 and 2 compute weights live from the first forward to the last backward of a step. Stage 2
holds the whole gradient of one unit at a time. With one micro-batch a step, 1 and 2 are the same.

Stage 0 shards nothing (`replicas`). A rank's model is what it is in one process, so that CUDA
graphs can hold its passes and Python has less to do. It takes the memory, and a reduction that no
backward pass hides: for small dense layers beside experts that are spread over all ranks.

Gradients are sums over ranks, and nothing divides them: what is trained is the sum of the losses
that the ranks call backward on. To train on a mean, divide the loss, which costs nothing; dividing
billions of gradients takes a pass over all of them.

Experts have a mesh of their own. A rank's experts see the tokens of all ranks that send them some,
so their gradients are sums already. Over the copies of an expert they are summed again, which gives
the same total for any number of copies. Experts with a single copy have nothing to gather or to
reduce: FSDP2 leaves them alone, and they cast their weights on use, or hold copies to compute with
(`optimizer.hold_working_copies`).

All this is applied from outside: the model's own code does not change. In one process it costs
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mb_layers import Experts
from mb_layers.moe import MoELayer
from torch import nn

from mb_parallel.arguments import floating, one_module, parameters_of, several, unwrapped
from mb_parallel.engines import is_dtensor, is_fsdp
from mb_parallel.expert_parallel.surround import is_surrounded
from mb_parallel.gradient_sync import REPLICAS, keep_apart, replacing, watch
from mb_parallel.mesh import ParallelMesh, check_mesh, keep_sizes, refused_alike
from mb_parallel.replicas import equal_shards, refuse_spread, replicate
from mb_parallel.world import check_same

_STAGE = "_mb_zero_stage"


def apply_data_parallel(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    blocks: Iterable[nn.Module],
    compute_dtype: torch.dtype = torch.float32,
    keep_fp32: Iterable[nn.Module] = (),
    in_training: Iterable[nn.Module] = (),
    zero_stage: int = 3,
    cast_inputs: bool = True,
) -> None:
    """Shard `model` in place over `mesh`; its parameters become DTensors, but in stage 0.

    Gradients become sums over data-parallel ranks, so the ranks' losses have to add up to the one
    you want. For the mean over ranks divide each rank's loss by `mesh.dp_size`, auxiliary losses
    too.

    All ranks have to use the same parameters between two reductions of gradients, because FSDP2
    sends those that there are, in order. For a model whose branches depend on the data call
    `model.set_reduce_scatter_unused_params(True)` afterwards (from torch 2.13 on): a gradient that
    a rank lacks then counts as zero. In stage 0 a backward pass says so (ValueError), and with
    `dp_replicate` > 1 also in stages 2 and 3, before torch 2.15, where the micro-batches of a step
    use different ones.

    All ranks of the mesh call this together, and what one refuses all refuse.

    Args:
        model: parameters on the mesh's device, equal on every rank (same seed) or DTensors over the
            mesh's "tp" or "ep" already; fp32 for training. With `dp_replicate` > 1 each sharded
            group takes the first one's weights, if they are not on the meta device.
        mesh: if it is of one process, nothing is done, and computing in `compute_dtype` is left to
            the model (autocast, or weights cast on use).
        blocks: submodules that are gathered and reduced one at a time, or a few if they are small,
            in the order they run; each runs in every forward pass, but for those `in_training`.
            Those that share parameters are one unit. The `mb_layers.Experts` in them are units of
            their own, or none where edp = 1.
        compute_dtype: dtype of the gathered weights, and of what blocks and model are given.
        keep_fp32: submodules whose weights and inputs are not cast, such as the routers of an MoE,
            since rounding would change their choices. Small ones are joined, as blocks are.
        in_training: blocks and others of these that run in training alone, each of them in every
            pass then. They are not joined with those that run in evaluation too.
        zero_stage: 0, 1, 2 or 3, what is sharded (`mb_parallel.data_parallel` has a table). With 0
            the ranks take the first one's weights, frozen ones too, but not its buffers, and
            computing in `compute_dtype` is left to the model, as in one process.
        cast_inputs: cast the model's and the blocks' floating-point arguments to `compute_dtype`,
            however they are nested. False for a model that chooses dtypes by itself: then weights
            of a loss, tables of positions and an fp32 residual stream keep their dtypes.

    Raises:
        ValueError: another `zero_stage`, no floating-point `compute_dtype`, several modules for one
            or one for several, blocks that are not in the model or are never called (an
            nn.ModuleList), arguments or parameters that differ between data-parallel ranks, a mesh
            of other sizes than in an earlier call for the model, a model that is sharded already or
            has replicas, one in a wrapper such as DistributedDataParallel, parameters of several
            dtypes that train in one unit, DTensors over data-parallel ranks (those of another
            model's, say), in stage 0 weights on the meta device, in the others parameters of no
            axis or no number, or of a block and of what is no block, or experts with working copies
            or, where ep, cp or tp > 1, without `parallelize_experts`.
    """
    check_mesh(mesh, model)
    with refused_alike(mesh):
        blocks, keep_fp32 = several(blocks, "blocks"), several(keep_fp32, "keep_fp32")
        in_training = several(in_training, "in_training")
        _refuse_arguments(model, blocks, keep_fp32, compute_dtype, zero_stage)
        if zero_stage == 0 and mesh.pp_size > 1:
            raise ValueError(
                "Expected zero_stage 1, 2 or 3 for a stage of a pipeline, whose schedules run "
                f"several backward passes a step, got 0 with pp = {mesh.pp_size}."
            )
    if mesh.dims.dp * mesh.dims.tp == 1:
        return
    with refused_alike(mesh):
        if (dp := mesh.axis("dp")) is not None:
            modules = {"blocks": blocks, "keep_fp32": keep_fp32, "in_training": in_training}
            alike = _alike(
                model,
                modules,
                zero_stage=zero_stage,
                compute_dtype=compute_dtype,
                cast_inputs=cast_inputs,
            )
            check_same(alike, "what apply_data_parallel is given", group=dp.get_group())
        _refuse_model(model, mesh, zero_stage)
        if zero_stage > 0:
            from mb_parallel.fsdp_units import shard_units

            with replacing(model):
                shard_units(
                    model,
                    mesh,
                    blocks=blocks,
                    compute_dtype=compute_dtype,
                    keep_fp32=keep_fp32,
                    in_training=in_training,
                    reshard=zero_stage == 3,
                    cast_inputs=cast_inputs,
                )
    if zero_stage == 0:
        inner = _inner(model)
        setattr(inner, REPLICAS, replicate(inner, mesh))  # which watches it
    else:
        equal_shards(model, mesh)
        watch(_sharded(model))
    setattr(model, _STAGE, zero_stage)
    keep_sizes(mesh, model)


def _refuse_arguments(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    keep_fp32: Iterable[nn.Module],
    compute_dtype: torch.dtype,
    zero_stage: int,
) -> None:
    """Raise ValueError for arguments of `apply_data_parallel` that mean nothing."""
    one_module(model)
    floating(compute_dtype=compute_dtype)
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"Expected zero_stage 0, 1, 2 or 3, got {zero_stage!r}.")
    inside = set(model.modules()) - {model}
    for name, modules in (("blocks", blocks), ("keep_fp32", keep_fp32)):
        for module in modules:
            if module not in inside:
                got = "the model itself" if module is model else f"a {type(module).__name__}"
                raise ValueError(
                    f"Expected {name} to be submodules of the model, got {got}. What no block owns "
                    "is sharded too, so blocks may be empty."
                )
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # FSDP2 gathers in a call
                raise ValueError(
                    f"Expected {name} that are called, got a {type(module).__name__}, of which "
                    "only the members are. Pass these."
                )


def _alike(
    model: nn.Module, modules: Mapping[str, Iterable[nn.Module]], **arguments: Any
) -> dict[str, Any]:
    """What ranks that hold a model together have in common; else they would wait for each other."""
    names = {module: name for name, module in model.named_modules()}
    alike = dict(arguments)
    for what, given in modules.items():
        alike[what] = [names.get(module, "elsewhere") for module in given]
    return alike | parameters_of(model)


def _refuse_model(model: nn.Module, mesh: ParallelMesh, zero_stage: int) -> None:
    """Raise ValueError for a model that cannot be sharded, or not any more."""
    # FSDP2's units may be made one by one, from the inside out. Replicas' gradients are summed
    # once, by the whole.
    replicated = any(hasattr(module, REPLICAS) for module in model.modules())
    inside = zero_stage == 0 and any(map(is_fsdp, model.modules()))
    if is_fsdp(_sharded(model)) or replicated or inside:
        raise ValueError(
            "Expected a model of which no part is replicated or sharded yet, got "
            f"{type(model).__name__}. Call apply_data_parallel once, for the whole model, and not "
            "after fully_shard."
        )
    unwrapped(model)
    refuse_spread(model, mesh)
    if zero_stage == 0:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    "Expected weights, which the ranks take from the first one, got the meta "
                    f"device's {name}. Call to_empty and draw them first, or take zero_stage 1, 2 "
                    "or 3, with which the ranks' seeds have to be the same."
                )
    else:
        for name, parameter in model.named_parameters():  # torch says so in the middle, or later
            if parameter.ndim == 0 or (parameter.requires_grad and not parameter.numel()):
                raise ValueError(
                    f"Expected parameters that zero_stage {zero_stage} can cut, got {name} of "
                    f"{tuple(parameter.shape)}. Give it an axis, and a number at least, or take "
                    "zero_stage 0."
                )
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    trained = [p for module in experts for p in module.parameters() if p.requires_grad]
    if mesh.ep_size > 1 and not all(map(is_dtensor, trained)):
        raise ValueError(
            f"Expected experts that are spread over ep = {mesh.ep_size}, got whole ones, of which "
            "each rank would train its own. Call parallelize_experts first, or build a mesh of "
            "ep = 1."
        )
    layers = (module for module in model.modules() if isinstance(module, MoELayer))
    if mesh.dims.cp_tp > 1 and not all(map(is_surrounded, layers)):
        sizes, counts = f"tp = {mesh.tp_size}", "tokens once for each rank"
        if mesh.cp_size > 1:
            sizes, counts = f"cp = {mesh.cp_size} and {sizes}", "each rank's tokens alone"
        raise ValueError(
            f"Expected layers of experts that know of {sizes}, got one that counts {counts}. Call "
            "parallelize_experts first, with ep = 1 too."
        )
    if mesh.dims.edp > 1 and any(module.working_copies for module in experts):
        raise ValueError(
            "Expected experts without working copies, which would stay behind the weights that "
            "replace theirs. Call hold_working_copies after apply_data_parallel."
        )


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Tell the model whether the next backward is the last of its step.

    Call it with False before every micro-batch of a step but the last, and with True before the
    last. Between micro-batches stages 1 and 2 keep the gathered weights, and stage 1 whole
    gradients. Replicas add up their gradients at the last one. Optimizers, torch's too, and norms
    of this package refuse (ValueError) what ranks have not added up, and `zero_grad` of an
    optimizer or of the model drops it. Replicas refuse a backward onto gradients that are summed
    already, so call `zero_grad` of every model that the last one reached: a GAN's discriminator has
    gradients of the generator's loss, and needs it before each of the two backwards. Nothing
    happens to a model that `apply_data_parallel` left alone.
    """
    one_module(model)
    if (replicas := getattr(model, REPLICAS, None)) is not None:
        replicas.expect(last=enabled)
    if not (stage := zero_stage_of(model)):
        return
    sharded = _sharded(model)
    sharded.set_requires_gradient_sync(enabled or stage > 1)
    sharded.set_requires_all_reduce(enabled)
    sharded.set_reshard_after_backward(enabled or stage == 3)
    keep_apart(sharded, not enabled)


def sum_gradients(model: nn.Module) -> None:
    """Sum all gradients of a model of `zero_stage` 0 over the ranks, in place where in fp32.

    For gradients that no backward pass of autograd has left: a CUDA graph's. Others are summed by
    the last backward pass. All ranks call this. Nothing happens to a model that
    `apply_data_parallel` left alone.

    Raises:
        ValueError: a model of another stage, whose passes gather and reduce, or gradients that the
            last backward pass has summed.
    """
    one_module(model)
    if zero_stage_of(model):
        raise ValueError(f"Expected a model of zero_stage 0, got {zero_stage_of(model)}.")
    if (replicas := getattr(model, REPLICAS, None)) is not None:
        replicas.sum_all(model)


def gather_rest(model: nn.Module) -> None:
    """Gather what no block owns (embeddings, final norm, head), to call methods of the model.

    `forward` does so by itself, and blocks gather their own weights in any case. All ranks of a
    group have to call this, and then the same blocks. In stage 0 there is nothing to gather, but
    parameters that are new since the last pass are noticed. Nothing happens to a model that
    `apply_data_parallel` left alone.
    """
    one_module(model)
    if (replicas := getattr(model, REPLICAS, None)) is not None:
        replicas.follow(_inner(model))
    model = _sharded(model)
    if is_fsdp(model):
        # Else the first block to run would be the root, and these gradients would not be summed.
        model._get_fsdp_state()._lazy_init()
        model.unshard()


def zero_stage_of(model: nn.Module) -> int | None:
    """The `zero_stage` given to `apply_data_parallel`, None if it left the model alone."""
    return getattr(model, _STAGE, None)


def _inner(model: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile` returned; else the model itself."""
    return getattr(model, "_orig_mod", model)


def _sharded(model: nn.Module) -> Any:
    """What FSDP2 shards, also inside of what `torch.compile` returned; else the model itself."""
    inner = _inner(model)
    return inner if is_fsdp(inner) else model
