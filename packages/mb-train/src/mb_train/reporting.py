"""How a run speaks: Megatron's log lines, and RUN/log.jsonl.

The lines are Megatron-LM's digit for digit, so that its parsers read them; what Megatron has no
field for is on a line of its own.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mb_train.config import whole

if TYPE_CHECKING:
    from mb_train.metrics import IntervalStats
    from mb_train.run import Run


def train_line(
    iteration: int,
    iterations: int,
    *,
    consumed_samples: int,
    elapsed_ms: float,
    lr: float,
    batch_size: int,
    losses: dict[str, float],
    grad_norm: float,
    params_norm: float | None,
    nan_iterations: int,
) -> str:
    """Megatron's progress line; `lr` is the rate of the next step, as there."""
    fields = [
        f" iteration {iteration:8d}/{iterations:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
        f"learning rate: {lr:.3E}",
        f"global batch size: {batch_size:5d}",
    ]
    fields += [f"{name}: {value:.6E}" for name, value in losses.items() if value > 0.0]
    fields += ["loss scale: 1.0", f"grad norm: {grad_norm:.3f}"]
    if params_norm is not None:
        fields.append(f"params norm: {params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {0:3d}",
        f"number of nan iterations: {nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


def report_interval(run: Run, stats: IntervalStats, *, seconds: float) -> None:
    """Print and log what the steps since the last report did, in `seconds` of training."""
    config, progress = run.config, run.progress
    seconds /= len(stats.lm_losses)
    losses = {name: stats.loss(name) for name in stats.losses}
    if stats.tokens_per_expert:
        balance = stats.mean("load_balancing_loss")
        losses["load balancing loss"] = config.moe_loss_weight * balance
        if config.moe_z_loss_weight:
            losses["z loss"] = config.moe_z_loss_weight * stats.mean("z_loss")
    lr = run.schedule.lr(progress.consumed_samples)
    tokens_per_s = run.batch_size * whole(config.seq_length) / seconds
    line = train_line(
        progress.iteration,
        run.iterations,
        consumed_samples=progress.consumed_samples,
        elapsed_ms=1000 * seconds,
        lr=lr,
        batch_size=run.batch_size,
        losses=losses,
        grad_norm=stats.grad_norm,
        params_norm=stats.params_norm,
        nan_iterations=stats.nan_iterations,
    )
    run.say(f"{line}\n{extra_line(tokens_per_s, stats)}")
    run.log.write(
        "train",
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        lm_losses=stats.lm_losses,
        **{name.replace(" ", "_"): value for name, value in losses.items()},
        lr=lr,
        batch_size=run.batch_size,
        grad_norm=stats.grad_norm,
        params_norm=stats.params_norm,
        ms_per_iteration=1000 * seconds,
        tokens_per_s=tokens_per_s,
        layers=stats.layer_means,
        load_imbalance=stats.load_imbalance,
        tokens_per_expert=stats.tokens_per_expert,
    )


def validation_lines(place: str, losses: dict[str, float]) -> str:
    """Megatron's validation line between two rules; `place` is "iteration 100", say."""
    line = f" validation loss at {place} | "
    for name, value in losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def perplexity(loss: float) -> float:
    """exp of a loss in nats, capped as in Megatron."""
    return math.exp(min(20.0, loss))


def extra_line(tokens_per_s: float, stats: IntervalStats) -> str:
    """What Megatron's line has no field for."""
    line = f"  tokens per second: {tokens_per_s:,.0f}"
    if stats.tokens_per_expert:
        loads = stats.load_imbalance
        worst = max(range(len(loads)), key=loads.__getitem__)
        line += (
            f" | expert load max/mean: {sum(loads) / len(loads):.2f}"
            f" (layer {worst}: {loads[worst]:.2f})"
            f" | dropped: {100 * stats.mean('dropped_fraction'):.1f} %"
            f" | router entropy: {stats.mean('router_entropy'):.3f}"
        )
    return line


class RunLog:
    """Appends events to RUN/log.jsonl, and scalars to TensorBoard; either may be absent."""

    def __init__(self, path: Path | None, board: Any = None) -> None:
        self._board = board
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
            self._file = path.open("a", encoding="utf-8")
            if torn:  # a kill cut the last line short: the next begins on its own
                self._file.write("\n")

    def write(self, event: str, **values: Any) -> None:
        """Append one object; not-a-number becomes null, so that every JSON reader takes it."""
        if self._file is not None:
            record = {"event": event, **values}
            self._file.write(json.dumps(_finite(record)) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in scalars(event, values).items():
                self._board.add_scalar(name, value, values["iteration"])
                if "consumed_samples" in values:
                    self._board.add_scalar(f"{name} vs samples", value, values["consumed_samples"])

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def scalars(event: str, values: dict[str, Any]) -> dict[str, float]:
    """What TensorBoard shows of an event, under Megatron's names where it has one."""
    if event == "eval":
        kind = "test" if "test" in values["place"] else "validation"
        return {f"lm loss {kind}": values["lm_loss"], f"lm loss {kind} ppl": values["ppl"]}
    if event != "train":
        return {}
    shown = {
        "lm loss": "lm_loss", "load balancing loss": "load_balancing_loss", "z loss": "z_loss",
        "learning-rate": "lr", "batch-size": "batch_size", "grad-norm": "grad_norm",
        "params-norm": "params_norm", "tokens-per-second": "tokens_per_s",
    }  # fmt: skip
    found = {name: values[key] for name, key in shown.items() if values.get(key) is not None}
    found["iteration-time"] = values["ms_per_iteration"] / 1000
    for layer, load in enumerate(values["load_imbalance"]):
        found[f"expert load max over mean/layer {layer}"] = load
    return found


def open_board(folder: str | None) -> Any:
    """TensorBoard's writer; None for no folder.

    Raises:
        ValueError: the tensorboard package is missing.
    """
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "Expected the tensorboard package for --tensorboard-dir, found none. Install it with "
            "pip install 'mb-train[tensorboard]', or leave the flag out."
        ) from None
    return SummaryWriter(folder)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_log(path: Path) -> list[dict[str, Any]]:
    """Events of a log. A line that a kill cut short is the event "torn", with its `line` number."""
    events = []
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        try:
            event = json.loads(line)
            whole = isinstance(event, dict) and isinstance(event.get("event"), str)
        except json.JSONDecodeError:
            whole = False
        events.append(event if whole else {"event": "torn", "line": number})
    return events
