"""Which of many launches the gate compiles: every trait of a kernel, or every two traits, once.

A kernel's code differs by its dtypes, its constants, and by whether a size divides a tile. Most
launches of a layer repeat what those of another layer had.
"""

import itertools
from collections.abc import Hashable, Iterable

from mb_kernels.targets.table import GateCase

_SMALL = 16  # numbers up to here are switches, counts of parts or of stages: each a code of its own
_DIVISORS = (16, 64, 256)  # of sizes: what a load may be as wide as, and a product's step and tile


def cover(cases: Iterable[GateCase], *, pairs: bool) -> list[GateCase]:
    """The cases, but those of which others have every trait; or every pair, with ``pairs``.

    Pairs are those of matrix kernels: of the rest, which hold few registers, each trait is enough.
    What is likely to need most registers is taken first: of biases, gates and masked edges most.
    """
    listed = list(cases)
    seen: dict[object, set[tuple[Hashable, ...]]] = {}
    taken = set()
    for case in sorted(listed, key=_weight, reverse=True):
        traits = sorted(_traits(case), key=repr)
        met = set(itertools.combinations(traits, 2 if pairs and case.is_gemm else 1))
        known = seen.setdefault(case.kernel, set())
        if not met <= known:
            known |= met
            taken.add(case.name)
    return [case for case in listed if case.name in taken]


def _traits(case: GateCase) -> list[Hashable]:
    divisors = _DIVISORS if case.is_gemm else _DIVISORS[:1]
    constants = [(name, _kind(name, value, divisors)) for name, value in case.constexprs.items()]
    at_launch = [(name, kind) for name, kind in case.signature.items()]
    lists = {"16": case.multiples_of_16, "2 GiB": case.beyond_2gib}
    facts = [(fact, name) for fact, names in lists.items() for name in names]
    return [*constants, *at_launch, *facts, (case.num_warps, case.num_stages)]


def _kind(name: str, value: object, divisors: tuple[int, ...]) -> Hashable:
    if isinstance(value, int) and value > _SMALL and not name.startswith("BLOCK"):
        return tuple(value % n == 0 for n in divisors)
    return repr(value)


def _weight(case: GateCase) -> tuple[int, int]:
    """Tensors that are there, and sizes that divide no tile."""
    there = len(case.signature) + bool(case.constexprs.get("GLU"))
    sizes = [v for n, v in case.constexprs.items() if type(v) is int and v > _SMALL]
    return there, sum(size % _DIVISORS[-1] != 0 for size in sizes)
