"""What a field of the configuration knows of itself.

A field's own metadata says everything that is particular to it: its help, what values it takes,
what becomes of it when a run goes on from a checkpoint, and which argument of an MoE layer it is.
No command line, file or check of a single value has a list of fields of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What becomes of a field when a run goes on from a checkpoint (`--load`):
#   own     belongs to one start of the program and is not taken over
#   free    taken over; another value changes nothing that has been learned or counted
#   said    taken over; another value changes the course of the run, and is announced
#   fixed   taken over; another value is refused, but for a new run from the weights (--finetune)
#   model   taken over; another value makes another model, and is refused
OnLoad = Literal["own", "free", "said", "fixed", "model"]


# What turns a choice off that is off by default; of a run that is gone on from it may be on.
NONE = "none"


@dataclass(frozen=True)
class Bounds:
    """A range of numbers, in words and as a test; not-a-number is in none."""

    words: str
    holds: Callable[[Any], bool]


POSITIVE = Bounds("above 0", lambda value: value > 0)
AT_LEAST_0 = Bounds("of at least 0", lambda value: value >= 0)
AT_LEAST_1 = Bounds("of at least 1", lambda value: value >= 1)
ABOVE_1 = Bounds("above 1", lambda value: value > 1)
NOT_0 = Bounds("other than 0", lambda value: value != 0)
LEFT_OUT = Bounds("left out", lambda value: value is None)
OFF = Bounds("left out", lambda value: not value)
IS_0_OR_1 = Bounds("0 or 1", lambda value: value in (0, 1))
GIVEN = Bounds("", lambda value: value is not None)
NOT_1 = Bounds("other than 1", lambda value: value not in (None, 1))
SEED = Bounds("in [0, 2**32)", lambda value: 0 <= value < 2**32)
FRACTION = Bounds("in [0, 1)", lambda value: 0 <= value < 1)
SHARE = Bounds("in [0, 1]", lambda value: 0 <= value <= 1)
# Not 0 or infinite in fp32, in which losses and gradients meet it.
SCALE = Bounds("in [2**-126, 2**128)", lambda value: 2.0**-126 <= value < 2.0**128)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Metadata of one field.

    Args:
        help: one line for `--help`.
        bounds: numbers that it takes, each one of a list; None takes all.
        choices: values that it takes; () takes all.
        on_load: see `OnLoad`.
        in_force: the property that holds the value in force, where that derives from several
            fields; runs are compared by it.
        also: further spellings of its flag.
        said_as: further spellings of its values, on the command line.
        falsy_is_none: 0, or a text of nothing, means None on the command line, in a file, and among
            the arguments that Megatron has saved, as it means it where it asks whether a value is
            there at all.
        off: Megatron's flag that turns it off, where it is on by default.
        count: number of values of a list, where that is fixed.
        layer: the argument of `mb_layers.MoEConfig` that it is.
        in_training: it says how a model is trained and computed; with another value it is the same
            model. A capacity is such: elsewhere no token is dropped.
        required: a run must say it; there is no default.
        instead_of: fields that say the same another way: said later than them, it takes their
            place.
        needs: the field without which it does nothing, or a tuple of some of which one is enough,
            and behind it the values of that field, or the bounds, with which it does something, if
            not all. A list: it needs each of these.
    """

    help: str
    bounds: Bounds | None = None
    choices: tuple[Any, ...] = ()
    on_load: OnLoad = "free"
    in_force: str | None = None
    also: tuple[str, ...] = ()
    said_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    falsy_is_none: bool = False
    off: tuple[str, ...] = ()
    count: int | None = None
    layer: str | None = None
    in_training: bool = False
    required: bool = False
    instead_of: tuple[str, ...] = ()
    needs: tuple[Any, ...] | list[tuple[Any, ...]] = ()


def flag(text: str, default: Any = None, **about: Any) -> Any:
    """A field of the configuration; `about` are arguments of `Spec`."""
    return dataclasses.field(default=default, metadata={"spec": Spec(help=text, **about)})


def spec(field: dataclasses.Field[Any]) -> Spec:
    """What `field` knows of itself."""
    return field.metadata["spec"]


def value_types(config_class: type) -> dict[str, Any]:
    """The type of every field's value, None apart: `int | None` is int."""
    found = {}
    for name, annotation in typing.get_type_hints(config_class).items():
        if isinstance(annotation, types.UnionType):
            (annotation,) = (a for a in typing.get_args(annotation) if a is not types.NoneType)
        found[name] = annotation
    return found


def none_or(field: dataclasses.Field[Any], value: Any) -> Any:
    """What a flag or a file says of a field: None for a value that stands for it there."""
    about = spec(field)
    off = about.choices and field.default is None and value in (NONE, [NONE])
    nothing = about.falsy_is_none and value in (0, "") and value is not False
    return None if off or nothing else value


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError if a value is not of its field's type; an int may stand for a float."""
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        items, wanted = value if isinstance(value, list) else None, f"a list of {kind.__name__}"
    else:
        items, wanted = [value], kind.__name__
    taken = (int, float) if kind is float else (kind,)  # a bool is an int, but no number here
    if items is None or any(type(item) not in taken for item in items):
        raise ValueError(f"Expected {flag_name(name)} to be {wanted}, got {value!r}.")
    # A tensor has no size beyond, and TOML no number.
    if any(type(item) is int and not -(2**63) <= item < 2**63 for item in items):
        raise ValueError(f"Expected {flag_name(name)} to fit 64 bits, got {value!r}.")


def check_field(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise ValueError if a field's own bounds or choices exclude a value of its kind."""
    about = spec(field)
    if about.count is not None and len(value) != about.count:
        raise ValueError(
            f"Expected {about.count} values of {flag_name(field.name)}, got {len(value)}."
        )
    for item in value if isinstance(value, list) else [value]:
        if item == "":
            raise ValueError(f"Expected {flag_name(field.name)} to name something, got nothing.")
        if isinstance(item, float) and math.isinf(item):
            raise ValueError(f"Expected a finite {flag_name(field.name)}, got {item}.")
        if about.bounds is not None and not about.bounds.holds(item):
            raise ValueError(f"Expected {flag_name(field.name)} {about.bounds.words}, got {item}.")
        if about.choices and item not in about.choices:
            names = ", ".join(map(str, about.choices))
            raise ValueError(
                f"Expected {flag_name(field.name)} to be one of {names}, got {item!r}."
            )


def whole(value: int | None) -> int:
    """A field that the checks have found to be there."""
    assert value is not None
    return value


@contextlib.contextmanager
def in_flags(names: Mapping[str, str]) -> Generator[None]:
    """Within: a ValueError of another library names flags where it names its own arguments.

    A choice that is on or off is said as it is typed: `--no-sequence-parallel`.

    Args:
        names: the field behind each argument.
    """
    try:
        yield
    except ValueError as error:
        words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b(=True\b|=False\b)?")
        said = words.sub(lambda match: _typed(names[match[1]], match[2]), str(error))
        raise ValueError(said) from error


def _typed(name: str, value: str | None) -> str:
    return flag_name(f"no_{name}" if value == "=False" else name)


def flag_name(name: str) -> str:
    """`hidden_size` as it is typed: `--hidden-size`."""
    return "--" + name.replace("_", "-")
