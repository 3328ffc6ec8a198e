"""The command line, TOML files and recipes as layers of one configuration.

Later layers win: Megatron's defaults, what a `--load`ed run was started with, a recipe, `--config
run.toml`, then the flags typed. With no word about the model the recipe is `quickstart`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mb_train.config import GROUPS, TrainConfig, flag_name
from mb_train.config.field import none_or, spec
from mb_train.config.network import Network
from mb_train.config.recipes import recipe
from mb_train.config.resume import OF_SCHEDULES, schedules
from mb_train.config.toml_file import UsageError, read_toml
from mb_train.flags.layer_patterns import LayerLists, counted, spelled_out
from mb_train.flags.megatron_defaults import (
    LEGACY,
    beside_sinkhorn,
    defaults_beside,
    gated_anyway,
    is_by_sinkhorn,
    is_legacy,
    is_whole,
    legacy_experts,
    lone_expert,
    other_muon,
    other_yarn,
    remarks_on,
    summed_logits,
)
from mb_train.flags.parser import Command, Parser, build_parser
from mb_train.flags.refused import nearest, wrong_flags
from mb_train.flags.settled import NO_FUSED_GELU
from mb_train.flags.translated import two_moments, understood, with_means
from mb_train.folder.run_folder import checkpoint_in
from mb_train.words import typed

# What launchers of other programs hand over without a flag.
_WORDS = {
    "": "It is empty, as a variable in quotes that is not set.",
    r".*\.(yaml|yml|json|toml)": "A file of settings is given to --config, and is TOML.",
    r".*\.py": "python -m mb_train stands in place of a script.",
    r"[\w.+/]+=.*": "Settings are flags here: --key value.",
}


@dataclass(frozen=True)
class CommandLine:
    """What was typed or read from `--config`: fields by name, the recipe, remarks to print.

    `of_every_layer` names those weights of `values` that every layer's loss has, not their mean.
    `unsaid` are those of `values` that nobody said: defaults that Megatron's scripts have.
    `whole` is what `megatron_defaults.is_whole` says of the flags alone.
    `own` holds the arguments of a command that are not a run's.
    `layer_lists` are counted by `resolve`, which knows the number of layers.
    """

    values: dict[str, Any]
    recipe: str | None
    print_config: bool
    notes: tuple[str, ...]
    of_every_layer: tuple[str, ...] = ()
    unsaid: dict[str, Any] = dataclasses.field(default_factory=dict)
    own: argparse.Namespace = dataclasses.field(default_factory=argparse.Namespace)
    whole: bool = False
    layer_lists: LayerLists = dataclasses.field(default_factory=LayerLists)

    def going_on(self) -> CommandLine:
        """The same where a run goes on, which has been told what is unsaid here."""
        said = {name: value for name, value in self.values.items() if name not in self.unsaid}
        on_unsaid = remarks_on(self.unsaid, said)
        notes = tuple(note for note in self.notes if note not in on_unsaid)
        return dataclasses.replace(self, values=said, notes=notes, unsaid={})


def parse(
    argv: Sequence[str],
    commands: Mapping[str, Command] = MappingProxyType({}),
    *,
    own: Parser | None = None,
) -> CommandLine:
    """Read the command line.

    Args:
        commands: as for `build_parser`.
        own: the parser of a command that takes the flags of a run beside its own arguments, in
            any order. Its flags come before a run's of the same name.

    Raises:
        UsageError: a flag that does not exist (the nearest is named) or a value of the wrong kind.
        SystemExit: for --help and --version, with code 0.
    """
    for word in argv:
        if word != word.encode("utf-8", "replace").decode():
            raise UsageError(f"Expected text in UTF-8, got {word!a}: no file could hold it.")
    if own is not None and {"-h", "--help"} & set(argv):
        own.parse_args(["--help"])  # which is short
    argv = counted(argv)
    typed = list(dict.fromkeys(word.split("=")[0] for word in argv))
    parser = build_parser(commands, own)
    # All that is wrong is said at once: a script of another program may have many such flags.
    wrong = wrong_flags(typed, parser)
    try:
        words, lists = spelled_out(argv)
        namespace, unknown = _parse_words(parser, words, own)
    except ValueError as error:
        raise UsageError(" ".join([*wrong, str(error)])) from None
    if unknown and not unknown[0].startswith("-"):
        hint = _about_word(unknown[0], argv, parser) or nearest(unknown[0], commands)
        raise UsageError(f"Unknown argument {unknown[0] or repr('')}.{hint}")
    if unknown and not wrong:
        wrong = [f"Unknown flag {name}. See --help." for name in unknown]
    values = vars(namespace)
    names = [] if own is None else [action.dest for action in own._actions]
    owned = argparse.Namespace(**{name: values.pop(name) for name in names if name in values})
    values |= {f.name: none_or(f, values[f.name]) for f in fields(TrainConfig) if f.name in values}
    wrong += [*two_moments(values), *summed_logits(typed, values), *legacy_experts(typed, values)]
    beside = defaults_beside(typed, values)
    # These have an effect.
    if "activation" in beside:
        values.pop(NO_FUSED_GELU, None)
    if is_legacy(typed, values):
        values.pop(LEGACY)
    others = [*other_muon(typed, values), *other_yarn(values), *gated_anyway(values)]
    others += lone_expert(typed, values)
    by_sinkhorn = is_by_sinkhorn(typed, values)
    values, of_every_layer, notes, meaningless = understood(values)
    wrong += beside_sinkhorn(typed, beside, values, of_every_layer) if by_sinkhorn else []
    if wrong := [*wrong, *meaningless]:
        raise UsageError(" ".join(wrong))
    whole = is_whole(values)
    named = values.pop("recipe", None)
    config_file = values.pop("config", None)
    print_config = values.pop("print_config", False)
    if config_file is not None:
        from_file, file_recipe = read_toml(config_file)
        values, named = _laid_over(from_file, values, said=True), named or file_recipe
    notes += [*remarks_on(beside, values), *others, *_given_again(argv, parser)]
    unsaid = {name: value for name, value in beside.items() if name not in values}
    values = {**beside, **values}
    of_every = tuple(of_every_layer)
    return CommandLine(
        values, named, print_config, tuple(notes), of_every, unsaid, owned, whole, lists
    )


def _given_again(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """A remark on lists that were given twice, which are not joined: data paths, say."""
    lists = {name for name, action in parser._option_string_actions.items() if action.nargs == "+"}
    given = Counter(word.partition("=")[0] for word in argv)
    again = [name for name in given if name in lists and given[name] > 1]
    return [f"given more than once, and the last time counts: {', '.join(again)}"] if again else []


def _about_word(name: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What may be meant by a word that belongs to no flag; "" if it is anybody's guess.

    A value of the flag before it, or a folder: to go on with its run, if it holds one.
    """
    before = argv[argv.index(name) - 1] if name in argv and name != argv[0] else ""
    flag = parser._option_string_actions.get(before)
    if flag is not None and flag.nargs == 0:
        return f" {before} takes no value."
    for pattern, hint in _WORDS.items():
        if re.fullmatch(pattern, name):
            return f" {hint}"
    if not os.path.isdir(name):  # Path.is_dir raises for a word that is too long to be a name
        return ""
    try:
        checkpoint_in(Path(name))
    except (ValueError, OSError) as error:
        return f" {error}"
    return f" To go on with the run in this folder: --load {typed(name)}."


