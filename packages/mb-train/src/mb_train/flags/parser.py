"""The parsers of `mb-train`: of a training run, and of the commands beside it.

Flags of a run, their types and their help come from the fields of `TrainConfig`; nothing is listed
twice.
"""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any, NoReturn

from mb_train.config import GROUPS, TrainConfig, flag_name
from mb_train.config.field import NONE, spec, value_types
from mb_train.config.recipes import RECIPES
from mb_train.config.toml_file import UsageError
from mb_train.flags.refused import nearest
from mb_train.flags.settled import SETTLED
from mb_train.flags.translated import TRANSLATED

_TYPES = value_types(TrainConfig)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are exceptions.

    Attributes:
        of_a_word: what is said of one that belongs to no flag.
    """

    of_a_word = "See --help."

    def error(self, message: str) -> NoReturn:
        message = _EXPLICIT.sub(r"\1 takes no value, got ", message)
        if unknown := _UNKNOWN.match(message):
            word = unknown[1]
            near = f" {self.of_a_word}"
            if word.startswith("-"):
                near = nearest(word, self._option_string_actions)
            message = f"unknown argument {word or repr(word)}.{near}"
        raise UsageError(message[:1].upper() + message[1:])


# argparse's words for `--flag=value` where a flag stands alone, and for what it does not know.
_EXPLICIT = re.compile("argument (.*): ignored explicit argument ")
_UNKNOWN = re.compile(r"unrecognized arguments: ([^\s=]*)")
# Takes the parser of `mb-train NAME` and the words behind it, returns an exit code.
Command = Callable[[Parser, Sequence[str]], int]


def run_command(name: str, command: Command, arguments: Sequence[str]) -> int:
    """Run `mb-train NAME`; what its help says of it is the command's docstring."""
    about = inspect.getdoc(command)
    parser = Parser(prog=f"mb-train {name}", description=about, allow_abbrev=False)
    return command(parser, arguments)


def named(word: str) -> str:
    """The type of an argument that names a file, a folder or a host.

    A variable in quotes that is not set would name the current folder, which may hold a run too,
    or all addresses of this machine.
    """
    if not word:
        raise argparse.ArgumentTypeError("expected a name, got nothing")
    return word


def add_run(parser: Parser) -> None:
    """Arguments of a command that loads a run's model: the run, and the device to load it on."""
    parser.add_argument("run", type=named, help="run folder, or one of its iteration folders")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where to compute; auto, the default, takes a GPU if there is one",
    )  # fmt: skip


def refuse_idle(given: Mapping[str, Any], takes: Collection[str], where: str) -> None:
    """Raise ValueError for an argument that was given, not None, and is not among those taken."""
    for name, value in given.items():
        if value is not None and name not in takes:
            raise ValueError(f"Expected no {name}{where}, on which it has no effect.")


_ABOUT = """\
Train a transformer, dense or Mixture-of-Experts. With no flag: a small dropless MoE GPT on
Python's own library.

  mb-train --recipe dmoe-125m --data-path my_text_document
  mb-train --load runs/dmoe-125m
  torchrun --nproc_per_node 8 -m mb_train --recipe dmoe-125m --data-path my_text_document
"""


# Choices of more letters than this are in a flag's text, not in its line.
_LONG = 50


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=38, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]  # other spellings are in the text
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{name.removeprefix('--')}"
        if name == "-h" or action.nargs == 0:
            return ", ".join(action.option_strings[:2] if name == "-h" else [name])
        return f"{name} {self._format_args(action, action.dest.upper())}"


def build_parser(
    commands: Mapping[str, Command] = MappingProxyType({}), own: Parser | None = None
) -> argparse.ArgumentParser:
    """The parser of a training run; its result holds only what was typed.

    Args:
        commands: what else the program does, by name; their docstrings are for the help.
        own: see `parse`.
    """
    from mb_train import __version__

    parser = Parser(
        prog="mb-train",
        usage="mb-train [FLAGS]\n       mb-train COMMAND [ARGUMENTS]",
        description=_ABOUT + _listed(commands),
        epilog=f"(ours): Megatron-LM has no such flag. {len(SETTLED)} more flags are accepted from"
        " Megatron's scripts\nwithout effect, the matter being settled here. A run says which of"
        " them it was given, and why.",
        formatter_class=_Help,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        conflict_handler="error" if own is None else "resolve",
    )
    parser.add_argument("--version", action="version", version=f"mb-train {__version__}")
    top = parser.add_argument_group("the run")
    top.add_argument("--recipe", metavar="NAME", help=f"start from one of: {', '.join(RECIPES)}")
    top.add_argument("--config", metavar="FILE", help="read fields from a TOML file")
    top.add_argument(
        "--print-config", action="store_true", help="print the run as TOML and do nothing else"
    )
    for title, members in GROUPS.items():
        group = parser.add_argument_group(title)
        for f in fields(members):
            _add_field(group, f)
    for name, (valued, _) in {**SETTLED, **TRANSLATED}.items():
        kind: dict[str, Any] = {"nargs": valued} if isinstance(valued, str) else {}
        kind |= {} if valued else {"action": "store_true"}
        parser.add_argument(name, dest=name, help=argparse.SUPPRESS, **kind)
    for action in [] if own is None else own._actions:
        parser._add_action(action)
    return parser


def _listed(commands: Mapping[str, Command]) -> str:
    if not commands:
        return ""
    lines = []
    for name, call in commands.items():
        about, _, _ = (call.__doc__ or "").partition("\n")  # python -OO has none
        lines.append(f"  {name:10}{about}")
    return "\n".join(["\nother commands, each with a --help:", *lines])


def _add_field(group: Any, f: Field[Any]) -> None:
    kind, about = _TYPES[f.name], spec(f)
    names = [flag_name(f.name), *about.also]
    text = about.help.replace("%", "%%")
    if about.also:
        text += f" (also {', '.join(about.also)})"
    if kind is bool:
        # `--no-no-load-optim` would help nobody.
        negated = not f.name.startswith("no_")
        text += " (default yes)" if f.default else ""
        action = argparse.BooleanOptionalAction if negated else "store_true"
        group.add_argument(*names, action=action, dest=f.name, help=text)
        for name in about.off:
            group.add_argument(name, action="store_false", dest=f.name, help=argparse.SUPPRESS)
        return
    if f.default is not None:
        text += f" (default {f.default})"
    extra: dict[str, Any] = {"metavar": f.name.split("_")[-1].upper()}
    if about.choices:
        choices = about.choices
        if f.default is None:
            choices = (*choices, NONE)
        words = ", ".join(map(str, choices))
        if len(words) > _LONG:
            text += f"; one of {words}"
            extra["choices"] = choices
        else:
            extra = {"choices": choices}
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        extra |= {"nargs": about.count or "+"}

    def read(word: str) -> Any:
        if about.choices and f.default is None and word == NONE:
            return word
        return kind(about.said_as.get(word, word))

    read.__name__ = getattr(kind, "__name__", "value")  # as argparse names it
    group.add_argument(*names, type=read, dest=f.name, help=text, **extra)
