"""`--cuda-graph`: a micro-batch's forward and backward pass as one CUDA graph.

A small model on a fast GPU waits for the host, which launches some thousand kernels a step one by
one. A graph holds them all and is launched once. What it reads and writes lies where it lay when
the graph was captured: inputs and the loss scale are copied into tensors of its own, weights are
updated in place by the optimizer, gradients lie in tensors that stay from step to step. They are
what they are without graphs: a step's first micro-batch leaves its own, of experts in 16 bits, the
second a sum in fp32, and further ones add to it. So these have a graph each.

The first micro-batches of a shape run as they are: kernels are built, blocks compile, libraries
allocate workspaces. Then one is captured, and replayed for the rest of the run. A batch's tensors
say what there is to compute by their shapes alone, and there are few of those: how many documents
divide a sequence comes in powers of two, what is left of a batch without its padding in 32nds.
Dropout and jitter are those of a run without graphs, for a graph reads the seed of torch's
generator when it is replayed. Nothing that waits for the device can be captured, nor a collective.
So each of several GPUs has the whole model, but for experts that are reached through peer memory,
and gradients are summed when the step's micro-batches are through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from mb_layers.dispatch import LocalDispatcher
from mb_layers.moe import MoELayer
from mb_parallel import ParallelDims, set_gradient_sync, sum_gradients
from mb_parallel.expert_parallel import (
    GlobalCapacity,
    PeerBuffers,
    PeerDispatcher,
    choose_dispatcher,
)
from mb_parallel.optimizer import WorkingCopies, local
from torch import Tensor, nn

from mb_train.assembly.execute import Losses, Sequential, Work, add_losses, backward
from mb_train.config import TrainConfig
from mb_train.tasks import Batch

# Micro-batches of a shape that run as they are before one is captured.
WARM_UP = 2
# Three for each of 24 shapes. Each takes a second to capture, and the driver some memory; what is
# rarer runs as it is.
MOST_GRAPHS = 72

# A micro-batch of a step: the first, the second or a further one; the batch's names and sizes.
_Kind = tuple[int, tuple[tuple[str, torch.Size], ...]]
_Passed = tuple[Losses, dict[str, Tensor]]


def check_capturable(config: TrainConfig, device: torch.device, dims: ParallelDims) -> None:
    """Raise ValueError for a run whose micro-batches cannot be one graph."""
    sparse = config.moe_num_experts is not None and config.moe_mlp_impl == "sparse"
    by_weight = config.moe_drop_policy != "position"
    asked, bounded = config.moe_dispatcher, config.moe_capacity_factor > 0
    chosen, _ = choose_dispatcher(asked, config.moe_top_k, dims.ep, None, bounded=bounded)
    taken = f"which takes {chosen} on {dims.ep} ranks, " if asked == "auto" else ""
    for there, wanted, got in (
        (device.type != "cuda", "a GPU", f"--device {device.type}"),
        (
            dims.world_size > 1 and config.zero_stage > 0,
            "--zero-stage 0 with several ranks",
            f"{config.zero_stage}, whose passes gather weights",
        ),
        (dims.tp * dims.pp > 1, "no tensor or pipeline parallelism", f"{dims.tp} x {dims.pp}"),
        (dims.cp > 1, "no context parallelism", f"{dims.cp}, whose exchange is not captured"),
        (
            dims.ep > 1 and config.moe_capacity_factor > 0 and by_weight,
            "--moe-drop-policy position over several ranks",
            f"{config.moe_drop_policy}, for which they tell each other all weights",
        ),
        (
            dims.ep > 1 and chosen != "peer",
            "--moe-dispatcher peer",
            f"{asked}, {taken}whose collectives are not captured",
        ),
        (
            dims.ep > 1 and config.moe_row_policy != "worst",
            "--moe-row-policy worst",
            f"{config.moe_row_policy}, with which the host waits",
        ),
        (
            dims.ep > 1 and bool(config.moe_rebalance_interval),
            "no --moe-rebalance-interval",
            f"{config.moe_rebalance_interval}: experts would change places",
        ),
        (
            config.recompute_granularity is not None or config.moe_recompute,
            "no recompute",
            "--recompute-granularity or --moe-recompute",
        ),
        (
            config.moe_balance_over == "global_batch",
            "another --moe-balance-over",
            "global_batch, whose micro-batches count those before them",
        ),
        (sparse, "--moe-mlp-impl grouped", "sparse, whose topology is read back to the host"),
    ):
        if there:
            raise ValueError(f"Expected {wanted} for --cuda-graph, got {got}.")


def peer_buffers(model: nn.Module) -> set[PeerBuffers]:
    """The memory through which ranks exchange rows in a model that is to be captured.

    Raises:
        ValueError: rows are exchanged, or counted for a capacity, in another way.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    dispatchers = [
        dispatcher.inner
        if isinstance(dispatcher, GlobalCapacity) and not dispatcher.has_collectives
        else dispatcher
        for dispatcher in (layer.dispatcher for layer in layers)
    ]
    for dispatcher in dispatchers:
        if not isinstance(dispatcher, LocalDispatcher | PeerDispatcher):
            raise ValueError(
                "Expected experts that are reached through peer memory alone for --cuda-graph with "
                f"several ranks, got {type(dispatcher).__name__}, whose collectives are not "
                "captured. On one host give --moe-dispatcher peer."
            )
    return {one.buffers for one in dispatchers if isinstance(one, PeerDispatcher)}


