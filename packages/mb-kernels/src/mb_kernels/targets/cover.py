"""Which of many launches the gate compiles: every dtype, trait, or two traits of a kernel, once.

A kernel's code differs by its dtypes, its constants, and by whether a size divides a tile. Most
launches of a layer repeat what those of another layer had.
"""

import itertools
from collections.abc import Hashable, Iterable

from mb_kernels.targets.table import GateCase

_SMALL = 16  # numbers up to here are switches, counts of parts or of stages: each a code of its own
_DIVISORS = (16, 64, 256)  # of sizes: what a load may be as wide as, and a product's step and tile


def cover(cases: Iterable[GateCase], *, depth: int) -> list[GateCase]:
    """The cases, but those that have nothing of a matrix kernel which others have not.

    To have: at depth 2 every two of its traits, at 1 every trait, at 0 the dtypes alone. Other
    kernels, which hold few registers, are looked at one less deep. What is likely to need most
    registers is taken first: of biases, gates and masked edges most.
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
    """A Triton dtype, which AdamW has for what it finds by addresses."""
    return hasattr(value, "primitive_bitwidth")


def _kind(name: str, value: object, divisors: tuple[int, ...]) -> Hashable:
    if isinstance(value, int) and value > _SMALL and not name.startswith("BLOCK"):
        return tuple(value % n == 0 for n in divisors)
    return repr(value)


def _weight(case: GateCase) -> tuple[int, int]:
    """Tensors that are there, and sizes that divide no tile."""
    there = len(case.signature) + bool(case.constexprs.get("GLU"))
    sizes = [v for n, v in case.constexprs.items() if type(v) is int and v > _SMALL]
    return there, sum(size % _DIVISORS[-1] != 0 for size in sizes)
