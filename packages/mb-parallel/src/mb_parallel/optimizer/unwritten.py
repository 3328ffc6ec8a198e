"""Parameters that were not written since they were noted, for what has to stay equal to them.

That is a 16-bit copy of a parameter, or the master that a 16-bit parameter is the copy of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mb_parallel.shards import local


class Unwritten:
    """Set of parameters that were not written since they were noted, by autograd's count."""

    def __init__(self) -> None:
        self._versions: dict[Tensor, tuple[Any, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Unwritten, ()  # copies of the parameters were not noted

    def __contains__(self, parameter: Tensor) -> bool:
        return self._versions.get(parameter) == _version(parameter)

    def note(self, parameters: Iterable[Tensor]) -> None:
        """From here on."""
        self._versions |= {parameter: _version(parameter) for parameter in parameters}

    def clear(self) -> None:
        """Contain none."""
        self._versions.clear()


def _version(parameter: Tensor) -> tuple[Any, ...]:
    """Changes with each write to a DTensor or its shard, and with storage."""
    shard = local(parameter)
    # An address alone would not do: of data that is replaced twice the second may lie where the
    # first lay. The storage itself stays apart from all that come later while it is referred to.
    storage = StorageWeakRef(shard.untyped_storage())
    return parameter._version, shard._version, storage, shard.data_ptr()
