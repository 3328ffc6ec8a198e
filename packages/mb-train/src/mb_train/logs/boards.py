"""What draws a run's scalars on its way: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from mb_train.config import TrainConfig
from mb_train.logs.megatron_lines import perplexity
from mb_train.words import missing_package


class Board(Protocol):
    """Something that draws scalars; `name` is what it is called."""

    name: str

    def add(self, values: dict[str, float], iteration: int, samples: int | None) -> None:
        """Add a point to each named curve."""

    def close(self) -> None:
        """Let it write what waits."""


# Megatron's name of a scalar -> the entry of a "train" event, and the switch that it has, if any.
_SCALARS: dict[str, tuple[str, str | None]] = {
    "learning-rate": ("lr", "log_learning_rate_to_tensorboard"),
    "batch-size": ("batch_size", "log_batch_size_to_tensorboard"),
    "loss-scale": ("loss_scale", "log_loss_scale_to_tensorboard"),
    "world-size": ("ranks", "log_world_size_to_tensorboard"),
    "mem-reserved-bytes": ("memory_reserved", "log_memory_to_tensorboard"),
    "mem-allocated-bytes": ("memory_allocated", "log_memory_to_tensorboard"),
    "grad-norm": ("grad_norm", None),
    "num-zeros": ("zeros_in_grad", None),
    "params-norm": ("params_norm", None),
    "tokens-per-second": ("tokens_per_s", None),
    "model-flops-utilization": ("mfu", None),
}


def scalars(event: str, values: dict[str, Any], config: TrainConfig) -> dict[str, float]:
    """What a board shows of an event, under Megatron's names where it has one."""
    if event == "measured":
        about = ("iteration", "place")
        return {f"{name} validation": value for name, value in values.items() if name not in about}
    if event == "eval":
        kind = "test" if "test" in values["place"] else "validation"
        shown = {f"{name} {kind}": loss for name, loss in values["losses"].items()}
        if config.log_validation_ppl_to_tensorboard:
            losses = values["losses"].items()
            shown |= {f"{name} {kind} ppl": perplexity(loss) for name, loss in losses}
        return shown
    if event != "train":
        return {}
    shown = dict(values["losses"])
    for name, (key, switch) in _SCALARS.items():
        wanted = switch is None or getattr(config, switch)
        if wanted and values.get(key) is not None:
            shown[name] = values[key]
    shown["iteration-time"] = values["ms_per_iteration"] / 1000
    if config.log_timers_to_tensorboard:
        for name, ranks in values.get("timers", {}).items():
            shown[f"{name}-time"] = max(ranks) / 1000
    for layer, load in zip(config.moe_layer_names, values["load_imbalance"], strict=True):
        shown[f"expert load max over mean/{layer}"] = load
    return shown


class Boards:
    """The boards of a run; one that fails is not used any more.

    Args:
        config: says which scalars they get.
        say: takes a line to print.
    """

    def __init__(
        self, boards: Iterable[Board], config: TrainConfig, say: Callable[[str], None]
    ) -> None:
        self._boards, self._config, self._say = list(boards), config, say

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Show what there is to see of an event."""
        shown = scalars(event, values, self._config) if self._boards else {}
        if shown:
            samples = values.get("consumed_samples")
            self._tell(lambda board: board.add(shown, values["iteration"], samples))

    def close(self) -> None:
        """Let them write what waits."""
        self._tell(lambda board: board.close())

    def _tell(self, what: Callable[[Board], None]) -> None:
        for board in list(self._boards):
            try:
                what(board)
            except Exception as error:  # of a full disk, a lost connection: a run outlives them
                self._boards.remove(board)
                self._say(f" {board.name} takes no more: {type(error).__name__}: {error}")


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add(self, values: dict[str, float], iteration: int, samples: int | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    name = "Weights & Biases"

    def __init__(self, run: Any) -> None:
        self._run = run

    def add(self, values: dict[str, float], iteration: int, samples: int | None) -> None:
        more = {} if samples is None else {"consumed samples": samples}
        self._run.log({**values, **more}, step=iteration)

    def close(self) -> None:
        self._run.finish()


def check_boards(config: TrainConfig) -> None:
    """Raise ValueError if the package of a board that a run asks for is missing."""
    if config.tensorboard_dir is not None:
        _tensorboard()
    if config.wandb_project is not None:
        _wandb()


def open_boards(config: TrainConfig, say: Callable[[str], None]) -> Boards:
    """The boards that a run asks for; none without their flags.

    Raises:
        ValueError: a package that is missing, or does not know the user.
        OSError: a folder that cannot be written.
    """
    boards: list[Board] = []
    if config.tensorboard_dir is not None:
        queue = config.tensorboard_queue_size
        boards.append(_TensorBoard(_tensorboard()(config.tensorboard_dir, max_queue=queue)))
    if config.wandb_project is not None:
        wandb = _wandb()
        try:
            run = wandb.init(
                project=config.wandb_project,
                entity=config.wandb_entity,
                name=config.wandb_exp_name,
                dir=config.wandb_save_dir or config.save,
                config=vars(config),
            )
        except wandb.Error as error:  # nobody is logged in, say
            raise ValueError(f"--wandb-project {config.wandb_project}: {error}") from error
        boards.append(_WandB(run))
    return Boards(boards, config, say)


def _tensorboard() -> Any:
    """What writes TensorBoard's files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard", "--tensorboard-dir", "'mb-train[tensorboard]'") from None
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb  # ty: ignore[import-not-found]  # only if it is asked for
    except ImportError:
        raise _missing("wandb", "--wandb-project", "wandb") from None
    return wandb


def _missing(package: str, flag: str, install: str) -> ValueError:
    return missing_package(package, f"for {flag}", install, ", or leave the flag out")
