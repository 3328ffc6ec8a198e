"""The training loop: set up a run, step, log, evaluate, save, stop.

Order within a step, as in Megatron-LM: forward and backward over the micro-batches, reduce,
clip, optimizer, log, evaluate, then the reasons to stop: SIGTERM, `--exit-duration-in-mins`,
`--exit-interval`, the end. Nothing is read back from the device but once per log interval. A run is
a function of its configuration alone: rates follow from the samples consumed, dropout from (seed,
step, micro-batch), so a run that is stopped and resumed takes the same steps to the bit on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import mb_data
import torch
from mb_parallel import (
    ParallelDims,
    any_rank,
    apply_data_parallel,
    clip_grad_norm,
    distributed,
    rank,
    set_gradient_sync,
    world_size,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from mb_train import run_folder
from mb_train.checkpoint import Progress, load_checkpoint, save_checkpoint
from mb_train.config import TrainConfig, whole
from mb_train.data import Data, Dataset, batches, prepare_data
from mb_train.flags import to_toml
from mb_train.metrics import (
    Accumulator,
    RunLog,
    extra_line,
    perplexity,
    train_line,
    validation_lines,
)
from mb_train.models.gpt import GPT
from mb_train.optimizer import apply_schedule, build_optimizer
from mb_train.run_folder import SavedRun
from mb_train.schedule import build_schedule, train_iterations, train_samples

# Nobody should wait longer than 10 s for a sign of life; steps of up to 2 s are allowed for.
_HEARTBEAT_S = 8.0


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses are None where nothing was measured."""

    iteration: int
    first_loss: float | None
    valid_loss: float | None
    checkpoint: Path | None
    stopped_by: str | None


def train(
    config: TrainConfig, *, checkpoint: Path | None = None, saved: SavedRun | None = None
) -> Result:
    """Train as `config` says, on this process or as one rank of a torchrun job.

    Args:
        checkpoint, saved: the checkpoint folder to go on from and its run.json, both or neither.

    Raises:
        ValueError: what was asked for does not fit together, the data or the machine; nothing has
            been written but, perhaps, the sample corpus.
        OSError: files that cannot be read or written.
    """
    device_type = _device_type(config)
    with distributed(device_type) as device, _sigterm() as terminated:
        run = _Run(config, device, checkpoint, saved)
        try:
            return run.loop(terminated)
        finally:
            run.log.close()


