"""Pipeline parallelism: a model cut into stages, over torch's schedules.

    indices = stage_indices("1f1b", pp_size=mesh.pp_size, pp_rank=mesh.pp_rank)
    layers = split_layers(24, mesh.pp_size)
    stages = [cut(build_model(), layers[i], first=i == 0, last=i == len(layers) - 1)
              for i in indices]
    ...                                        # parallelize_tensors, ..., apply_data_parallel
    pipeline = Pipeline(stages, mesh, schedule="1f1b", first_input="tokens", hidden_size=1024)
    losses = pipeline.step(micro_batches)      # gradients are in the parameters
    optimizer.step()

**What a stage is.** A module that is called as `stage(x, **batch)` and returns a `StageOutput`. x
is the batch's `first_input` on the first stage and the previous stage's `x` on the others; `batch`
is the rest of the micro-batch, labels included, which every rank of a pipeline has from its own
loader. A model with parts `embedding`, `blocks` and `head` becomes a stage by deletion: `blocks` is
an `nn.ModuleDict` keyed by the layer's number in the whole model, so that a parameter has the same
name in every layout and checkpoints move between them; a stage drops the blocks that are not its
own, and sets `embedding` and `head` to None unless it is the first or the last.

**Two streams.** The stages of a decoder pass on their own states and the encoder's, which every
cross-attention reads: a stage returns `x=(own, encoder)` and is called with such a tuple.
`streams` says what crosses each border, by naming entries of the batch with the same length. With
an encoder in stages 0 and 1 and a decoder in stages 2 and 3:
[["tokens"], ["tokens"], ["decoder_tokens", "tokens"]].

**Losses.** Losses are added up over the micro-batches of all data-parallel ranks. Weigh them
beforehand so that the sum is the loss to train on (for a plain mean, by 1 / micro-batches of all
ranks). Auxiliary losses are averaged here. Nothing divides gradients afterwards.

Letters: M micro-batches, B sequences, S tokens of a sequence, D hidden, L MoE layers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from mb_layers import Experts
from torch import Tensor, nn

from mb_parallel.arguments import at_least_1, floating, several
from mb_parallel.data_parallel import zero_stage_of
from mb_parallel.engines import is_compiled, is_compiled_in_place, torch_release
from mb_parallel.expert_parallel.peer import reached_by_peers
from mb_parallel.gradient_sync import free_gathered
from mb_parallel.mesh import ParallelMesh, check_mesh, refused_alike
from mb_parallel.pipeline_parallel.halves import repeatable_graphs
from mb_parallel.pipeline_parallel.placement import (
    check_micro_batches,
    rank_of_stage,
    schedule_kind,
    stage_indices,
)
from mb_parallel.pipeline_parallel.reports import Reports
from mb_parallel.pipeline_parallel.stage import Batch, Pass
from mb_parallel.pipeline_parallel.tied import TiedParameter
from mb_parallel.world import check_same

Losses = dict[str, Tensor]


class Pipeline:
    """Runs the micro-batches of a step through the stages of all pp ranks.

    Args:
        stages: of this rank, in the order of `stage_indices`, on the device, parallelized already.
        mesh: with pp > 1.
        schedule: a name of `SCHEDULES`.
        first_input: the entry of a batch that the first stage takes by position: [B, S, ...].
        hidden_size: D; between stages travels [B, S, D].
        dtype: of the hidden states.
        sequence_parallel: the stages hold runs of the sequence, S / tp tokens.
        streams: for each border between stages, the entries [B, S, ...] of a batch, one for each
            stream that crosses it, that have the same S. None: one stream, of `first_input`'s S.
        tied: parameters of the first stage that other stages have copies of. By their name in the
            first stage and, for a copy in the last, its name there:
            {"embedding.tokens.weight": "head.weight"}; for copies in other stages, names by stage:
            {"embedding.tokens.weight": {2: "embedding.tokens.weight", -1: "head.weight"}}.
            Copies get the first's values now. In each step all get the sum of their gradients, so
            they stay equal. To freeze or unfreeze them later, make a new Pipeline afterwards.

    Raises:
        ValueError: a mesh without stages, an unknown schedule, a number of stages it cannot run,
            ZeRO stage 3, working copies, two streams, what torch.compile returned or, before torch
            2.13, modules compiled in place with a zero-bubble schedule (in the first step, if they
            come in between), streams for another number of borders, arguments that differ between
            the ranks, or tied parameters that do not exist, differ in size or dtype, of which only
            some are frozen, or with two names for one stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: ParallelMesh,
        *,
        schedule: str,
        first_input: str,
        hidden_size: int,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        streams: Sequence[Sequence[str]] | None = None,
        tied: Mapping[str, str | Mapping[int, str]] | None = None,
    ) -> None:
        stages = several(stages, "stages")
        for stage in (None, *stages):
            check_mesh(mesh, stage)
        at_least_1(hidden_size=hidden_size)
        floating(dtype=dtype)
        if not isinstance(tied, Mapping | None):
            raise ValueError(
                'Expected tied to be names by name, such as {"embedding.weight": "head.weight"}, '
                f"got {tied!r}."
            )
        pp = mesh.axis("pp")
        if pp is None:
            raise ValueError(
                "Expected a mesh with pp > 1, got pp = 1: run the whole model, micro-batch by "
                "micro-batch."
            )
        alike = {
            "schedule": schedule, "stages of a rank": len(stages), "first_input": first_input,
            "hidden_size": hidden_size, "dtype": dtype, "sequence_parallel": sequence_parallel,
            "streams": streams, "tied": tied,
        }  # fmt: skip
        check_same(alike, "what Pipeline is given", group=pp.get_group())
        self.schedule, self.kind = schedule, schedule_kind(schedule)
        self.indices = stage_indices(
            schedule, pp_size=mesh.pp_size, pp_rank=mesh.pp_rank, stages_per_rank=len(stages)
        )
        self._mesh, self.stages, self.group = mesh, stages, pp.get_group()
        self.dp_size = mesh.dp_size
        self.num_stages = mesh.pp_size * len(stages)
        self.first_input, self.hidden_size, self.dtype = first_input, hidden_size, dtype
        self.shards = mesh.tp_size if sequence_parallel else 1
        # The latest for training and for evaluation. Stages hold buffers for all micro-batches.
        self._schedules: dict[bool, tuple[Any, Any, list[Any]]] = {}
        self._reports: dict[bool, Reports] = {}
        borders = self.num_stages - 1
        self.streams = [list(names) for names in streams or [[first_input]] * borders]
        if len(self.streams) != borders or not all(self.streams):
            raise ValueError(
                f"Expected streams for each of the {borders} borders between {self.num_stages} "
                f"stages, got {streams}."
            )
        self._refuse_in_halves()
        self.tied = [
            TiedParameter(
                self._by_stage(name, copies),
                self._stage,
                functools.partial(rank_of_stage, schedule, pp_size=mesh.pp_size),
                self.group,
            )
            for name, copies in (tied or {}).items()
        ]

    @property
    def copies(self) -> list[nn.Parameter]:
        """Parameters of this rank that the first stage has too: a norm's `uncounted`."""
        return [copy for tied in self.tied for copy in tied.copies]

    def step(
        self,
        batches: Sequence[Batch],
        *,
        loss_scale: Tensor | float = 1.0,
        before: Callable[[int], None] = lambda index: None,
        measured: Callable[[dict[str, Tensor]], None] = lambda metrics: None,
    ) -> Losses:
        """Add a step's gradients to the parameters'; every pp rank calls it with the same batches.

        Args:
            batches: the step's M micro-batches, in equal shapes.
            loss_scale: multiplies losses and auxiliary losses before the backward pass (fp16).
            before: called before a stage runs a micro-batch, with a number to seed dropout by: the
                micro-batch's number on the first stage, and on later stages other numbers, none of
                them twice in a step.
            measured: called after the step with the metrics of each micro-batch, [L, ...] over the
                MoE layers of all stages.

        Returns:
            The losses by name, summed over the micro-batches, on every rank, detached.

        Raises:
            ValueError: micro-batches without an entry they need, of different shapes, in the
                first step between the ranks too, or of a number that an interleaved schedule cannot
                run; a stage whose losses or metrics have other names, shapes or dtypes than in its
                first step; a tied parameter that was frozen or unfrozen since the pipeline was
                made.
        """
        batches = self._checked(batches)  # before a gradient is touched
        check_micro_batches(self.schedule, len(batches), pp_size=self.group.size())
        waiting = [tied.set_aside() for tied in self.tied]
        passing = self._run(batches, loss_scale, before, train=True)
        for tied, earlier in zip(self.tied, waiting, strict=True):
            tied.add_up(earlier)
        return self._report(passing, measured, train=True)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The losses of these batches by name, summed over them, on every rank."""
        passing = self._run(self._checked(batches), 1.0, lambda index: None, train=False)
        for stage in self.stages:
            free_gathered(stage)  # torch 2.15 leaves them in the place of the parameters
        return self._report(passing, lambda metrics: None, train=False)

    def _run(
        self,
        batches: Sequence[Batch],
        loss_scale: Tensor | float,
        before: Callable[[int], None],
        *,
        train: bool,
    ) -> Pass:
        shape = len(batches), self._shape(batches)
        if train not in self._schedules:
            check_same({"number": shape[0], "sizes": shape[1]}, "micro-batches", group=self.group)
            if train:
                self._refuse_in_halves()  # what has come since, such as working copies
        if train not in self._schedules or self._schedules[train][0] != shape:
            built = self._build(batches[0], len(batches), train=train)
            self._schedules[train] = shape, *built
        _, schedule, stages = self._schedules[train]
        passing = Pass(batches, self.first_input, len(batches) * self.dp_size, loss_scale, before)
        for stage in stages:
            stage.passing = passing
        # Torch splits what it is given by micro-batch: their numbers are all it needs.
        numbers = torch.arange(len(batches), device=batches[0][self.first_input].device)
        inputs = (numbers,) if self.indices[0] == 0 else ()
        target = numbers if train and self._stage(-1) is not None else None
        with repeatable_graphs() if self.kind.in_halves else nullcontext():
            schedule.step(*inputs, target=target, return_outputs=False)
        return passing

    def _refuse_in_halves(self) -> None:
        """Raise ValueError for stages whose backward passes the schedule cannot take apart."""
        if self.kind.in_halves:
            with refused_alike(self._mesh, "pp"):  # for what may be in one rank's stages alone
                _refuse_in_halves(self.schedule, self.stages, self.streams)

    def _checked(self, batches: Iterable[Batch]) -> list[Batch]:
        """`batches`, which have what travels here and are of one shape."""
        batches, names = list(batches), {self.first_input, *itertools.chain(*self.streams)}
        for batch in batches:
            entries = batch.keys() if isinstance(batch, Mapping) else ()
            if not names.issubset(entries):
                raise ValueError(
                    f"Expected micro-batches with the entries {', '.join(sorted(names))}, by "
                    f"first_input and streams, got {type(batch).__name__} of "
                    f"{', '.join(entries) or 'no entries'}."
                )
        self._shape(batches)
        return batches

    def _shape(self, batches: Sequence[Batch]) -> tuple[tuple[int, ...], ...]:
        """Of the entries that streams are as long as; the same in every batch."""
        names = list(dict.fromkeys(name for border in self.streams for name in border))
        shapes = {tuple(tuple(batch[name].shape[:2]) for name in names) for batch in batches}
        if len(shapes) != 1:
            told = ", ".join(" and ".join(map(str, one)) for one in sorted(shapes))
            raise ValueError(
                "Expected micro-batches of one shape, for hidden states travel in buffers of it; "
                f"got {told or 'none'}."
            )
        (shape,) = shapes
        for _, tokens in shape:
            if tokens % self.shards:
                raise ValueError(
                    f"Expected tp = {self.shards} to divide the {tokens} tokens of a sequence, "
                    "which sequence parallelism spreads over the tp ranks."
                )
        return shape

    def _build(self, batch: Batch, micro_batches: int, *, train: bool) -> tuple[Any, list[Any]]:
        """Torch's schedule and stages for such batches; it asks no stage for its shapes."""
        from mb_parallel.pipeline_parallel.engine import Stage

        device = batch[self.first_input].device

        def example(*size: int, dtype: torch.dtype) -> Tensor:
            differentiable = train and dtype.is_floating_point
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=differentiable)

        def crossing(border: int) -> tuple[Tensor, ...]:
            sizes = (batch[name].shape[:2] for name in self.streams[border])
            return tuple(
                example(sequences, tokens // self.shards, self.hidden_size, dtype=self.dtype)
                for sequences, tokens in sizes
            )

        number = example(1, dtype=torch.int64)
        loss = example(1, dtype=torch.promote_types(self.dtype, torch.float32))
        # What each stage is given, and what the last one returns.
        passed = [(number,), *map(crossing, range(self.num_stages - 1)), (loss,)]
        stages = [
            Stage(
                module,
                index,
                self.num_stages,
                device,
                input_args=passed[index],
                output_args=passed[index + 1],
                group=self.group,
                in_halves=self.kind.in_halves,
            )
            for index, module in zip(self.indices, self.stages, strict=True)
        ]
        # The losses are scaled already: the schedule is not to divide gradients.
        loss_fn = (lambda total, number: total) if train else None
        kind = self.kind.load(micro_batches=micro_batches, num_stages=self.num_stages, train=train)
        schedule = kind(
            stages if self.kind.many else stages[0],
            n_microbatches=micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,
        )
        return schedule, stages

    def _report(
        self, passing: Pass, measured: Callable[[dict[str, Tensor]], None], *, train: bool
    ) -> Losses:
        if train not in self._reports:
            self._reports[train] = Reports(passing, self.group)
        losses, metrics = self._reports[train].gather(passing)
        for of_batch in metrics:
            measured(of_batch)
        return losses

    def _by_stage(self, name: str, copies: str | Mapping[int, str]) -> dict[int, str]:
        """The names of a tied parameter by stage, in their order."""
        others = {-1: copies} if isinstance(copies, str) else copies
        by_stage = {0: name}
        for stage, other in others.items():
            place = stage % self.num_stages
            if place in by_stage or abs(stage) >= self.num_stages:
                raise ValueError(
                    f"Expected copies of {name!r} on stages from 1 to {self.num_stages - 1}, one "
                    f"on each, got {dict(others)}."
                )
            by_stage[place] = other
        return dict(sorted(by_stage.items()))

    def _stage(self, index: int) -> nn.Module | None:
        """The module of a stage if this rank has it; -1 is the last."""
        index %= self.num_stages
        return self.stages[self.indices.index(index)] if index in self.indices else None


def _refuse_in_halves(schedule: str, stages: list[nn.Module], streams: list[list[str]]) -> None:
    """Raise ValueError for what cannot run where torch takes backward passes apart."""
    modules = [module for stage in stages for module in stage.modules()]
    if any(zero_stage_of(stage) == 3 for stage in stages):
        # Torch looks for the weights in the graph by the parameters that the module has then,
        # which are shards: no gradient is found, and ranks wait for each other for ever.
        raise ValueError(
            f"Expected zero_stage 1 or 2 with {schedule}, which computes the gradients of weights "
            "apart and needs the weights whole from forward to backward, got 3."
        )
    if any(map(is_compiled, modules)):
        raise ValueError(  # as torch does, but in the first step
            f"Expected modules with {schedule} that torch.compile has not wrapped, since it takes "
            "backward passes apart, got one that is. Call module.compile(), which wraps none, with "
            "torch 2.13 or later, or take interleaved-1f1b."
        )
    if torch_release() < (2, 13) and any(map(is_compiled_in_place, modules)):
        # With experts gradients of 2.11 were wrong without an error, those of 2.13 right.
        raise ValueError(
            f"Expected modules that are not compiled with {schedule} on torch {torch.__version__}, "
            "which splits compiled backward passes wrongly, got one that is. Leave compile() out, "
            "or take interleaved-1f1b or torch 2.13."
        )
    if any(module.working_copies for module in modules if isinstance(module, Experts)):
        # Torch computes the gradients of a stage's parameters, and copies are none of them.
        raise ValueError(
            f"Expected experts without working copies with {schedule}, which would leave them "
            "without gradients. Do not call hold_working_copies, or take another schedule."
        )
    if any(map(reached_by_peers, modules)):
        # The second half computes with rows of the buffers that all layers and micro-batches share.
        raise ValueError(
            f"Expected experts that are reached by collectives with {schedule}, whose second half "
            "of a backward pass comes when the rows in peers' memory have been overwritten, got "
            "dispatcher 'peer'. Pass dispatcher='all_to_all' to parallelize_experts, or take "
            "interleaved-1f1b."
        )
    if any(len(names) > 1 for names in streams):
        raise ValueError(  # torch's two halves lose each other's places in the graph
            f"Expected one stream between stages with {schedule}, got {streams}. Take 1f1b or "
            "interleaved-1f1b."
        )
