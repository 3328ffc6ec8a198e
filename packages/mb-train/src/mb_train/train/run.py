"""A run set up: device, model, data, optimizer, log, and where it stands.

Everything that can be wrong with a run is found here, before its folder is touched: sizes that do
not fit the ranks, a checkpoint of another model, missing or damaged data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from mb_data import Tokenizer
from mb_data.samples.readers import made_by_python
from mb_parallel import ParallelMesh, check_same, rank, world_size
from mb_parallel.optimizer import describe
from torch import Tensor

from mb_train.assembly import layout
from mb_train.assembly.assemble import Assembled, assemble
from mb_train.assembly.balance import LoadBalance
from mb_train.assembly.compile_ahead import compile_experts, compile_step, outcome
from mb_train.assembly.optimizer import build_optimizer, build_scaler
from mb_train.checkpoint.read import Progress, load_checkpoint
from mb_train.checkpoint.saver import Saver
from mb_train.config import TrainConfig, whole
from mb_train.config.field import in_flags
from mb_train.data.batches import batches
from mb_train.data.datasets import Data, prepare_data
from mb_train.data.named import check_files
from mb_train.data.same import check_same_data
from mb_train.data.vocabulary import vocabulary_of
from mb_train.folder.run_folder import LOG_FILE
from mb_train.folder.start import Start
from mb_train.logs.boards import check_boards, open_boards
from mb_train.logs.console import Console
from mb_train.logs.megatron_lines import (
    argument_lines,
    datetime_line,
    loaded_line,
    parameters_line,
    vocabulary_line,
    world_line,
)
from mb_train.logs.run_log import RunLog
from mb_train.logs.timers import Timers
from mb_train.machine.device import check_fp8, compute_dtype, device_name, precision_note
from mb_train.machine.rank_zero import on_all_ranks, on_rank_zero
from mb_train.machine.signals import StopFlag
from mb_train.machine.versions import versions
from mb_train.models.mtp import names_of_modules
from mb_train.plan.words import memory_warning
from mb_train.schedule import BatchSizes, Schedule, build_schedule, train_iterations, train_samples
from mb_train.tasks import Batch, Dataset, Task, make_task
from mb_train.train.own_folder import check_shared, take_over
from mb_train.train.profiling import check_profiled


class Run:
    """What the loop works on.

    Args:
        config: the run.
        device: this rank's.
        start: None for a run from scratch.

    Raises:
        ValueError: things that do not fit together; says which.
        OSError: files that cannot be read or written.
    """

    def __init__(self, config: TrainConfig, device: torch.device, start: Start | None) -> None:
        console = Console(silent=rank() != 0)
        self.say, self.sign_of_life = console.say, console.show
        self._console = console
        self.device = device
        self.directory = os.getcwd()  # where relative paths of the configuration begin
        self.log = RunLog(None)
        self.saver: Saver | None = None
        self.config, self.mesh, self.batch_sizes = _laid_out(config, device)
        try:
            self._set_up(start)
        except BaseException as error:
            self.close(together=isinstance(error, (ValueError, OSError)))
            raise

    def _set_up(self, start: Start | None) -> None:
        config, device, dims = self.config, self.device, self.mesh.dims
        self._place(start)
        self.compute_dtype = compute_dtype(config, device.type)
        self.say(
            world_line(
                world_size(), data=dims.data, context=dims.cp, tensor=dims.tp, pipeline=dims.pp
            )
        )
        self.timers = Timers(device, level=config.timing_log_level, option=config.timing_log_option)
        self.say(argument_lines(config))
        tokenizer = self._choose_task(start)
        compiling = self._build_model(start)
        self.folder = Path(config.save) if config.save else None
        with self.timers("train/valid/test-data-iterators-setup"):
            self.data = self._prepare_data(start, tokenizer)
        self.say(datetime_line("after dataloaders are built"))
        on_rank_zero(lambda: self._open_log(start))  # now that nothing is wrong
        self.saver = self._open_saver()
        self._tell(start, compiling)

    def _tell(self, start: Start | None, compiling: dict[str, Future[int] | None]) -> None:
        """What a run says of itself before its first step, for which it waits for the kernels."""
        self.say(
            f" model: {self.model.parameters:,} parameters | "
            f"{self.config.moe_num_experts or 'no'} experts per layer | {self.compute_dtype} on "
            f"{world_size()} x {device_name(self.device)}"
        )
        if start is None and (note := precision_note(self.config, self.device.type)):
            self.say(f" {note}")
        if start is not None:
            self.say(loaded_line(self.progress.iteration, start.checkpoint))
        with self.timers("kernel-compilation-wait"):
            for what, kernels in compiling.items():
                if kernels is not None:
                    self.say(outcome(what, kernels))
        self.say("done with setup ...")
        self.say(self.timers.lines())

    def _place(self, start: Start | None) -> None:
        """Where the run stands, how far it goes and at which rates."""
        config = self.config
        self.progress = Progress(0, 0)
        if start is not None and not config.finetune:
            self.progress = Progress(start.saved.iteration, start.saved.consumed_samples)
        self.iterations = train_iterations(
            config,
            self.batch_sizes,
            iteration=self.progress.iteration,
            consumed_samples=self.progress.consumed_samples,
        )
        if config.skip_train:
            self.iterations = self.progress.iteration
        self.schedule: Schedule = build_schedule(config, self.batch_sizes.full)

    def _choose_task(self, start: Start | None) -> Tokenizer:
        """What is learned, from what text; gives the tokenizer of that."""
        config, device = self.config, self.device

        def read() -> tuple[Tokenizer, int]:
            directory = "." if start is None else start.saved.state.get("directory", ".")
            check_files(config, directory)
            return vocabulary_of(config, start, ranks=self.mesh.tp_size)

        tokenizer, self.vocab_size = on_all_ranks(read)
        self.identity = config.model_identity(
            vocab_size=self.vocab_size, tokenizer=tokenizer.fingerprint
        )
        check_same(self.identity, "the model")
        if start is not None:
            start.saved.check_model(self.identity)
        self.task: Task = make_task(config, tokenizer, vocab_size=self.vocab_size, mesh=self.mesh)
        self.say(vocabulary_line(tokenizer.vocab_size, self.vocab_size))
        warning = memory_warning(config, self.vocab_size, world_size(), device, device_name(device))
        if warning is not None:
            self.say(warning)
        return tokenizer

    def _build_model(self, start: Start | None) -> dict[str, Future[int] | None]:
        """The model and what trains it; gives the kernels that are being compiled meanwhile."""
        config, device = self.config, self.device
        experts = compile_experts(config, self.mesh, device, self.compute_dtype)
        with self.timers("model-and-optimizer-setup"):
            with in_flags(layout.NAMED):
                self.model: Assembled = assemble(
                    self.task, config, self.mesh, device, self.compute_dtype
                )
            self.optimizer = build_optimizer(self.model, config)
            step = compile_step(
                config, self.mesh, self.model, self.optimizer, device, self.compute_dtype,
                vocab_size=self.vocab_size,
                micro_batches=self.batch_sizes.micro_batches(self.batch_sizes.full),
            )  # fmt: skip
            self.scaler = build_scaler(config)
            self.load_balance = LoadBalance(self.model.parts, config, self.mesh)
            # That the schedule does not count, as Megatron's: of steps that an overflow skipped,
            # and all before a start without the state of an optimizer.
            self.skipped_samples = 0
            # This rank's of the last step, on the device.
            self.last_losses: dict[str, Tensor] = {}
            if start is not None:
                self._load(start)
        self.say(
            parameters_line(
                sum(p.numel() for part in self.model.parts for p in part.parameters()),
                tensor_rank=self.mesh.tp_rank,
                pipeline_rank=self.mesh.pp_rank,
            )
        )
        for note in (*self.model.notes, describe(self.optimizer)):
            self.say(f" {note}")
        self.say(datetime_line("after model, optimizer, and learning rate scheduler are built"))
        return {"the experts": experts, "the step": step}

    def _load(self, start: Start) -> None:
        """Go on from a checkpoint: its weights, its optimizer's state and loss scale."""
        config = self.config
        without = config.finetune or config.no_load_optim or config.skip_train
        optimizer = None if without else self.optimizer
        # Modules for further tokens, if --finetune drops some, or has more and these begin anew.
        there = TrainConfig(**start.saved.inherited()).mtp_num_layers
        left_out = names_of_modules(*sorted((there, config.mtp_num_layers)))
        load_checkpoint(start.checkpoint, self.model.parts, optimizer, left_out=left_out)
        if config.finetune:
            return
        if config.no_load_optim:
            self.skipped_samples = start.saved.consumed_samples
            return
        self.skipped_samples = start.saved.state.get("skipped_samples", 0)
        if self.scaler is not None and "loss_scale" in start.saved.state:
            # A constant scale is what the flag says, not what the checkpoint does.
            constant = {} if config.loss_scale is None else {"scale": config.loss_scale}
            self.scaler.load_state_dict(start.saved.state["loss_scale"] | constant)

    def state(self) -> dict[str, Any]:
        """What a run goes on with beside its tensors and its progress, see `SavedRun.state`."""
        state: dict[str, Any] = {
            "skipped_samples": self.skipped_samples,
            "directory": self.directory,
        }
        if self.scaler is not None:
            state["loss_scale"] = self.scaler.state_dict()
        return state

    def _prepare_data(self, start: Start | None, tokenizer: Tokenizer) -> Data:
        folder = (self.folder or Path("runs")) / "data"
        batch_size = self.batch_sizes.full
        samples = train_samples(self.config, batch_size)
        if not self.config.by_samples:  # more, if batches were larger until now
            left = (self.iterations - self.progress.iteration) * batch_size
            samples = max(samples, self.progress.consumed_samples + left)
        data = prepare_data(
            self.config, self.task, batch_size, samples, folder, self.say,
            tokenizer=tokenizer, vocab_size=self.vocab_size,
        )  # fmt: skip
        check_same(data.identity, "the data")
        if start is None or self.config.finetune:
            return data
        check_same_data(start.saved.data, data.identity, self.say)
        return data

    def _open_log(self, start: Start | None) -> None:
        """The log of rank 0, in a folder that is this run's from here on.

        Boards have none of a run that only evaluates, as Megatron's.
        """
        if self.config.skip_train:
            return
        boards = open_boards(self.config, self.say)
        self.log = RunLog(None, boards)  # which closes them, come what may
        if self.folder is None:
            return
        take_over(self.folder, self.config, start, self.say)
        self.log = RunLog(self.folder / LOG_FILE, boards)
        self.log.write(
            "start",
            iteration=self.progress.iteration,
            iterations=self.iterations,
            ranks=world_size(),
            device=device_name(self.device),
            torch=torch.__version__,
            parameters=self.model.parameters,
            tokens_per_sample=self.task.workload.tokens,
            notes=self.model.notes,
            moe_layers=self.config.moe_layer_names,
            config=dataclasses.asdict(self.config),
        )

    def _open_saver(self) -> Saver | None:
        """None for a run that keeps nothing, or its log alone."""
        config = self.config
        if self.folder is None or config.save_interval == 0:
            return None
        return Saver(
            self.folder,
            asynchronous=config.async_save,
            keep=config.checkpoints_kept,
            retain=config.save_retain_interval,
            say=self.say,
        )

    def close(self, *, together: bool) -> None:
        """Close the log, end the saver's threads, and leave the groups that the run has made.

        Args:
            together: whether all ranks are here. Others may wait for this one within the groups,
                and to leave those of a GPU this one would wait for them: so they stay.
        """
        with contextlib.ExitStack() as ended:
            if together:
                ended.callback(self.mesh.close)
            if self.saver is not None:
                ended.callback(self.saver.close)
            ended.callback(self.log.close)
            self._console.clear()

    def stream(
        self, dataset: Dataset, *, consumed_samples: int, stop: StopFlag
    ) -> Generator[Batch]:
        """This rank's micro-batches of a set from there on, on its device. See `batches`."""
        return batches(
            self.task,
            dataset,
            self.device,
            self.mesh,
            consumed_samples=consumed_samples,
            micro_batch_size=whole(self.config.micro_batch_size),
            workers=self.config.num_workers,
            vocab_size=self.vocab_size,
            cyclic=self.config.dataloader_type == "cyclic",
            apart=self.device.type == "cuda" and made_by_python(dataset),
            stop=stop,
        )

    def reports(self, iteration: int) -> bool:
        """Whether a progress line is due after this step, whatever happens in it."""
        return iteration % self.config.log_interval == 0 or iteration == self.iterations


def _laid_out(
    config: TrainConfig, device: torch.device
) -> tuple[TrainConfig, ParallelMesh, BatchSizes]:
    """The run as it is on these ranks, their meshes, and the batches that they share."""
    check_profiled(config, device)
    check_fp8(config, device)
    check_boards(config)
    if world_size() > 1:
        check_same(versions(), "the program")
    check_same(config, "the configuration")  # before groups: other sizes would make others
    if config.save and config.save_interval != 0:
        check_shared(Path(config.save))
    dims = layout.parallel_dims(config, world_size())
    batch_size = config.batch_size(dims.data)
    # What the ranks of this start decided stays the run's own, on however many it goes on.
    config = dataclasses.replace(config, global_batch_size=batch_size)
    sizes = BatchSizes(config, batch_size, step=whole(config.micro_batch_size) * dims.data)
    layout.check_schedule(config, list(map(sizes.micro_batches, sizes.all)))
    return config, dims.build(device.type), sizes