class _Run:
    """A run set up: model, data, optimizer and where it stands."""

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        checkpoint: Path | None,
        saved: SavedRun | None,
    ) -> None:
        self.config, self.device = config, device
        self.last_sign = time.monotonic()
        self.batch_size = config.batch_size(world_size())
        self.micro_batches = self.batch_size // (whole(config.micro_batch_size) * world_size())
        self.iterations = train_iterations(config, self.batch_size)
        self.schedule = build_schedule(config, self.batch_size)
        on_gpu = device.type == "cuda"
        bf16 = on_gpu if config.bf16 is None else config.bf16
        self.compute_dtype = torch.bfloat16 if bf16 else torch.float32

        tokenizer = mb_data.load_tokenizer(config.tokenizer)
        vocab_size = mb_data.padded_vocab_size(
            tokenizer.vocab_size, divisible_by=config.make_vocab_size_divisible_by
        )
        self.identity = {**config.model_identity(), "padded_vocab_size": vocab_size}
        if saved is not None:
            saved.check_model(self.identity)

        torch.manual_seed(config.seed)
        with device:
            self.model = GPT(config, vocab_size, compute_dtype=self.compute_dtype)
        parameters = sum(p.numel() for p in self.model.parameters())
        mesh = ParallelDims(dp=world_size()).build_mesh(device.type)
        apply_data_parallel(
            self.model,
            None if mesh is None else mesh["dp"],
            blocks=self.model.blocks,
            compute_dtype=self.compute_dtype,
            zero_stage=config.zero_stage,
        )
        self.optimizer = build_optimizer(self.model, config)
        self.progress = Progress(0, 0)
        if checkpoint is not None and saved is not None:
            optimizer = None if config.finetune or config.no_load_optim else self.optimizer
            load_checkpoint(checkpoint, self.model, optimizer)
            if not config.finetune:
                self.progress = Progress(saved.iteration, saved.consumed_samples)

        self.folder = Path(config.save) if config.save else None
        self.data = self._data(saved)
        self._open_folder(saved)
        self.say(
            f" model: {parameters:,} parameters | "
            f"{config.moe_num_experts or 'no'} experts per layer | {self.compute_dtype} on "
            f"{world_size()} x {_device_name(device)}"
        )
        if saved is not None:
            self.say(f" loaded {checkpoint}, at iteration {self.progress.iteration}")

    def _data(self, saved: SavedRun | None) -> Data:
        folder = (self.folder or Path("runs")) / "data"
        samples = train_samples(self.config, self.batch_size)
        data = prepare_data(self.config, self.batch_size, samples, folder, self.say)
        if saved is None or self.config.finetune:
            return data
        if saved.data.get("bin_bytes") != data.identity["bin_bytes"]:
            raise ValueError(
                f"Expected the data this run began with, {saved.data.get('bin_bytes')} bytes of "
                f".bin, got {data.identity['bin_bytes']}. Give the same --data-path, or begin a "
                "new run with --finetune."
            )
        if saved.data.get("epochs") != data.identity["epochs"]:
            self.say(
                f" note: a run of this length passes {data.identity['epochs']} times through its "
                f"data, not {saved.data.get('epochs')}: samples come in another order from here"
            )
        return data

    def _open_folder(self, saved: SavedRun | None) -> None:
        """Make the run folder ready: an earlier run's files move aside unless this one goes on."""
        if self.folder is None or rank() != 0:
            self.log = RunLog(None)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if saved is None or self.config.finetune:
            moved = run_folder.set_aside(self.folder)
            if moved is not None:
                self.say(f" {self.folder} holds an earlier run: moved to {moved}")
        run_folder.write_text(self.folder / run_folder.CONFIG_FILE, to_toml(self.config))
        self.log = RunLog(self.folder / run_folder.LOG_FILE)
        self.log.write(
            "start",
            iteration=self.progress.iteration,
            ranks=world_size(),
            device=_device_name(self.device),
            torch=torch.__version__,
            config=dataclasses.asdict(self.config),
        )

    def say(self, line: str) -> None:
        """Print a line, on rank 0."""
        self.last_sign = time.monotonic()
        if rank() == 0:
            print(line, flush=True)

    def sign_of_life(self, doing: str) -> None:
        """Say what is going on if nothing has been said for a while."""
        if time.monotonic() - self.last_sign > _HEARTBEAT_S:
            self.say(f"  {doing}")

    # The loop.

    def loop(self, terminated: Callable[[], bool]) -> Result:
        config, begun = self.config, time.monotonic()
        accumulator = Accumulator()
        stream = self._stream()
        first_loss, valid_loss, stopped_by, saved_at = None, None, None, -1
        evaluated_at = -1
        clock = _Clock(self.device)
        self.say(f" [before the start of training step] datetime: {_now()}")
        iteration = self.progress.iteration
        while iteration < self.iterations:
            grad_norm = self._step(stream, iteration, accumulator)
            iteration += 1
            self.progress = Progress(iteration, self.progress.consumed_samples + self.batch_size)
            stopped_by = self._reason_to_stop(iteration, begun, terminated)
            if iteration % config.log_interval == 0 or iteration == self.iterations or stopped_by:
                loss = self._report(accumulator, grad_norm, clock)
                first_loss = loss if first_loss is None else first_loss
            self.sign_of_life(f"iteration {iteration} of {self.iterations} is done")
            if config.eval_interval and iteration % config.eval_interval == 0:
                with clock.paused():
                    valid_loss = self._evaluate(self.data.valid, f"iteration {iteration}")
                evaluated_at = iteration
            if config.save_interval and iteration % config.save_interval == 0:
                with clock.paused():
                    self._save()
                saved_at = iteration
            if stopped_by:
                break
        self.say(f" [after training is done] datetime: {_now()}")
        if stopped_by is None:
            place = "the end of training for {} data"
            if evaluated_at == iteration and valid_loss is not None:
                self.say(validation_lines(place.format("val"), {"lm loss": valid_loss}))
            else:
                valid_loss = self._evaluate(self.data.valid, place.format("val"))
            self._evaluate(self.data.test, place.format("test"))
        else:
            self.say(f" stopping at iteration {iteration}: {stopped_by}")
        if saved_at != iteration:
            self._save()
        checkpoint = self.folder and self.folder / run_folder.iteration_folder(iteration)
        return Result(iteration, first_loss, valid_loss, checkpoint, stopped_by)

    def _stream(self) -> Generator[tuple[Tensor, Tensor]]:
        """Micro-batches from where the run stands; none if it is at its end."""
        if self.progress.iteration >= self.iterations:
            return
        yield from batches(
            self.data.train,
            self.device,
            consumed_samples=self.progress.consumed_samples,
            micro_batch_size=whole(self.config.micro_batch_size),
            workers=self.config.num_workers,
        )

    def _step(
        self, stream: Generator[tuple[Tensor, Tensor]], iteration: int, accumulator: Accumulator
    ) -> Tensor:
        """One optimizer step; returns the gradient norm, on the device."""
        apply_schedule(self.optimizer, self.schedule, self.progress.consumed_samples)
        self.model.train()
        total = torch.zeros((), device=self.device)
        for index in range(self.micro_batches):
            tokens_BS, labels_BS = next(stream)
            self._seed_micro_batch(iteration, index)
            set_gradient_sync(self.model, index == self.micro_batches - 1)
            output = self.model(tokens_BS, labels_BS)
            ((output.lm_loss + output.aux_loss) / self.micro_batches).backward()
            total += output.lm_loss.detach()
            accumulator.add_pass(output.metrics)
            self.sign_of_life(f"iteration {iteration + 1} of {self.iterations} is under way")
        grad_norm = clip_grad_norm(self.model.parameters(), self.config.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        accumulator.add_iteration(total / self.micro_batches)
        return grad_norm

    def _seed_micro_batch(self, iteration: int, index: int) -> None:
        """Dropout and jitter of a micro-batch depend on (seed, step, place in the global batch).

        So no state of a generator has to be saved, and any number of ranks draws the same.
        """
        config = self.config
        if not (config.attention_dropout or config.hidden_dropout or config.moe_jitter_eps):
            return
        place = index * world_size() + rank()
        torch.manual_seed(mix(config.seed, iteration, place))

    def _report(self, accumulator: Accumulator, grad_norm: Tensor, clock: _Clock) -> float:
        """Print and log the interval; returns its first loss."""
        config, progress = self.config, self.progress
        params_norm = self._params_norm() if config.log_params_norm else None
        stats = accumulator.collect(grad_norm, params_norm)
        steps = len(stats.lm_losses)
        seconds = clock.lap() / steps
        lr = self.schedule.lr(progress.consumed_samples)
        losses = {"lm loss": stats.lm_loss}
        if stats.tokens_per_expert:
            balance = config.moe_loss_weight * stats.mean("load_balancing_loss")
            losses["load balancing loss"] = balance
            if config.moe_z_loss_weight:
                losses["z loss"] = config.moe_z_loss_weight * stats.mean("z_loss")
        tokens_per_s = self.batch_size * whole(config.seq_length) / seconds
        self.say(
            train_line(
                progress.iteration,
                self.iterations,
                consumed_samples=progress.consumed_samples,
                elapsed_ms=1000 * seconds,
                lr=lr,
                batch_size=self.batch_size,
                losses=losses,
                grad_norm=stats.grad_norm,
                params_norm=stats.params_norm,
                nan_iterations=stats.nan_iterations,
            )
        )
        self.say(extra_line(tokens_per_s, stats))
        self.log.write(
            "train",
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            lm_losses=stats.lm_losses,
            **{name.replace(" ", "_"): value for name, value in losses.items()},
            lr=lr,
            grad_norm=stats.grad_norm,
            ms_per_iteration=1000 * seconds,
            tokens_per_s=tokens_per_s,
            layers=stats.layer_means,
            load_imbalance=stats.load_imbalance,
            tokens_per_expert=stats.tokens_per_expert,
        )
        return stats.lm_losses[0]

    @torch.no_grad()
    def _params_norm(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.detach() for p in self.model.parameters()])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def _evaluate(self, dataset: Dataset | None, place: str) -> float | None:
        """Mean loss over the first `eval_iters` batches of a set; None without one."""
        config = self.config
        if dataset is None:
            return None
        self.model.eval()
        total = torch.zeros((), device=self.device)
        passes = config.eval_iters * self.micro_batches
        stream = batches(
            dataset,
            self.device,
            consumed_samples=0,
            micro_batch_size=whole(config.micro_batch_size),
            workers=config.num_workers,
        )
        with contextlib.closing(stream):
            for done in range(passes):
                total += self.model(*next(stream)).lm_loss
                self.sign_of_life(f"evaluation: {done + 1} of {passes} batches are done")
        total /= passes * world_size()
        if world_size() > 1:
            torch.distributed.all_reduce(total)
        loss = float(total)
        self.say(validation_lines(place, {"lm loss": loss}))
        iteration = self.progress.iteration
        self.log.write("eval", iteration=iteration, place=place, lm_loss=loss, ppl=perplexity(loss))
        return loss

    def _save(self) -> None:
        if self.folder is None:
            return
        iteration = self.progress.iteration
        self.say(f" saving checkpoint at iteration {iteration:7d} to {self.folder}")
        begun = time.monotonic()
        save_checkpoint(
            self.folder,
            self.model,
            None if self.config.no_save_optim else self.optimizer,
            self.progress,
            config=dataclasses.asdict(self.config),
            identity=self.identity,
            data=self.data.identity,
        )
        self.log.write("save", iteration=iteration, seconds=time.monotonic() - begun)
        self.say(f" successfully saved checkpoint at iteration {iteration:7d} to {self.folder}")

    def _reason_to_stop(
        self, iteration: int, begun: float, terminated: Callable[[], bool]
    ) -> str | None:
        """Why to save and stop before the end, agreed by all ranks."""
        config = self.config
        if any_rank(terminated()):
            return "SIGTERM"
        if config.exit_duration_in_mins is not None:
            minutes = (time.monotonic() - begun) / 60
            if any_rank(minutes > config.exit_duration_in_mins):
                return f"--exit-duration-in-mins {config.exit_duration_in_mins:g}"
        interval = config.exit_interval
        if interval is not None and iteration % interval == 0 and iteration < self.iterations:
            return f"--exit-interval {interval}"
        return None


class _Clock:
    """Time spent training: what is paused does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap; the caller has just waited for the device."""
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return elapsed

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        self._wait()
        begun = time.perf_counter()
        yield
        self._wait()
        self._start += time.perf_counter() - begun

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def mix(*numbers: int) -> int:
    """A 63-bit seed that differs for different numbers (splitmix64, Steele et al. 2014)."""
    state, mask = 0, (1 << 64) - 1
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


def _device_type(config: TrainConfig) -> str:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("Expected a GPU for --device cuda, found none. See mb-train doctor.")
    return "cuda" if available and config.device != "cpu" else "cpu"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


@contextlib.contextmanager
def _sigterm() -> Generator[Callable[[], bool]]:
    """Turn SIGTERM into a flag to look at between steps, for as long as the context lasts."""
    seen = False

    def note(*_: object) -> None:
        nonlocal seen
        seen = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGTERM, previous)
