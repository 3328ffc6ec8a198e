"""`mb-train plan`: predicts what a run will need, from its flags."""

from __future__ import annotations

from collections.abc import Sequence

from mb_train.commands.train import print_config, tell_notes
from mb_train.flags.command_line import parse
from mb_train.flags.parser import Parser
from mb_train.flags.starting import resolve_start


def plan(parser: Parser, arguments: Sequence[str]) -> int:
    """What a run will need: parameters, memory per GPU, FLOPs, time of a step.

    Takes the flags of a run beside its own.
    """
    parser.add_argument("--gpus", type=int, help="ranks; default as many GPUs as there are, or 1")
    parser.add_argument("--gpu", help="name of the GPU (H200, MI300X, ...); default the one here")
    command = parse(arguments, own=parser)
    options = command.own
    resolved = resolve_start(command)
    config, start = resolved.config, resolved.start
    if command.print_config:
        return print_config(config)
    tell_notes(resolved.notes)
    import torch

    from mb_train.data.vocabulary import vocabulary_of
    from mb_train.plan.sizing import sizes
    from mb_train.plan.words import describe

    there = torch.cuda.device_count()
    ranks = (there or 1) if options.gpus is None else options.gpus
    if ranks < 1:
        raise ValueError(f"Expected --gpus of at least 1, got {ranks}.")
    here = torch.cuda.get_device_name(0) if there and config.device != "cpu" else "CPU"
    device = options.gpu or here
    _, vocab_size = vocabulary_of(config, start, ranks=config.tensor_model_parallel_size)
    found = sizes(config, vocab_size, ranks, device)
    print("\n".join(describe(config, found, ranks=ranks, device=device)))
    return 0
