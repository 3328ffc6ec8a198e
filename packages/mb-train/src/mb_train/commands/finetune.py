"""`mb-train finetune RUN --task mnli`: a trained BERT learns to tell classes, on a user's files.

It is a run like any other, of the model and the tokenizer of RUN, with a head of its own: whatever
flag a run takes may follow. What is not said is as in Megatron-LM's example of the task: three
passes over the data, a rate of 5e-5 that falls in a line (RACE: 1e-5). All of the validation data
is evaluated after each pass, all test data at the end, and the folder is RUN-TASK.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mb_train.commands.train import print_config, tell_notes
from mb_train.config import TrainConfig, flag_name
from mb_train.config.masking import TASKS
from mb_train.config.moe import MoEFields
from mb_train.config.network import Network
from mb_train.flags.command_line import parse, resolve, without_effect
from mb_train.flags.parser import Parser, named
from mb_train.folder.run_folder import checkpoint_in, read_saved_run
from mb_train.machine.host import leads, prepare_host

# Besides the model: what its sequences and its vocabulary are.
_KEPT = (
    "seq_length", "tokenizer", "tokenizer_type", "vocab_file", "merge_file", "tokenizer_model",
    "vocab_extra_ids",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "model": "classifier", "micro_batch_size": 16, "lr": 5e-5, "lr_decay_style": "linear",
    "lr_warmup_fraction": 0.065, "weight_decay": 0.1, "clip_grad": 1.0, "log_interval": 10,
}  # fmt: skip
_OF_TASK: dict[str, dict[str, Any]] = {
    "race": {"micro_batch_size": 4, "lr": 1e-5, "lr_warmup_fraction": 0.06}
}


def finetune(parser: Parser, arguments: Sequence[str]) -> int:
    """Fine-tune the BERT of a run on pairs of sentences, or on questions with four answers.

    Takes the flags of a run beside its own.
    """
    parser.add_argument(
        "run", type=named, help="run folder of a BERT, or one of its iteration folders"
    )
    parser.add_argument(
        "--task", required=True, choices=TASKS, type=str.lower, help="what to learn"
    )
    for part in ("train", "valid"):
        parser.add_argument(
            f"--{part}-data", required=True, nargs="+", metavar="FILE",
            help="TSV below a line of names: sentences and label in columns 9, 10 and the last "
            "(mnli), or 4, 5 and 6 (qqp); of race JSON Lines, or a folder with files *.txt of them",
        )  # fmt: skip
    parser.add_argument("--epochs", type=float, help="passes over the data; default 3")
    command = parse(_run_first(arguments), own=parser)
    options = command.own
    if command.values.get("load") is not None:
        raise ValueError(
            "Expected no --load: fine-tuning begins with RUN's weights. One that was stopped goes "
            "on with mb-train --load and its own folder."
        )
    checkpoint = checkpoint_in(Path(options.run))
    run = read_saved_run(checkpoint)
    saved = run.inherited()
    if saved["model"] != "bert":
        raise ValueError(f"Expected a BERT in {options.run}, got {saved['model']}.")
    from mb_train.assembly.layout import parallel_dims
    from mb_train.tasks.classify import read_examples

    test = command.values.get("test_data_path") or options.valid_data
    examples, *evaluated = (
        len(read_examples(files, options.task))
        for files in (options.train_data, options.valid_data, test)
    )
    epochs = 3.0 if options.epochs is None else options.epochs
    if not 0 < epochs < math.inf:
        raise ValueError(f"Expected a number of --epochs above 0, got {epochs:g}.")
    length = next((n for n in ("train_iters", "train_samples") if n in command.values), None)
    if options.epochs is not None and length is not None:
        raise ValueError(f"Expected one of --epochs and {flag_name(length)}, got both.")
    names = [f.name for group in (Network, MoEFields) for f in dataclasses.fields(group)]
    base = {name: saved[name] for name in (*names, *_KEPT) if name in saved}
    base |= _DEFAULTS | _OF_TASK.get(options.task, {}) | {
        "task": options.task, "bert_load": options.run, "train_iters": 1,
        "train_data_path": options.train_data, "valid_data_path": options.valid_data,
        # As many as it had, however short the sequences are now.
        "max_position_embeddings": TrainConfig(**saved).position_rows,
        "save": _beside(checkpoint.parent, options.task),
    }  # fmt: skip
    config = resolve(command, base)
    dims = parallel_dims(config, int(os.environ.get("WORLD_SIZE", "1")))
    batch = config.batch_size(dims.data)
    lengths = {
        "train_iters": math.ceil(epochs * examples / batch),
        "eval_interval": math.ceil(examples / batch),
        "eval_iters": math.ceil(max(evaluated) / batch),
    }
    if "train_samples" in command.values:
        del lengths["train_iters"]
    said = command.values.keys()
    config = dataclasses.replace(config, **{n: lengths[n] for n in lengths.keys() - said})
    if command.print_config:
        return print_config(config)
    if leads():
        tell_notes((*command.notes, *without_effect(command, config)))
    return _run(config)


def _run_first(arguments: Sequence[str]) -> list[str]:
    """The arguments, with RUN for Megatron's --pretrained-checkpoint RUN."""
    flag, words = "--pretrained-checkpoint", []
    for word in arguments:
        words += word.split("=", 1) if word.startswith(f"{flag}=") else [word]
    if flag in words[:-1]:
        place = words.index(flag)
        words = [words[place + 1], *words[:place], *words[place + 2 :]]
    return words


def _beside(run: Path, task: str) -> str:
    """The folder of a run with a task behind its name."""
    named = run if run.name not in ("", "..") else run.resolve()
    return str(named.with_name(f"{named.name}-{task}"))


def _run(config: TrainConfig) -> int:
    """Train, then measure on all of each validation file, in this process."""
    prepare_host()
    from mb_train.loading import load_trained
    from mb_train.train import train

    result = train(config)
    code = result.exit_code(config)
    if not leads() or result.checkpoint is None:
        return code
    trained = load_trained(result.checkpoint, config.device, kinds=("classifier",))
    task = trained.task
    for path in config.valid_data_path or []:
        _, dataset, _ = task.build_datasets(
            {"train": None, "valid": [path], "test": None}, (0, 0, 0)
        )
        assert dataset is not None
        found = task.evaluate_more(trained.model, dataset, len(dataset))
        print(f" {len(dataset)} {'questions' if config.task == 'race' else 'pairs'} of {path}:")
        for name, value in found.items():
            print(f"  {name}: {value:.4f}")
    lost = ", the latest there is: the end of the run could not be saved"
    print(f" checkpoint: {result.checkpoint}{lost if result.unsaved(config) else ''}")
    return code
