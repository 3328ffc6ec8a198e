"""Which backward passes a zero-bubble schedule can take apart.

Torch computes the gradients of a stage's inputs first. It notes what arrives at the ops where the
path of a parameter meets that of the inputs, and begins there for the gradients of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mb_parallel.engines import torch_release


def must_stay_whole(outputs: Iterable[Any], received: Iterable[Tensor]) -> bool:
    """Whether torch's halves of this backward pass would be wrong, or end in an error.

    They are if the path of a parameter meets that of the inputs in two ops, like that of a weight
    which is used twice, or of a bias that several layers share: what comes through both is counted
    twice (before torch 2.13) or needs a graph that is freed by then. Before 2.13 also if they meet
    in an op with gradients of several outputs, which torch adds up.

    Args:
        outputs: nodes of the autograd graph, of the stage's outputs; None for a frozen one.
        received: the stage's inputs. Without a path to one torch takes nothing apart.
    """
    edges = _edges(outputs)
    takers: dict[Any, set[Any]] = defaultdict(set)
    for node, behind, _ in edges:
        takers[behind].add(node)
    came = {id(tensor) for tensor in received}
    inputs = {node for node in takers if id(getattr(node, "variable", None)) in came}
    if not inputs:
        return False
    of_inputs, _ = _onward(inputs, takers, until=set())
    meet: set[Any] = set()
    for node in takers.keys() - of_inputs:
        _, reached = _onward({node}, takers, until=of_inputs)
        if len(reached) > 1:
            return True
        meet |= reached
    if torch_release() >= (2, 13):
        return False
    numbers: dict[Any, set[int]] = defaultdict(set)
    for _, behind, number in edges:
        numbers[behind].add(number)
    return any(len(numbers[node]) > 1 for node in meet)


def repeatable_graphs() -> AbstractContextManager[None]:
    """For what is compiled meanwhile: its backward passes can run again, for the other half.

    The first time they run whole, and the compiler has them write over what was saved for them.
    """
    import torch._functorch.config as functorch  # here: few schedules ask

    return functorch.patch(donated_buffer=False)


def _edges(outputs: Iterable[Any]) -> list[tuple[Any, Any, int]]:
    """Of the graph: a node, one behind it, and which of the latter's outputs the former takes."""
    seen = {node for node in outputs if node is not None}
    waiting, edges = list(seen), []
    while waiting:
        node = waiting.pop()
        for behind, number in node.next_functions:
            if behind is not None:
                edges.append((node, behind, number))
                if behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
    return edges


def _onward(
    start: set[Any], takers: Mapping[Any, set[Any]], *, until: set[Any]
) -> tuple[set[Any], set[Any]]:
    """What is reached from `start`, itself among it, and where that ends, in nodes of `until`."""
    seen, ends, waiting = set(start), set(), list(start)
    while waiting:
        for node in takers.get(waiting.pop(), ()):
            if node in until:
                ends.add(node)
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen, ends
