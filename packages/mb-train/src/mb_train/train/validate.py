"""Losses of a run on held-out data, while it trains and at its end.

`mb_train.inference.evaluation` is `mb-train eval`: a finished run on a file.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Generator

import torch
import torch.distributed as dist
from mb_parallel import any_rank, gather_rest, of_all_ranks
from mb_parallel.engines import is_dtensor
from torch import nn

from mb_train.checkpoint.tensors import tensors_of
from mb_train.logs.megatron_lines import measured_line, perplexity, validation_lines
from mb_train.machine.signals import StopFlag
from mb_train.tasks import Dataset
from mb_train.train.run import Run

END = "the end of training for val data"
# Samples at most: enough to know a share to 2 %.
_MEASURED = 2000


@torch.no_grad()
def evaluate(run: Run, dataset: Dataset | None, place: str, stop: StopFlag) -> dict[str, float]:
    """Mean losses over the first `eval_iters` batches of a set, printed.

    {} without a set, and if `stop` rose before the last batch.
    """
    if dataset is None:
        return {}
    run.model.train(False)
    micro_batches = run.batch_sizes.micro_batches(run.batch_sizes.full)
    weights = run.task.loss_weights
    # Of losses, and of weights, of which a long evaluation has more than fp32 counts.
    sums: dict[str, torch.Tensor] = {}  # of those that are no matter of training alone
    with contextlib.closing(run.stream(dataset, consumed_samples=0, stop=stop)) as stream:
        for done in range(run.config.eval_iters):
            batches = list(itertools.islice(stream, micro_batches))
            for name, loss in run.model.executor.evaluate(batches).items():
                count = torch.stack([batch[weights[name]].sum() for batch in batches]).sum()
                both = torch.stack([loss.reshape(()), count]).double()
                sums[name] = sums[name] + both if name in sums else both
            step = f"batch {done + 1} of {run.config.eval_iters}"
            if any_rank(bool(stop)):
                run.say(f" evaluation at {place} left off after {step}")
                return {}
            run.sign_of_life(f"evaluation: {step} is done")
    losses = {}
    for name, both in sums.items():
        run.mesh.all_reduce(both, "dp")
        total, count = both.tolist()
        losses[name] = total / max(count, 1.0)
    run.say(validation_lines(place, losses))
    main = next(iter(losses.values()))
    run.log.write(
        "eval",
        iteration=run.progress.iteration,
        consumed_samples=run.progress.consumed_samples,
        place=place,
        lm_loss=main,
        ppl=perplexity(main),
        losses=losses,
    )
    return losses


def measure(run: Run, dataset: Dataset | None, place: str) -> dict[str, float]:
    """What the task tells beside its losses, over samples that `evaluate` takes too; printed.

    Every rank measures all of them; where layers are cut (tensor parallelism) or apart (stages), on
    a copy of the whole model. {} where there is no more to tell, or no memory for the copy.
    """
    if dataset is None or not run.task.tells_more:
        return {}
    if run.mesh.tp_size * run.mesh.pp_size > 1:
        model = _whole(run)
        if model is None:
            run.say(f" not measured at {place}: a rank has no memory for the whole model")
            return {}
    else:
        (model,) = run.model.parts
        gather_rest(model)  # which tasks call past its forward
    count = min(run.config.eval_iters * run.batch_sizes.full, len(dataset), _MEASURED)
    # Its batches have sizes of their own, in T5 a new one for each token that is written: compiled
    # blocks would be compiled for them, once, at the end of a run.
    eager = torch.compiler.set_stance("force_eager") if run.config.compile else None
    with eager or contextlib.nullcontext():
        found = run.task.evaluate_more(model.train(False), dataset, count)
    if found:
        run.say(measured_line(place, found))
        run.log.write("measured", iteration=run.progress.iteration, place=place, **found)
    return found


@torch.no_grad()
def _whole(run: Run) -> nn.Module | None:
    """The model as one process has it, on every rank; None where one has no memory for it."""
    model, mine, pp = None, tensors_of(run.model.parts, None), run.mesh.axis("pp")
    with contextlib.suppress(torch.OutOfMemoryError), run.device:
        model = run.task.build_model(compute_dtype=run.compute_dtype)
    if any_rank(model is None):
        return None
    assert model is not None
    held = [list(mine)] if pp is None else of_all_ranks(list(mine), pp.get_group())
    for name, tensor in tensors_of(model, None).items():
        found = mine.get(name)
        if found is not None:
            with _gathering():
                tensor.copy_(found.full_tensor() if is_dtensor(found) else found)
        if pp is not None:
            owner = next(stage for stage, names in enumerate(held) if name in names)
            dist.broadcast(tensor, group=pp.get_group(), group_src=owner)
    return model


@contextlib.contextmanager
def _gathering() -> Generator[None]:
    """Without torch's warning of several collectives for one tensor: here none of them adds up."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