class Graphed(Sequential):
    """`Sequential` whose micro-batches are replayed from CUDA graphs.

    One for each shape and what is done with gradients: up to three, in steps of three or more.

    Args:
        model, dp_size: as for `Sequential`.
        copies: what the model computes with; a replay calls no hook that would look them over.
        buffers: memory of peers that the model exchanges rows through.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: WorkingCopies,
        buffers: Collection[PeerBuffers] = (),
        *,
        dp_size: int = 1,
    ) -> None:
        super().__init__(model, dp_size=dp_size)
        self._copies, self._buffers = copies, buffers
        # Of all passes: autograd adds a gradient up on the stream where it first did, and a capture
        # cannot wait for another than its own.
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: Counter[_Kind] = Counter()
        self._graphs: dict[_Kind, MicroBatchGraph] = {}
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # Where gradients are that graphs leave, and the next ones read: a first micro-batch's, and
        # sums, to which further ones add in place.
        first: dict[Tensor, Tensor] = {}
        sums: dict[Tensor, Tensor] = {}
        self._places = (first, sums, sums)
        self._scale, self._share = torch.ones(2, device=self._parameters[0].device).unbind()

    @property
    def captured(self) -> int:
        """How many graphs there are, one for what came often enough."""
        return len(self._graphs)

    def step(self, work: Work) -> Losses:
        """See `Executor.step`."""
        for memory in self._buffers:
            memory.check_all()
        # The optimizer has updated the weights in place: a graph's gradients are of these.
        self._copies.refresh()
        for parameter in self._parameters:
            parameter.grad = None
        self._share.fill_(1 / (len(work.batches) * self._dp_size))
        if isinstance(work.loss_scale, Tensor):
            self._scale.copy_(work.loss_scale)
        else:
            self._scale.fill_(work.loss_scale)
        set_gradient_sync(self._model, False)
        totals: Losses = {}
        for index, batch in enumerate(work.batches):
            work.before(index)
            losses, metrics = self._run(batch, min(index, 2))
            add_losses(totals, losses)
            work.measured(metrics)
        sum_gradients(self._model)
        return totals

    def _run(self, batch: Batch, turn: int) -> _Passed:
        """Leave a micro-batch's gradients, added to those before it; its losses and metrics."""
        kind = turn, tuple((name, value.shape) for name, value in batch.items())
        if kind not in self._graphs:
            self._seen[kind] += 1
            # A graph adds to what one before it left: whose gradients' place is known by then.
            if (
                self._seen[kind] <= WARM_UP
                or len(self._graphs) == MOST_GRAPHS
                or (turn > 0 and not self._places[turn - 1])
            ):
                return self._as_it_is(batch, turn)
            self._graphs[kind] = self._capture(batch, turn)
        return self._graphs[kind].run(batch)

    def _capture(self, batch: Batch, turn: int) -> MicroBatchGraph:
        if turn > 0:
            for parameter in self._parameters:
                if parameter.grad is None:  # another shape's first micro-batch may leave one
                    parameter.grad = torch.zeros_like(parameter)
            self._stay(self._places[turn - 1])

        def passes(batch: Batch) -> _Passed:
            passed = self._passes(batch)
            self._stay(self._places[turn])
            return passed

        return MicroBatchGraph(passes, batch, self._parameters, self._stream, self._pool)

    def _as_it_is(self, batch: Batch, turn: int) -> _Passed:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            passed = self._passes(batch)
            self._put(self._places[turn])
        torch.cuda.current_stream().wait_stream(self._stream)
        return passed

    def _passes(self, batch: Batch) -> _Passed:
        output = self._call(batch)
        aux_loss = None if output.aux_loss is None else output.aux_loss * self._share
        backward(output.losses, aux_loss, self._scale)
        losses = {name: value.detach() for name, value in output.losses.items()}
        return losses, {name: value.detach() for name, value in output.metrics.items()}

    def _stay(self, places: dict[Tensor, Tensor]) -> None:
        """Let gradients be where they are from now on, but for those that have a place already."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                places.setdefault(parameter, parameter.grad)
        self._put(places)

    def _put(self, places: dict[Tensor, Tensor]) -> None:
        """Copy gradients to their places, of those that have one."""
        for parameter, place in places.items():
            if parameter.grad is None:
                local(place).zero_()
            elif parameter.grad is not place:
                local(place).copy_(local(parameter.grad))
            parameter.grad = place


class MicroBatchGraph:
    """The captured passes over one micro-batch, and the tensors they read and write.

    Args:
        passes: over a batch; gradients that they add to lie where they will lie.
        batch: of the shapes to capture.
        parameters: whose gradients the passes leave.
        stream: to capture on.
        pool: memory that graphs share, for none is replayed while another's results are wanted.

    Raises:
        RuntimeError: something in the passes cannot be captured.
    """

    def __init__(
        self,
        passes: Callable[[Batch], _Passed],
        batch: Batch,
        parameters: list[nn.Parameter],
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        self._batch = {name: value.clone() for name, value in batch.items()}
        self._graph = torch.cuda.CUDAGraph()
        try:
            # Other threads prepare batches and write checkpoints meanwhile, which is no matter.
            with torch.cuda.graph(
                self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self._losses, self._metrics = passes(self._batch)
        except RuntimeError as error:
            raise RuntimeError(
                "A micro-batch of this run cannot be captured as a CUDA graph; leave --cuda-graph "
                "out."
            ) from error
        self._grads = [(parameter, parameter.grad) for parameter in parameters]

    def run(self, batch: Batch) -> _Passed:
        """Leave a micro-batch's gradients, or sums; its losses and metrics, copies."""
        for name, value in self._batch.items():
            value.copy_(batch[name], non_blocking=True)
        self._graph.replay()
        for parameter, grad in self._grads:
            parameter.grad = grad
        losses = {name: value.clone() for name, value in self._losses.items()}
        return losses, {name: value.clone() for name, value in self._metrics.items()}
