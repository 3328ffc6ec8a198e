"""Checkpoints of models larger than the memory: weights alone, one at a time."""

# Apart from `read` and `saver`, whose users need not wait for torch's checkpoints to be imported,
# DTensor with them, before a run's first step.

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from mb_layers.on_demand import OnDemand, Picked, outlines
from torch import Tensor, nn

from mb_train.checkpoint.read import compare, fill, opened, quiet
from mb_train.checkpoint.tensors import state_names, tensors_of
from mb_train.checkpoint.writer import Planner, Writer
from mb_train.folder.run_folder import PARTIAL, SavedRun, iteration_folder

_PREFIX = "model."  # as in `tensors_of`


class SavedWeights(OnDemand[str]):
    """The weights in a checkpoint folder by a model's names, each read when it is asked for.

    That read last is kept, until it is another's turn.

    Args:
        path: the folder.
        model: a whole one, which may be without numbers.
        left_out: as of `load_checkpoint`.

    Raises:
        CheckpointError: as `load_checkpoint`; (a weight) its file is damaged.
    """

    def __init__(self, path: Path, model: nn.Module, *, left_out: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._path = path
        self._reader, shapes = opened(path, alone=True, left_out=left_out)
        self._outlines = outlines(tensors_of(model, None))
        shapes = {name: shapes[name] for name in shapes.keys() - state_names(shapes)}
        compare(path, {name: tuple(t.shape) for name, t in self._outlines.items()}, shapes)
        self.places = {name.removeprefix(_PREFIX): name for name in self._outlines}
        self._last: tuple[str, Tensor] | None = None

    def read(self, place: str) -> Tensor:
        if self._last is None or self._last[0] != place:
            self._last = None  # it goes before the next comes
            tensor = torch.empty_like(self._outlines[place], device="cpu")
            fill(self._path, {place: tensor}, self._reader, alone=True)
            self._last = place, tensor
        return self._last[1]

    def outlines(self) -> dict[str, Tensor]:
        return {name: self._outlines[place] for name, place in self.places.items()}


def write_weights(
    folder: Path, run: SavedRun, model: nn.Module, weights: Mapping[str, Tensor]
) -> None:
    """Write one checkpoint into a run folder, whole or not at all, as `Saver` would.

    Args:
        run: what is said of it.
        model: may be without numbers.
        weights: of it, by its names. Each is asked for once, in their order, and let go.

    Raises:
        OSError: it cannot be written.
        Exception: what `weights` raise when asked.
    """
    written = tensors_of(model, None)
    state = {name: written[name] for n in weights if (name := f"{_PREFIX}{n}") in written}
    draft = folder / (iteration_folder(run.iteration) + PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        with quiet():
            dcp.save(
                state,
                # Two at the same time would be in memory together.
                storage_writer=Writer(draft, run, threads=1),
                planner=Planner(Picked({f"{_PREFIX}{name}": (weights, name) for name in weights})),
                no_dist=True,
            )
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
