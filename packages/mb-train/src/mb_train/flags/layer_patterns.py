"""Flags of Megatron Core that say something of each layer, as numbers that have flags here.

Experts, windows and positions of other layers than every n-th are lists here too, of flags of their
own.

--moe-layer-freq ([0]*3+[1]*24)     --moe-layer-freq=1 --moe-first-k-dense=3
--moe-layer-freq [0,1]*2            --moe-layers 0 1 0 1
--window-attn-skip-freq [1,1,0]*4   --window-attn-skip-freq=3
--no-rope-freq ([0]*3+[1])*4        --no-rope-freq=4
--no-rope-freq [1,1,0]              --rope-layers 0 0 1
--linear-attention-freq [1,1,0]*4   --linear-attention-freq=3
--window-size 127,0                 --window-size=127
--hybrid-layer-pattern M*-          --hybrid-layer-pattern=M*- --num-layers=3
--hybrid-layer-pattern M|*-         the same: a pipeline's stages are another matter
--hybrid-layer-pattern M*-/*-/*-    the same, --mtp-num-layers=2 --mtp-hybrid-override-pattern=*-
--hybrid-mlp-ratio 0.5 and 4 layers --hybrid-layer-pattern=M-M-
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mb_train.config.layers import every_nth_behind, every_nth_full


@dataclass(frozen=True)
class LayerLists:
    """Flags that were given a list of all layers: flag and text -> layers of the list.

    How many the model has may be said by a recipe or a file: `check` is for when it is known.
    """

    lengths: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def check(self, num_layers: int) -> None:
        """Raise ValueError if a list is of other layers than the model's."""
        for (flag, text), layers in self.lengths.items():
            if layers != num_layers:
                raise ValueError(
                    f"Expected {flag} to be of --num-layers {num_layers}, got {text}, which is of "
                    f"{layers}."
                )


def spelled_out(words: Sequence[str]) -> tuple[list[str], LayerLists]:
    """The command line with numbers for what Megatron Core also takes as a list or a pair.

    Returns:
        The command line, and the lists that were in it.

    Raises:
        ValueError: experts in no layer; states in others than all but every n-th; lists of
            something else or of very many layers; a window that reaches behind a token.
    """
    found, replaced, lengths = list(words), set(), {}
    for place in reversed(range(len(found))):
        name, equals, value = found[place].partition("=")
        if name not in _NUMBERS:
            continue
        if not equals and place + 1 < len(found):
            value = found[place + 1]
        mark, numbers = _NUMBERS[name]
        if name in replaced:  # by a later one: it says nothing, of no layer
            found[place : place + (1 if equals else 2)] = []
        elif mark in value:
            found[place : place + (1 if equals else 2)] = numbers(value)
            if mark == "[":
                lengths[name, value] = len(_layers(value))
        replaced.add(name)
    return found, LayerLists(lengths)


def counted(words: Sequence[str]) -> list[str]:
    """The command line with a letter for each layer and their number, of layers that are halves.

    From shares of layers and their number Core makes a pattern, and so from the --spec of its stack
    of such layers alone; shares of 0 alone say nothing there. What says no more than the pattern is
    left out.

    Raises:
        ValueError: shares of very many layers; modules of several kinds behind a pattern.
    """
    found = list(words)
    for place, word in reversed(list(enumerate(found[1:]))):
        if found[place] in (*_PATTERNS, _OF_MODULES, *_SHARES) and not word.startswith("--"):
            found[place : place + 2] = [f"{found[place]}={word}"]  # it may begin with a hyphen
    found = [part for word in found for part in _spelled_apart(word)]
    said = [word.partition("=") for word in found]
    patterns = [value for name, _, value in said if name in _PATTERNS]
    stacks = [place for place, (name, *_) in enumerate(said)
              if name == "--spec" and found[place + 2 : place + 3] in _STACKS]  # fmt: skip
    shares = {name: value for name, _, value in said if name in _SHARES}
    hybrid = patterns or stacks or "--is-hybrid-model" in words
    if shares and not hybrid and all(map(_is_zero, shares.values())):  # its default, of a GPT
        return [word for word in found if word.partition("=")[0] not in _SHARES]
    # The last that was said, if any.
    numbers = re.findall(r"(?<!\S)--(?:encoder-)?num-layers[= ](\d+)", " ".join(words))[-1:]
    layers = int(numbers[0]) if numbers else len(patterns[-1]) if patterns else 0
    spread = pattern_of_shares(shares, layers) if shares or stacks else ""
    pattern = patterns[-1] if patterns else spread
    if not pattern:
        return found
    for place in reversed(stacks):
        del found[place : place + 3]
    # Core refuses another pattern than one of so many letters of each kind.
    alike = sorted(spread) == sorted(pattern) or set(spread) == {"M"}
    less = ("--is-hybrid-model", *(_SHARES if alike else ()))
    found = [word for word in found if word.partition("=")[0] not in less]
    more = [] if patterns else [f"{_PATTERNS[0]}={pattern}"]
    return found + more + ([] if numbers else [f"--num-layers={len(pattern)}"])


def modules_apart(pattern: str) -> tuple[str, list[str]]:
    """Core's pattern without borders of stages, and those of modules for further tokens behind it.

    Raises:
        ValueError: these are not all alike, or have no layer.
    """
    own, *modules = pattern.replace("|", "").split("/")
    if modules and (len(set(modules)) > 1 or not modules[0]):
        raise ValueError(
            f"Expected modules of the same layers behind the model's in {_PATTERNS[0]}, as in "
            f"M*ME/*E/*E, got {pattern}."
        )
    return own, modules


