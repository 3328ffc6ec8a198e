"""Going on from a checkpoint: which fields are taken over, and which changes matter.

What becomes of a field is said by its own metadata, see `OnLoad`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from mb_train.config.field import flag_name, spec
from mb_train.config.rates import RateFields
from mb_train.config.train_config import TrainConfig
from mb_train.config.training import RegularizationFields

# Fields of the schedules, of learning rate and weight decay.
OF_SCHEDULES = (
    *(f.name for f in fields(RateFields)),
    *(f.name for f in fields(RegularizationFields) if "weight_decay" in f.name),
)


def inherited(saved: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of a saved configuration that a run which goes on from it starts with.

    Args:
        saved: fields by name, as a run was started with.
        source: the file they are from, for the message.

    Raises:
        ValueError: a field that this version does not know.
    """
    known = {f.name: spec(f).on_load for f in fields(TrainConfig)}
    for name in saved:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", the nearest is {near[0]!r}" if near else ""
            raise ValueError(
                f"{source} holds {name!r}, which this version does not know{hint}. It was written "
                "by another version: take that one, or give the file a field that exists."
            )
    return {name: value for name, value in saved.items() if known[name] != "own"}


def schedules(saved: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a saved run's schedules, of learning rate and weight decay.

    They last as long as they would have, however long the run that takes them over.

    Args:
        saved: fields by name, as a run was started with.
        values: those of the run that takes them over.

    Raises:
        ValueError: the schedules are in steps, and these have another size.
    """
    batch, here = saved.get("global_batch_size"), values.get("global_batch_size")
    if batch not in (None, here) and values.get("train_samples") is None:
        raise ValueError(
            f"Expected --global-batch-size {batch}, that of --load, with --use-checkpoint-opt-"
            f"param-scheduler, whose schedules are in steps of that size, got {here}. Leave it as "
            "it was, or say the schedules."
        )
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    found = {name: saved.get(name, defaults[name]) for name in OF_SCHEDULES}
    constant = found["weight_decay_incr_style"] == "constant"
    for course in ("lr_decay",) if constant else ("lr_decay", "weight_decay_incr"):
        for unit in ("iters", "samples"):
            found[f"{course}_{unit}"] = found[f"{course}_{unit}"] or saved.get(f"train_{unit}")
    return found


def check_changes(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Compare a run with the saved configuration it goes on from.

    Returns:
        A line for everything that alters the course of the run.

    Raises:
        ValueError: another model; or, unless the run is a new one from the weights, a change that
            a run cannot survive.
    """
    before = TrainConfig(**inherited(saved, "The checkpoint"))
    for name, there, here in _differences(before, config, "model"):
        raise ValueError(
            f"The checkpoint is of another model: its {name} is {there}, this run's is {here}. "
            "Give the checkpoint's to go on, or leave --load out."
        )
    if config.finetune:
        return []
    changed = list(_differences(before, config, "said"))
    for name, there, here in _differences(before, config, "fixed"):
        without = ""
        if name == "--optimizer":
            if config.no_load_optim:
                changed.append((name, there, here))
                continue
            without = "leave the old one's state out with --no-load-optim, "
        raise ValueError(
            f"Expected {name} {there}, with which the run to go on from was started, got {here}. "
            f"Leave it as it was, {without}or begin a new run from its weights with --finetune."
        )
    changes = [
        f"{name} was {there} until now, and is {here} from here on" for name, there, here in changed
    ]
    size = config.global_batch_size
    other = before.global_batch_size != size or before.rampup_batch_size is not None
    if other and not config.by_samples and not config.no_load_optim:
        changes.append(
            "schedules in steps go on as if all samples so far had come in batches of "
            f"{size}, and so jump; in samples (--train-samples, --lr-decay-samples) they do not"
        )
    if config.no_load_optim:
        changes.append("with --no-load-optim the schedules begin anew from here, as in Megatron")
    return changes


def _differences(
    before: TrainConfig, now: TrainConfig, on_load: str
) -> Iterator[tuple[str, Any, Any]]:
    """The flag, the value in force before, and the one in force now.

    Values that only follow from a flag of another one come last.
    """
    following = []
    for name, field_names in TrainConfig.names_on_load(on_load).items():
        there, here = getattr(before, name), getattr(now, name)
        if there == here:
            continue
        # What does nothing alters nothing. Of a model's fields a checkpoint itself keeps all.
        idle = all(run.lacking(field) for run in (before, now) for field in field_names)
        if idle and on_load != "model":
            continue
        # Of several fields behind one value, name those that differ.
        moved = [n for n in field_names if getattr(before, n) != getattr(now, n)]
        if moved and any(isinstance(value, (list, tuple)) for value in (there, here)):
            # What several flags say together is not what any of them says.
            there, here = (" / ".join(str(getattr(r, n)) for n in moved) for r in (before, now))
        elif len(moved) == 1:  # None in force stands for a 0 that was typed, say
            there, here = (
                getattr(run, moved[0]) if value is None else value
                for run, value in ((before, there), (now, here))
            )
        difference = " / ".join(map(flag_name, moved or field_names)), there, here
        if moved:
            yield difference
        else:
            following.append(difference)
    yield from following
