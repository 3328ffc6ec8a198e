"""Selects the launches that the gate compiles, so that every trait of a kernel occurs once.

Traits are what a kernel's code depends on: dtypes, constants, and whether sizes are multiples of a
tile. Most launches of a layer have no trait that those of another layer did not have.
"""

import itertools
from collections.abc import Hashable, Iterable

from mb_kernels.targets.gate_case import GateCase

_SMALL = 16  # numbers up to here are switches or counts of parts: each value is a trait
_DIVISORS = (16, 64, 256)  # the trait of a larger one is which divide it: load, step, tile


def cover(cases: Iterable[GateCase], *, depth: int) -> list[GateCase]:
    """The cases that bring something new, in the order given.

    At depth 2 that is a new pair of traits of a matrix kernel, at 1 a new trait, at 0 a new
    combination of dtypes. Other kernels use few registers and get a depth of one less. Cases that
    are likely to need the most registers (biases, gates, masked edges) are looked at first.
    """
    listed = list(cases)
    seen: dict[object, set[Hashable]] = {}
    taken = set()
    for case in sorted(listed, key=_weight, reverse=True):
        met = _met(case, depth if case.is_gemm else depth - 1)
        known = seen.setdefault(case.kernel, set())
        if not met <= known:
            known |= met
            taken.add(case.name)
    return [case for case in listed if case.name in taken]


def _met(case: GateCase, depth: int) -> set[Hashable]:
    if depth < 1:
        constants = case.constexprs.values()
        return {frozenset((*case.signature.values(), *filter(_is_dtype, constants)))}
    return set(itertools.combinations(sorted(_traits(case), key=repr), depth))


def _traits(case: GateCase) -> list[Hashable]:
    divisors = _DIVISORS if case.is_gemm else _DIVISORS[:1]
    constants = [(name, _kind(name, value, divisors)) for name, value in case.constexprs.items()]
    at_launch = [(name, kind) for name, kind in case.signature.items()]
    lists = {"16": case.multiples_of_16, "2 GiB": case.beyond_2gib}
    facts = [(fact, name) for fact, names in lists.items() for name in names]
    return [*constants, *at_launch, *facts, (case.num_warps, case.num_stages)]


def _is_dtype(value: object) -> bool:
    """A Triton dtype: AdamW is given those of tensors that it finds by their addresses."""
    return hasattr(value, "primitive_bitwidth")


def _kind(name: str, value: object, divisors: tuple[int, ...]) -> Hashable:
    if isinstance(value, int) and value > _SMALL and not name.startswith("BLOCK"):
        return tuple(value % n == 0 for n in divisors)
    return repr(value)


def _weight(case: GateCase) -> tuple[int, int]:
    """Tensors that are there and a gate, and sizes that divide no tile."""
    gated = getattr(case.constexprs.get("ACTIVATION"), "gated", False)
    sizes = [v for n, v in case.constexprs.items() if type(v) is int and v > _SMALL]
    return len(case.signature) + gated, sum(size % _DIVISORS[-1] != 0 for size in sizes)