def _spelled_apart(word: str) -> list[str]:
    name, _, value = word.partition("=")
    if name not in _PATTERNS or not value:
        return [word]
    own, modules = modules_apart(value)
    if not modules:
        return [f"{name}={own}"]
    return [f"{name}={own}", f"--mtp-num-layers={len(modules)}", f"{_OF_MODULES}={modules[0]}"]


def _is_zero(share: str) -> bool:
    try:
        return float(share) == 0
    except ValueError:
        return False


def pattern_of_shares(shares: Mapping[str, str], layers: int) -> str:
    """Core's pattern of so many layers; "" of shares that are none.

    Attention stands evenly between layers of Mamba-2, which begin and end, then feed-forwards stand
    evenly among these, the last of them behind all.

    Raises:
        ValueError: more layers than a list may have.
    """
    _check_most(layers)
    try:
        attention, feeds = (round(layers * float(shares.get(name, 0))) for name in _SHARES)
    except (ValueError, OverflowError):
        return ""
    kinds = ["M"] * layers
    if attention < 0 or feeds < 0 or attention + feeds > layers:
        return ""
    _put(kinds, "*", (layers - attention) / (attention + 1))
    _put(kinds, "-", (layers - attention - feeds) / feeds if feeds else math.inf)
    return "".join(kinds)


def _put(kinds: list[str], letter: str, gap: float) -> None:
    """A letter in place of an M, about so many of which stand before each."""
    ahead = gap
    for place in [place for place, kind in enumerate(kinds) if kind == "M"]:
        if ahead < 0.5:
            kinds[place] = letter
            ahead += gap
        else:
            ahead -= 1


def _experts(text: str) -> list[str]:
    layers = _layers(text)
    if 1 not in layers:
        raise ValueError(
            "Expected --moe-layer-freq to be 1 for each layer with experts and 0 for the others, "
            f"as ([0]*3+[1]*24), got {text}."
        )
    if (numbers := every_nth_behind(layers)) is None:
        return ["--moe-layers", *map(str, layers)]
    every, dense = numbers
    return [f"--moe-layer-freq={every}", f"--moe-first-k-dense={dense}"]


def _all_but_every_nth(
    flag: str,
    what: str,
    example: str,
    text: str,
    *,
    of_the_nth: bool = False,
    listed: str | None = None,
) -> list[str]:
    """A flag of layers that have something, all but every n-th, or of these that have it alone.

    Args:
        listed: our flag for other patterns, if there is one.
    """
    layers = _layers(text)
    has = [bool(layer) != of_the_nth for layer in layers]
    every = every_nth_full(has)
    if not layers or (every is None and listed is None):
        raise ValueError(f"Expected {flag} to be {what}, as {example}, got {text}.")
    if every is None and listed is not None:
        return [listed, *(str(int(one)) for one in has)]
    return [f"{flag}={every}"]


_windows = partial(
    _all_but_every_nth, "--window-attn-skip-freq", "1 for each layer with a window", "[1,1,0]*4",
    listed="--window-layers",
)  # fmt: skip
_states = partial(
    _all_but_every_nth, "--linear-attention-freq", "states in all layers but every n-th",
    "[1,1,0]*4",
)  # fmt: skip
_without_positions = partial(
    _all_but_every_nth, "--no-rope-freq", "1 for each layer without positions", "([0]*3+[1])*4",
    of_the_nth=True, listed="--rope-layers",
)  # fmt: skip


def _window(text: str) -> list[str]:
    sides = re.fullmatch(r"[(\[]?\s*(-?\d+)\s*,\s*(-?\d+)\s*[)\]]?", text)
    if sides is None or int(sides[1]) < 0 or int(sides[2]) != 0:
        raise ValueError(
            "Expected --window-size to be the tokens before a token's own and 0, as 127,0, for no "
            f"token sees a later one, got {text}. Leave it out for a token that sees all before it."
        )
    return [f"--window-size={sides[1]}"]


_MOST = 10_000  # layers, and more than any model has
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_OF_MODULES = "--mtp-hybrid-override-pattern"
_SHARES = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")
# Core's own stacks of such layers, behind the module in --spec.
_STACKS = (["mamba_stack_spec"], ["hybrid_stack_spec"])
# Flag -> what a value has that is no number, and what it says as numbers.
_NUMBERS: Mapping[str, tuple[str, Callable[[str], list[str]]]] = {
    "--moe-layer-freq": ("[", _experts),
    "--window-attn-skip-freq": ("[", _windows),
    "--linear-attention-freq": ("[", _states),
    "--no-rope-freq": ("[", _without_positions),
    "--window-size": (",", _window),
}


def _layers(text: str) -> list[int]:
    """The list of 0 and 1 that Python makes of sums and repetitions of lists; [] of all else."""
    if not re.fullmatch(r"[\[\]()\d,+* ]+", text):
        return []
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the latter two of very many parentheses
        return []
    return found if isinstance(found, list) else []


def _value(node: ast.expr) -> list[int] | int | None:
    """The list, or the number, that a part of such a text is; None for what is neither."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        layers = [item for item in items if isinstance(item, int) and item in (0, 1)]
        return layers if len(layers) == len(items) else None
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Mult) and isinstance(left, int):  # 3*[1]
        left, right = right, left
    if not isinstance(left, list):
        return None
    if isinstance(node.op, ast.Add) and isinstance(right, list):
        _check_most(len(left) + len(right))
        return left + right
    if isinstance(node.op, ast.Mult) and isinstance(right, int):
        _check_most(len(left) * right)
        return left * right if left else []  # none, however often, is no number too large
    return None


def _check_most(layers: int) -> None:
    """Raise ValueError before a list of very many layers fills the memory."""
    if layers > _MOST:
        raise ValueError(f"Expected at most {_MOST:,} layers of a list or shares, got {layers:,}.")
