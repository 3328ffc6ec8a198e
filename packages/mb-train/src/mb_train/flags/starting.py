"""What a command line starts: the configuration, and the checkpoint to go on from."""

from __future__ import annotations

import dataclasses

from mb_train.config import TrainConfig, flag_name
from mb_train.config.model import ROWS_OF_VOCABULARY
from mb_train.config.resume import check_changes
from mb_train.flags.command_line import CommandLine, resolve, without_effect
from mb_train.folder.run_folder import SavedRun, read_saved_run
from mb_train.folder.start import Resolved, Start, checkpoint_to_load, find_start, restarts_itself

_FP8 = (
    "FP8 is E4M3 with a scale for each row and each output channel, found anew at each product, "
    "whatever --fp8-format and --fp8-recipe say: gradients then need neither E5M2's range nor a "
    "history. Gradients of weights are products of what was not rounded"
)
_ANEW = (
    "NO CHECKPOINT IN {}: this run begins anew, with random weights, as Megatron's scripts do. "
    "--exit-on-missing-checkpoint makes that an error"
)


def resolve_start(command: CommandLine) -> Resolved:
    """The run that a command line asks for; its notes are those on the command line, too.

    Raises:
        ValueError: what was asked for does not fit together, or not with the checkpoint.
        OSError: files that cannot be read.
    """
    if command.values.get("skip_train"):  # of which scripts keep their --save
        command = dataclasses.replace(command, values={**command.values, "save": None})
    values = command.values  # a recipe has no --load
    load, save = values.get("load"), values.get("save")
    if not load:  # of an empty one `resolve` tells
        return _with_remarks(command, find_start(resolve(command)))
    finetune = bool(values.get("finetune"))
    itself = restarts_itself(load, save, finetune=finetune)
    script = command.whole and save is not None and not finetune
    may_begin = (itself or script) and not values.get("exit_on_missing_checkpoint")
    checkpoint = checkpoint_to_load(load, values.get("ckpt_step"), may_begin=may_begin)
    if checkpoint is None:
        begun = dataclasses.replace(resolve(command), load=None)
        return _with_remarks(
            command, Resolved(begun, notes=() if itself else (_ANEW.format(load),))
        )
    saved = read_saved_run(checkpoint)
    if not finetune:
        command = command.going_on()
    config = resolve(command, saved.inherited())
    if "save" not in values and not config.finetune:
        config = dataclasses.replace(config, save=str(checkpoint.parent))
    asked = {"train_iters", "train_samples"} & values.keys()
    start, idle = Start(checkpoint, saved), []
    if not asked and not config.skip_train and start.is_end_of(config):
        config = _prolong(config, saved)
        idle = _learns_nothing(config)
    changes = (*idle, *check_changes(saved.config, config))
    return _with_remarks(command, Resolved(config, start, changes))


def _with_remarks(command: CommandLine, run: Resolved) -> Resolved:
    remarks = [] if run.config.fp8_format is None else [_FP8]
    idle = [*without_effect(command, run.config), *_rows_stay(run)]
    notes = (*command.notes, *idle, *remarks, *run.notes)
    return dataclasses.replace(run, notes=notes)


def _rows_stay(run: Resolved) -> list[str]:
    """A remark on another padding of the vocabulary than the checkpoint's, which keeps its rows."""
    if run.start is None:
        return []
    saved = run.start.saved
    before = TrainConfig(**saved.inherited())
    said = ((name, getattr(run.config, name)) for name in ROWS_OF_VOCABULARY)
    return [
        f"no effect on the checkpoint's vocabulary, of {saved.vocab_rows:,} rows: "
        f"{flag_name(name)} {value}"
        for name, value in said
        if value not in (None, getattr(before, name))
    ]


def _prolong(config: TrainConfig, saved: SavedRun) -> TrainConfig:
    """`--load` of a finished run with no other length: go on for one more length of its schedule.

    The schedules stay the run's own, so the joined run is the one that a larger `--train-iters`
    with this `--lr-decay-iters` would have made; beyond the decay it trains at `--min-lr`, and at
    `--end-weight-decay`.
    """
    unit, done = "iters", saved.iteration
    if config.by_samples:
        unit, done = "samples", saved.consumed_samples
    length = getattr(config, f"train_{unit}")
    decay = getattr(config, f"lr_decay_{unit}") or length
    lengths = {f"train_{unit}": done + decay, f"lr_decay_{unit}": decay}
    if config.weight_decay_incr_style != "constant":
        incr = f"weight_decay_incr_{unit}"
        lengths[incr] = getattr(config, incr) or length
    return dataclasses.replace(config, **lengths)


def _learns_nothing(config: TrainConfig) -> list[str]:
    """A remark if a prolonged run has no learning rate beyond its decay."""
    if config.lr_decay_style == "constant" or config.min_lr or config.decoupled_min_lr:
        return []
    length = flag_name(f"lr_decay_{'samples' if config.by_samples else 'iters'}")
    return [
        "the run had come to its end, and goes on beyond its decay at --min-lr 0, where nothing is "
        f"learned: say another --min-lr, or a longer {length}"
    ]
