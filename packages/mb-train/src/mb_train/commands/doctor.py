"""`mb-train doctor`: describes this machine, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mb_train.flags.parser import Parser, named


def doctor(parser: Parser, arguments: Sequence[str]) -> int:
    """What is this machine, and what is wrong with it?"""
    parser.add_argument(
        "--save", type=named, default="runs", help="folder that runs would be written to"
    )
    options = parser.parse_args(arguments)
    from mb_train.machine.doctor import diagnose

    facts, problems = diagnose(Path(options.save))
    print("\n".join(facts))
    for problem in problems:
        print(f"problem: {problem}")
    print(f"problems found: {len(problems)}" if problems else "no problem found")
    return 1 if problems else 0
