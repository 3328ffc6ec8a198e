"""The command line, TOML files and recipes as layers of one configuration.

Later layers win: Megatron's defaults, what a `--load`ed run was started with, a recipe, `--config
run.toml`, then the flags typed. With no word about the model the recipe is `quickstart`.
Flags, their types and their help come from the fields of `TrainConfig`; nothing is listed twice.
"""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from mb_train.config import TrainConfig, flag_name
from mb_train.recipes import RECIPES, recipe

# Flags of Megatron's scripts whose question is settled here: accepted, and answered with a note.
SETTLED: dict[str, tuple[int, str]] = {
    "--DDP-impl": (1, "data parallelism is always FSDP2"),
    "--use-distributed-optimizer": (0, "optimizer state is always sharded"),
    "--no-async-tensor-model-parallel-allreduce": (0, "there is no such switch to turn off"),
    "--no-gradient-accumulation-fusion": (0, "gradients accumulate in fp32, nothing is fused"),
    "--use-flash-attn": (0, "attention always takes the fastest kernel of torch"),
    "--moe-expert-model-parallelism": (0, "experts are sharded over the ranks by FSDP2"),
    "--moe-lbl-in-fp32": (1, "the load-balancing loss is always computed in fp32"),
    "--exit-signal-handler": (0, "SIGTERM always saves and exits"),
    "--data-impl": (1, "data files are always memory-mapped"),
    "--distributed-backend": (1, "the device decides: NCCL on GPUs, gloo on CPUs"),
}  # fmt: skip
_TOKENIZER_TYPES = {"GPT2BPETokenizer": "gpt2"}
_SIZE_FIELDS = ("num_layers", "hidden_size", "num_attention_heads")


class UsageError(ValueError):
    """The command line cannot be understood: one line for stderr, exit code 2."""


@dataclass(frozen=True)
class CommandLine:
    """What was typed or read from `--config`: fields by name, the recipe, remarks to print."""

    values: dict[str, Any]
    recipe: str | None
    print_config: bool
    notes: tuple[str, ...]


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are exceptions."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message[:1].upper() + message[1:])


def _value_type(annotation: Any) -> Any:
    """`int | None` -> int; other annotations as they are."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = (a for a in typing.get_args(annotation) if a is not types.NoneType)
    return annotation


FIELD_TYPES: dict[str, Any] = {
    name: _value_type(annotation) for name, annotation in typing.get_type_hints(TrainConfig).items()
}


def build_parser(prog: str = "mb-train") -> argparse.ArgumentParser:
    """The parser of a training run; `values` holds only what was typed."""
    parser = Parser(
        prog=prog,
        description="Train a GPT, dense or Mixture-of-Experts. With no flag: a small dropless MoE "
        "on Python's own library.",
        epilog="Also: mb-train generate RUN (text from it), mb-train report RUN (draw its curves), "
        "mb-train doctor (what is this machine?). Accepted from Megatron scripts without effect, "
        "the matter being settled here: "
        + ", ".join(SETTLED) + ".",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    top = parser.add_argument_group("the run")
    top.add_argument("--recipe", metavar="NAME", help=f"start from one of: {', '.join(RECIPES)}")
    top.add_argument("--config", metavar="FILE", help="read fields from a TOML file")
    top.add_argument(
        "--print-config", action="store_true", help="print the run as TOML and do nothing else"
    )
    groups: dict[str, Any] = {}
    for f in fields(TrainConfig):
        name, group = f.metadata["group"], None
        group = groups.setdefault(name, None) or parser.add_argument_group(name)
        groups[name] = group
        _add_field(group, f.name, f.metadata, f.default)
    data = groups["data"]
    data.add_argument("--tokenizer-type", metavar="TYPE", help="Megatron's name of --tokenizer")
    data.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a byte-level BPE")
    data.add_argument("--merge-file", metavar="FILE", help="merges.txt of a byte-level BPE")
    for name, (arguments, _) in SETTLED.items():
        kind: dict[str, Any] = {"nargs": 1} if arguments else {"action": "store_true"}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)
    return parser


def _add_field(group: Any, name: str, metadata: Mapping[str, Any], default: Any) -> None:
    kind = FIELD_TYPES[name]
    text = metadata["help"].replace("%", "%%")
    if kind is bool:
        if default is False:
            group.add_argument(flag_name(name), action="store_true", help=text)
        else:
            group.add_argument(flag_name(name), action=argparse.BooleanOptionalAction, help=text)
        return
    if default is not None:
        text += f" (default {default})"
    extra: dict[str, Any] = {"metavar": name.split("_")[-1].upper()}
    if metadata["choices"]:
        extra = {"choices": metadata["choices"]}
    if typing.get_origin(kind) is list:
        extra |= {"nargs": "+"}
        kind = str
    group.add_argument(flag_name(name), type=kind, help=text, **extra)


def parse(argv: Sequence[str]) -> CommandLine:
    """Read the command line.

    Raises:
        UsageError: a flag that does not exist (the nearest is named) or a value of the wrong kind.
        SystemExit: for --help, with code 0.
    """
    parser = build_parser()
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [o for action in parser._actions for o in action.option_strings]
        word = unknown[0].split("=")[0]
        kind = "flag" if word.startswith("-") else "argument"
        raise UsageError(f"Unknown {kind} {word}.{_nearest(word, known)}")
    values = vars(namespace)
    notes = [
        f"{name}: {answer}."
        for name, (_, answer) in SETTLED.items()
        if values.pop(name[2:].replace("-", "_"), None) is not None
    ]
    named = values.pop("recipe", None)
    config_file = values.pop("config", None)
    print_config = values.pop("print_config", False)
    _read_tokenizer(values)
    if config_file is not None:
        from_file, file_recipe = read_toml(config_file)
        values, named = {**from_file, **values}, named or file_recipe
    return CommandLine(values, named, print_config, tuple(notes))


def _read_tokenizer(values: dict[str, Any]) -> None:
    """Fold Megatron's three tokenizer flags into `tokenizer`."""
    vocab, merges = values.pop("vocab_file", None), values.pop("merge_file", None)
    kind = values.pop("tokenizer_type", None)
    for flag, path in (("--vocab-file", vocab), ("--merge-file", merges)):
        if path is not None and not Path(path).is_file():
            raise UsageError(f"Expected {flag} to be a file, got {path!r}.")
    if kind is not None and kind not in _TOKENIZER_TYPES:
        raise UsageError(
            f"Expected --tokenizer-type {' or '.join(_TOKENIZER_TYPES)}, got {kind!r}. "
            "Name another tokenizer, or its file, with --tokenizer."
        )
    if vocab is not None:
        values.setdefault("tokenizer", vocab)
    elif kind is not None:
        values.setdefault("tokenizer", _TOKENIZER_TYPES[kind])


