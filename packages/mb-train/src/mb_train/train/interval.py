"""What is said and logged of the steps since the last report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mb_parallel import world_size

from mb_train.config import TrainConfig
from mb_train.logs.megatron_lines import train_line
from mb_train.logs.metrics import IntervalStats
from mb_train.logs.timers import timer_lines
from mb_train.machine.device import device_name
from mb_train.models.workload import Workload
from mb_train.plan.devices import data_sheet
from mb_train.plan.flops import flops
from mb_train.train.run import Run


@dataclass(frozen=True)
class Speed:
    """Throughput of an interval.

    Attributes:
        tokens_per_s: of all ranks together.
        ranks: that shared the work.
        tflops: model TFLOP/s of one rank.
        mfu: `tflops` as a share of the device's peak; None if the peak is not known.
    """

    tokens_per_s: float
    ranks: int
    tflops: float
    mfu: float | None


def speed(work: Workload, *, samples_per_s: float, ranks: int, device: str) -> Speed:
    """Throughput beside what the device could do at most."""
    tflops, sheet = sum(flops(work)) * samples_per_s / ranks / 1e12, data_sheet(device)
    mfu = None if sheet is None else tflops / sheet.peak_tflops
    return Speed(samples_per_s * work.tokens, ranks, tflops, mfu)


def report_interval(
    run: Run, stats: IntervalStats, *, seconds: float, samples: int, loss_scale: float = 1.0
) -> None:
    """Print and log what the steps since the last report did.

    Args:
        seconds: that they trained, without evaluation and checkpoints.
        samples: that they consumed.
        loss_scale: of the next step.
    """
    config, progress = run.config, run.progress
    steps = len(stats.lm_losses)
    seconds /= steps
    losses = named_losses(config, stats)
    lr = run.schedule.lr(progress.consumed_samples - run.skipped_samples)
    # The size of the last step, as in Megatron's line. If the ramp-up has just raised the size, it
    # is the next step's, unless the interval was that one step.
    batch_size = min(run.batch_sizes.size(progress.consumed_samples), samples)
    ranks, device = world_size(), device_name(run.device)
    pace = speed(
        run.task.workload, samples_per_s=samples / (steps * seconds), ranks=ranks, device=device
    )
    timers = run.timers.collect(steps=steps)
    both: dict[str, Any] = {
        "consumed_samples": progress.consumed_samples,
        "lr": lr,
        "batch_size": batch_size,
        "losses": losses,
        "loss_scale": loss_scale,
        "grad_norm": stats.grad_norm,
        "zeros_in_grad": stats.zeros_in_grad,
        "params_norm": stats.params_norm,
        "skipped_iterations": stats.skipped_iterations,
    }
    nan, elapsed_ms = stats.nan_iterations, 1000 * seconds
    lines = [
        train_line(
            progress.iteration,
            run.iterations,
            elapsed_ms=elapsed_ms,
            nan_iterations=nan,
            tflops=pace.tflops if config.log_throughput else None,
            **both,
        ),
        extra_line(pace, stats, config.moe_layer_names, run.model.steps_redone),
        timer_lines(timers, config.timing_log_option),
    ]
    run.say("\n".join(filter(None, lines)))
    on_gpu = run.device.type == "cuda"
    run.log.write(
        "train",
        iteration=progress.iteration,
        **both,
        **{name.replace(" ", "_"): value for name, value in losses.items()},
        lm_losses=stats.lm_losses,
        ranks=ranks,
        steps_redone=run.model.steps_redone,
        ms_per_iteration=elapsed_ms,
        tokens_per_s=pace.tokens_per_s,
        tflops_per_rank=pace.tflops,
        mfu=pace.mfu,
        timers=timers,
        memory_reserved=torch.cuda.max_memory_reserved(run.device) if on_gpu else None,
        memory_allocated=torch.cuda.max_memory_allocated(run.device) if on_gpu else None,
        layers=stats.layer_means,
        load_imbalance=stats.load_imbalance,
        tokens_per_expert=stats.tokens_per_expert,
    )


def named_losses(config: TrainConfig, stats: IntervalStats) -> dict[str, float]:
    """Every loss of the interval by Megatron's name, those of routers as they are weighted."""
    losses = {name: stats.loss(name) for name in stats.losses}
    if stats.tokens_per_expert:
        balance = stats.mean("load_balancing_loss")
        losses["load balancing loss"] = config.moe_loss_weight * balance
        if config.moe_z_loss_weight:
            losses["z loss"] = config.moe_z_loss_weight * stats.mean("z_loss")
    return losses


def extra_line(
    pace: Speed, stats: IntervalStats, moe_layers: Sequence[str] = (), steps_redone: int = 0
) -> str:
    """What Megatron's line has no field for.

    Args:
        moe_layers: names of those that `stats` has rows of.
    """
    line = f"  tokens per second: {pace.tokens_per_s:,.0f}"
    if pace.ranks > 1:
        line += f" | per GPU: {pace.tokens_per_s / pace.ranks:,.0f}"
    if pace.mfu is not None:
        line += f" | TFLOP/s per GPU: {pace.tflops:.1f} (MFU {100 * pace.mfu:.1f} %)"
    if stats.tokens_per_expert:
        loads = stats.load_imbalance
        worst = max(range(len(loads)), key=loads.__getitem__)
        line += (
            f" | expert load max/mean: {sum(loads) / len(loads):.2f}"
            f" ({moe_layers[worst]}: {loads[worst]:.2f})"
            f" | dropped: {100 * stats.mean('dropped_fraction'):.1f} %"
            f" | router entropy: {stats.mean('router_entropy'):.3f}"
        )
    if steps_redone:
        line += f" | steps run again for rows beyond the budget: {steps_redone}"
    return line
