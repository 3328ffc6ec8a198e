"""`--cuda-graph`: a micro-batch's forward and backward pass as one CUDA graph.

A small model on a fast GPU waits for the host, which launches some thousand kernels a step one by
one. A graph holds them all and is launched once. What it reads and writes lies where it lay when
the graph was captured: inputs and the loss scale are copied into tensors of its own, gradients are
added up in tensors that stay from step to step, weights are updated in place by the optimizer.

The first steps run as they are: kernels are built, blocks compile, libraries allocate workspaces.
Then one micro-batch is captured and replayed for the rest of the run. Dropout and jitter
are those of a run without graphs, for a graph reads the seed of torch's generator when it is
replayed. Only shapes that do not depend on the data can be captured, and nothing that waits for the
device: a whole GPT on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mb_parallel.optimizer import WorkingCopies
from torch import Tensor, nn

from mb_train.config import TrainConfig
from mb_train.execute import Losses, Sequential, Work, add_losses, backward
from mb_train.models.output import ModelOutput
from mb_train.tasks import Batch

# Steps that run as they are before one is captured.
WARM_UP_STEPS = 2


def check_capturable(config: TrainConfig, device: torch.device, ranks: int) -> None:
    """Raise ValueError for a run whose micro-batches cannot be one graph."""
    sparse = config.moe_num_experts is not None and config.moe_mlp_impl == "sparse"
    for there, wanted, got in (
        (device.type != "cuda", "a GPU", f"--device {device.type}"),
        (ranks > 1, "one process", f"{ranks} ranks"),
        (config.model != "gpt", "--model gpt", config.model),
        (
            config.recompute_granularity is not None or config.moe_recompute,
            "no recompute",
            "--recompute-granularity or --moe-recompute",
        ),
        (config.reset_attention_mask, "no --reset-attention-mask", "batches of several shapes"),
        (
            config.moe_balance_over == "global_batch",
            "another --moe-balance-over",
            "global_batch, whose micro-batches count those before them",
        ),
        (sparse, "--moe-mlp-impl grouped", "sparse, whose topology is read back to the host"),
    ):
        if there:
            raise ValueError(f"Expected {wanted} for --cuda-graph, got {got}.")


class Graphed(Sequential):
    """`Sequential` whose micro-batches are replayed from a CUDA graph.

    Args:
        model, first_input: as for `Sequential`; the model's batches all have the same shapes.
        copies: what the model computes with; a replay calls no hook that would look them over.
    """

    def __init__(self, model: nn.Module, first_input: str, copies: WorkingCopies) -> None:
        super().__init__(model, first_input)
        self._copies = copies
        self._steps = 0
        # Of the warm-up as well: autograd adds a gradient up on the stream where it first did, and
        # a capture cannot wait for another than its own.
        self._stream = torch.cuda.Stream()
        self._graph: _MicroBatchGraph | None = None

    def step(self, work: Work) -> Losses:
        """See `Executor.step`."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                losses = super().step(work)
            torch.cuda.current_stream().wait_stream(self._stream)
            return losses
        # The optimizer has updated the weights in place: the graph's gradients are of these.
        self._copies.refresh()
        if self._graph is None:
            self._graph = _MicroBatchGraph(
                self._model, self._call, work.batches[0], work.loss_scale, self._stream
            )
        self._graph.begin(work.loss_scale, 1 / len(work.batches))
        totals: Losses = {}
        for index, batch in enumerate(work.batches):
            work.before(index)
            losses, metrics = self._graph.run(batch)
            add_losses(totals, losses)
            work.measured(metrics)
        return totals


class _MicroBatchGraph:
    """The captured passes over one micro-batch, and the tensors they read and write.

    Args:
        model: whose parameters get the gradients.
        call: runs it on a batch.
        batch: of the shapes to capture.
        loss_scale: of the kind to come.
        stream: to capture on.

    Raises:
        RuntimeError: something in the passes cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Batch], ModelOutput],
        batch: Batch,
        loss_scale: Tensor | float,
        stream: torch.cuda.Stream,
    ) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._grads = [torch.zeros_like(p) for p in self._parameters]
        self._batch = {name: value.clone() for name, value in batch.items()}
        device = self._parameters[0].device
        self._scale, self._share = torch.ones(2, device=device).unbind()
        self._graph = torch.cuda.CUDAGraph()
        self.begin(loss_scale, 1.0)
        try:
            # Other threads prepare batches and write checkpoints meanwhile, which is no matter.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._losses, self._metrics = self._passes(call)
        except RuntimeError as error:
            raise RuntimeError(
                "A micro-batch of this run cannot be captured as a CUDA graph; leave --cuda-graph "
                "out."
            ) from error

    def _passes(self, call: Callable[[Batch], ModelOutput]) -> tuple[Losses, dict[str, Tensor]]:
        output = call(self._batch)
        aux_loss = None if output.aux_loss is None else output.aux_loss * self._share
        backward(output.losses, aux_loss, self._scale)
        losses = {name: value.detach() for name, value in output.losses.items()}
        return losses, {name: value.detach() for name, value in output.metrics.items()}

    def begin(self, loss_scale: Tensor | float, share: float) -> None:
        """Begin a step: gradients of zero, attached to their parameters."""
        torch._foreach_zero_(self._grads)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        self._share.fill_(share)
        if isinstance(loss_scale, Tensor):
            self._scale.copy_(loss_scale)
        else:
            self._scale.fill_(loss_scale)

    def run(self, batch: Batch) -> tuple[Losses, dict[str, Tensor]]:
        """Add a micro-batch's gradients; its losses and metrics, copies."""
        for name, value in self._batch.items():
            value.copy_(batch[name], non_blocking=True)
        self._graph.replay()
        losses = {name: value.clone() for name, value in self._losses.items()}
        return losses, {name: value.clone() for name, value in self._metrics.items()}