def _parse_words(
    parser: argparse.ArgumentParser, words: list[str], own: Parser | None
) -> tuple[argparse.Namespace, list[str]]:
    """`parse_known_args`, where a flag of several values takes none of the command's arguments."""
    try:
        return parser.parse_known_args(words)
    except UsageError:
        arguments = [] if own is None else own._get_positional_actions()
        last = itertools.takewhile(lambda word: not word.startswith("-"), reversed(words))
        for count, _ in enumerate(itertools.islice(last, len(arguments)), 1):
            with contextlib.suppress(UsageError):
                return parser.parse_known_args([*words[:-count], "--", *words[-count:]])
        raise


def without_effect(command: CommandLine, config: TrainConfig) -> list[str]:
    """A remark on each group of settings that were said and do nothing in this run.

    Args:
        config: what the command line was resolved to.
    """
    idle: dict[str, list[str]] = {}
    for f in (f for members in GROUPS.values() for f in fields(members)):
        value = f.default if f.name in command.unsaid else command.values.get(f.name, f.default)
        if value != f.default and (way := config.lacking(f.name, said=command.values)):
            idle.setdefault(way, []).append(flag_name(f.name))
    remarks = [f"no effect without {way}: {', '.join(names)}" for way, names in idle.items()]
    if config.load is not None and _takes_schedules(vars(config)):
        typed = [name for name in OF_SCHEDULES if name in command.values]
        lost = [flag_name(n) for n in typed if command.values[n] != getattr(config, n)]
        if lost:
            names = ", ".join(lost)
            remarks.append(f"no effect beside --use-checkpoint-opt-param-scheduler: {names}")
    return remarks


def resolve(command: CommandLine, loaded: Mapping[str, Any] | None = None) -> TrainConfig:
    """Lay the sources over each other and check the result.

    Args:
        command: what was typed, over what `--config` holds.
        loaded: the fields that the run to go on from was started with.

    Raises:
        ValueError: values that cannot work, from any source.
    """
    named, said = command.recipe, command.values
    sizes = [f.name for f in fields(Network) if spec(f).required]
    if named is None and loaded is None and not any(size in said for size in sizes):
        named = "quickstart"
    base = recipe(named) if named else {}
    values: dict[str, Any] = {}
    for layer in (loaded or {}, base, said):
        values = _laid_over(values, layer, said=layer is said)
    if loaded is not None and _takes_schedules(values):
        values |= schedules(loaded, values)
    if values.get("num_layers") is not None:  # TrainConfig asks for it
        command.layer_lists.check(values["num_layers"])
    return with_means(TrainConfig(**values), command.of_every_layer)


def _takes_schedules(values: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's schedules count, not those that were said.

    As in Megatron they are part of the optimizer's state, which some runs leave out.
    """
    without = values.get("finetune") or values.get("no_load_optim")
    return bool(values.get("use_checkpoint_opt_param_scheduler")) and not without


def _laid_over(
    values: Mapping[str, Any], layer: Mapping[str, Any], *, said: bool
) -> dict[str, Any]:
    """Fields with those of a later layer, which take the place of what says the same another way.

    Args:
        said: a None in the layer was asked for.
    """
    found = dict(values)
    for f in fields(TrainConfig):
        value = layer.get(f.name, False)
        if value is False or (value is None and not said):
            continue
        for other in spec(f).instead_of:
            if other not in layer:
                found.pop(other, None)
    return {**found, **layer}