def read_toml(path: str) -> tuple[dict[str, Any], str | None]:
    """Fields of a TOML file, and the recipe it names if any. Tables only group keys.

    Raises:
        UsageError: no such file, not TOML, a key that does not exist, a value of the wrong kind.
    """
    try:
        document = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"Cannot read --config {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}.") from None
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= value if isinstance(value, dict) else {key: value}
    flat = {key.replace("-", "_"): value for key, value in flat.items()}
    named = flat.pop("recipe", None)
    for key, value in flat.items():
        if key not in FIELD_TYPES:
            raise UsageError(f"Unknown key {key!r} in {path}.{_nearest(key, FIELD_TYPES)}")
        flat[key] = _checked(key, value, path)
    return flat, named


def _checked(key: str, value: Any, path: str) -> Any:
    kind = FIELD_TYPES[key]
    if kind is float and type(value) is int:
        return float(value)
    if kind == list[str]:
        value = [value] if isinstance(value, str) else value
        kind = list
    if type(value) is not kind:
        raise UsageError(f"Expected {key} in {path} to be {kind.__name__}, got {value!r}.")
    return value


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" The nearest is {near[0]}." if near else " See --help."


def resolve(command: CommandLine, loaded: Mapping[str, Any] | None = None) -> TrainConfig:
    """Lay the sources over each other and check the result.

    Args:
        command: what was typed, over what `--config` holds.
        loaded: the fields that the run to go on from was started with.

    Raises:
        ValueError: values that cannot work, from any source.
    """
    named, said = command.recipe, command.values
    if named is None and loaded is None and not any(key in said for key in _SIZE_FIELDS):
        named = "quickstart"
    base = recipe(named) if named else {}
    values: dict[str, Any] = {**(loaded or {}), **base, **said}
    # The other way to say how long overrules a recipe or an earlier run.
    if "train_samples" in said and "train_iters" not in said:
        values["train_iters"] = None
    if "train_iters" in said and "train_samples" not in said:
        values["train_samples"] = None
    return TrainConfig(**values)


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML, one table per group; unset fields are comments."""
    lines: list[str] = []
    group = None
    for f in fields(config):
        if f.metadata["group"] != group:
            group = f.metadata["group"]
            lines += ([""] if lines else []) + [f"[{group.replace(' ', '-')}]"]
        value = getattr(config, f.name)
        # JSON's spelling of strings, numbers, booleans and lists is TOML's as well.
        lines.append(f"# {f.name}" if value is None else f"{f.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
