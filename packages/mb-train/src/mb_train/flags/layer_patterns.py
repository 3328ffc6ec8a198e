"""Flags of Megatron Core that say something of each layer, as numbers that have flags here.

Windows and positions of other layers than every n-th are lists here too, of flags of their own.

--moe-layer-freq ([0]*3+[1]*24)     --moe-layer-freq=1 --moe-first-k-dense=3
--window-attn-skip-freq [1,1,0]*4   --window-attn-skip-freq=3
--no-rope-freq ([0]*3+[1])*4        --no-rope-freq=4
--no-rope-freq [1,1,0]              --rope-layers 0 0 1
--linear-attention-freq [1,1,0]*4   --linear-attention-freq=3
--window-size 127,0                 --window-size=127
--hybrid-layer-pattern M*-          --hybrid-layer-pattern M*- --num-layers=3
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mb_train.config.layers import every_nth_full


def spelled_out(words: Sequence[str]) -> list[str]:
    """The command line with numbers for what Megatron Core also takes as a list or a pair.

    Raises:
        ValueError: experts in other layers than every n-th behind dense ones; states in others than
            all but every n-th; lists of something else, or of other layers than `--num-layers`; a
            window that reaches behind a token.
    """
    found, replaced = list(words), set()
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
            found[place : place + (1 if equals else 2)] = numbers(value, words)
        replaced.add(name)
    return found


def counted(words: Sequence[str]) -> list[str]:
    """The command line with the number of layers that have a letter each, where none is said.

    Without Core's --spec of a stack of such layers, which says that they are.
    """
    found = list(words)
    for place, word in reversed(list(enumerate(found[1:]))):
        if found[place] in _PATTERNS and not word.startswith("--"):
            found[place : place + 2] = [f"{found[place]}={word}"]  # it may begin with a hyphen
    names = [word.partition("=")[0] for word in found]
    patterns = [found[place] for place, name in enumerate(names) if name in _PATTERNS]
    layers = len(patterns[-1].partition("=")[2]) if patterns else 0
    if layers == 0:
        return found
    for place in [place for place, name in enumerate(names) if name == "--spec"]:
        if found[place + 2 : place + 3] in _STACKS:
            del found[place : place + 3]
    return found if "--num-layers" in names else [*found, f"--num-layers={layers}"]


def _experts(text: str, words: Sequence[str]) -> list[str]:
    layers = _layers(text)
    if 1 in layers:
        first = layers.index(1)
        for every in range(1, len(layers) + 1):
            for dense in {first, 0}:
                if layers == [int(i >= dense and i % every == 0) for i in range(len(layers))]:
                    _check_number("--moe-layer-freq", text, layers, words)
                    return [f"--moe-layer-freq={every}", f"--moe-first-k-dense={dense}"]
    raise ValueError(
        f"Expected --moe-layer-freq to be dense layers and then experts in every n-th, as "
        f"([0]*3+[1]*24), got {text}. See --moe-first-k-dense."
    )


def _all_but_every_nth(
    flag: str,
    what: str,
    example: str,
    text: str,
    words: Sequence[str],
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
    _check_number(flag, text, layers, words)
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


def _window(text: str, _: Sequence[str]) -> list[str]:
    sides = re.fullmatch(r"[(\[]?\s*(-?\d+)\s*,\s*(-?\d+)\s*[)\]]?", text)
    if sides is None or int(sides[1]) < 0 or int(sides[2]) != 0:
        raise ValueError(
            "Expected --window-size to be the tokens before a token's own and 0, as 127,0, for no "
            f"token sees a later one, got {text}. Leave it out for a token that sees all before it."
        )
    return [f"--window-size={sides[1]}"]


_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
# Core's own stacks of such layers, behind the module in --spec.
_STACKS = (["mamba_stack_spec"], ["hybrid_stack_spec"])
# Flag -> what a value has that is no number, and what it says as numbers.
_NUMBERS: Mapping[str, tuple[str, Callable[[str, Sequence[str]], list[str]]]] = {
    "--moe-layer-freq": ("[", _experts),
    "--window-attn-skip-freq": ("[", _windows),
    "--linear-attention-freq": ("[", _states),
    "--no-rope-freq": ("[", _without_positions),
    "--window-size": (",", _window),
}


def _check_number(flag: str, text: str, layers: Sequence[int], words: Sequence[str]) -> None:
    said = re.findall(r"(?<!\S)--num-layers[= ](\d+)", " ".join(words))[-1:]
    if said not in ([], [str(len(layers))]):
        raise ValueError(
            f"Expected {flag} to be of --num-layers {said[0]}, got {text}, which is of "
            f"{len(layers)}."
        )


def _layers(text: str) -> list[int]:
    """The list that an expression makes, of sums and repetitions of lists of 0 and 1."""
    text = text.replace(" ", "")
    if not re.fullmatch(r"[\[\]()01,+*\d]+", text):
        return []
    # Innermost parentheses first: a repeated group becomes the list it stands for.
    group = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
    while (match := group.search(text)) is not None:
        inner = _sum(match[1]) * int(match[2] or 1)
        text = text[: match.start()] + str(inner).replace(" ", "") + text[match.end() :]
    return _sum(text)


def _sum(text: str) -> list[int]:
    layers: list[int] = []
    for term in text.split("+"):
        match = re.fullmatch(r"\[((?:[01],?)*)\](?:\*(\d+))?", term)
        if match is None:
            return []
        layers += [int(digit) for digit in match[1].replace(",", "")] * int(match[2] or 1)
    return layers
