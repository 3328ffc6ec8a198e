"""Moves weights between layouts, and makes sure that no tensor is lost.

A converter that skips names it does not know loses weights silently. Here a layout is a list of
rules, one for each target tensor. `translate` checks that every tensor of the source is used
exactly once and every tensor of the target is built; otherwise its error lists the others.

A model may be larger than the memory. `Translation` checks the same and builds a tensor when it is
asked for, of a source that may read its own when they are asked for: see `on_demand`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mb_layers.on_demand import OnDemand, outlines

_LISTED = 6  # names of a kind in a message


class Rule(NamedTuple):
    """Build tensor `target` from the tensors named `sources`, and take it apart again.

    build: takes the sources in order; None for a plain rename of one source.
    split: the inverse, from the target to its sources in order.
    """

    target: str
    sources: tuple[str, ...]
    build: Callable[..., Tensor] | None = None
    split: Callable[[Tensor], Sequence[Tensor]] | None = None


class Translation(OnDemand[Rule]):
    """The state dict whose names are `targets`, each tensor built from `source` when asked for.

    `shared` lets several rules use one tensor of the source, each a part of it.

    Raises:
        ValueError: names a rule asks for that the source lacks, names of the source that no rule
            or more than one uses, and targets that no rule or more than one builds.
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        rules: Sequence[Rule],
        targets: Collection[str],
        *,
        shared: bool = False,
    ) -> None:
        super().__init__()
        self._source = source
        self.places = {rule.target: rule for rule in rules}
        used = Counter(name for rule in rules for name in rule.sources)
        built = Counter(rule.target for rule in rules)
        complaints = {
            "tensors missing from the source": used.keys() - source.keys(),
            "tensors of the source that nothing uses": source.keys() - used.keys(),
            "tensors of the source used more than once": {
                n for n, c in used.items() if c > 1 and not shared
            },
            "tensors of the target that nothing fills": set(targets) - built.keys(),
            "tensors that the target does not have": built.keys() - set(targets),
            "tensors of the target filled more than once": {n for n, c in built.items() if c > 1},
        }
        lines = [f"{what}: {_listed(names)}" for what, names in complaints.items() if names]
        if lines:
            raise ValueError(
                "expected every source and target tensor to be used exactly once; got\n  "
                + "\n  ".join(lines)
            )

    def read(self, place: Rule) -> Tensor:
        return _built(place, self._source)

    def outlines(self) -> dict[str, Tensor]:
        with torch.device("meta"):  # where a rule makes tensors of its own
            source = outlines(self._source)
            return {name: _built(rule, source) for name, rule in self.places.items()}


def _built(rule: Rule, source: Mapping[str, Tensor]) -> Tensor:
    return (rule.build or _same)(*(source[name] for name in rule.sources))


def translate(
    source: Mapping[str, Tensor], rules: Sequence[Rule], targets: Collection[str]
) -> dict[str, Tensor]:
    """The whole of a `Translation`, and what that raises."""
    return dict(Translation(source, rules, targets))


@contextmanager
def tells_what_trains() -> Generator[None]:
    """Let tensors built from parameters require a gradient if those do, within `no_grad` too."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def put_in(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Make these tensors the module's own, without a copy, trainable if they require a gradient.

    What builds them has to run in `tells_what_trains`.
    """
    module.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)


def _listed(names: Collection[str]) -> str:
    """The first of them: a model of another layout lacks tens of thousands."""
    first = sorted(names)[:_LISTED]
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return ", ".join(first) + more


def _same(tensor: Tensor) -> Tensor:
    return tensor


def reversed_rules(rules: Sequence[Rule]) -> list[Rule]:
    """From the targets of rules to their sources, for a `Translation` with `shared`.

    What comes of one target comes one after the other.
    """
    back = []
    for rule in rules:
        if rule.split is None:
            assert rule.build is None, rule.target  # else there is no way back
            back.append(Rule(rule.sources[0], (rule.target,)))
            continue
        for place, source in enumerate(rule.sources):
            back.append(Rule(source, (rule.target,), lambda t, s=rule.split, i=place: s(t)[i]))
    return back


def translate_back(
    target: Mapping[str, Tensor], rules: Sequence[Rule], sources: Collection[str]
) -> dict[str, Tensor]:
    """Return the state dict whose names are `sources`, from which `rules` would build `target`.

    Raises:
        ValueError: as `Translation`, with the two sides exchanged.
    """
    return dict(Translation(target, reversed_rules(rules), sources, shared=True))
