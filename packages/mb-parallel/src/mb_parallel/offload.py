"""Activations in the host's memory: what blocks keep for their backward pass waits there.

Applied to a model from outside, after recompute and compilation, before `apply_data_parallel`.
Autograd gives what a block saves to hooks (`torch.autograd.graph.saved_tensors_hooks`); when the
block is through, its storages are copied into pinned memory, while the blocks behind it compute,
and the GPU's are let go of when the next one that sends something is through as well. When the
backward pass reaches that one, those of the one before set out for the GPU. So on the GPU are those
of two blocks, and with a link that is fast enough nobody waits. A slower one holds the pass up: if
memory were freed at some later time, it would be by chance whether a run fits.

What travels is a whole storage, once, however many tensors of it are saved; each comes back with
the size and the strides that it had. What lives on all the same stays: parameters and what is cast
of them, buffers, the memory that peers write into, and what a block is given beside its first
argument. So does what is small. Nothing is computed otherwise: results are equal to the bit.

Torch keeps pinned memory that was let go of, and gives it out again in the next step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from mb_layers import Experts
from mb_layers.dispatch import innermost
from mb_layers.moe import MoELayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mb_parallel.arguments import at_least_0, several
from mb_parallel.engines import is_compiled_in_place
from mb_parallel.expert_parallel.peer import PeerDispatcher
from mb_parallel.forwards import wrap_forward
from mb_parallel.offload_copies import Cargo, Copies, Kept, Saved
from mb_parallel.shards import local

# Numbers of a tensor that is worth the way: Megatron Core's.
LEAST_NUMBERS = 2**20
_PLACE = "_mb_offload"  # on modules that were wrapped: their place in an offload


class Offload:
    """What the blocks of a model share: two streams of copies, and who is on the way.

    One is for all stages on a rank.

    Args:
        device: of the blocks. On a CPU the copies lie in the same memory: for tests.
        least_numbers: a storage of fewer stays where it is.

    Attributes:
        sent: bytes that have been copied to the host since the start.
    """

    def __init__(self, device: torch.device | str, *, least_numbers: int = LEAST_NUMBERS) -> None:
        at_least_0(least_numbers=least_numbers)
        self.device = torch.empty(0, device=device).device  # with its number
        self.least_numbers = least_numbers
        self.copies = Copies(self.device)
        self.sent = 0
        self._call: _Call | None = None  # that runs
        self._leaving: _Call | None = None  # that ran, whose storages are on their way out
        self._before: _Call | None = None  # the last of this pass that a backward pass will reach
        self._coming: list[_Call] = []  # whose storages are on their way back

    def __deepcopy__(self, memo: Any) -> Offload:
        return self  # a model's copy runs beside the model, one after the other

    def begin(self, block: nn.Module, given: Iterable[Any], *, first: bool, sends: bool) -> _Call:
        """A block is called."""
        while self._coming:  # nobody asked for them: a backward pass was broken off
            self._coming.pop().arrive()
        self._before = None if first else self._before
        self._call = _Call(self, block, given, self._before, sends=sends)
        return self._call

    def end(self, call: _Call, *, failed: bool) -> None:
        """A block is through."""
        self._call = None
        if failed:
            return
        sent = call.send()
        self.sent += sent
        if self._leaving is not None:
            self._leaving.let_go()
        self._leaving = call
        self._before = call if sent else self._before

    def part(self) -> saved_tensors_hooks | None:
        """Hooks for a part of the block that runs; None where none does, as in a recomputation."""
        return None if self._call is None else self._call.hooks()

    def fetch(self, call: _Call) -> None:
        """The backward pass has reached a block: its storages are needed, the one's before soon."""
        call.come()
        call.arrive()
        before = call.before()
        if before is not None and before.come():
            self._coming.append(before)

    def arrived(self, call: _Call) -> None:
        """Nobody else need wait for what this block saved."""
        if call in self._coming:
            self._coming.remove(call)


class _Call:
    """A block's call, and what it saved, which the graph holds and this does not."""

    def __init__(
        self,
        offload: Offload,
        block: nn.Module,
        given: Iterable[Any],
        before: _Call | None,
        *,
        sends: bool,
    ) -> None:
        self._offload, self._block, self._sends = offload, block, sends
        self._given = _places(given)
        self.before: Callable[[], _Call | None] = lambda: None
        if before is not None:
            self.before = weakref.ref(before)
        self._cargos: weakref.WeakValueDictionary[int, Cargo] = weakref.WeakValueDictionary()
        self._reached = False
        self._gone: torch.Event | None = None
        self._come: torch.Event | None = None
        self._under_way: list[Tensor] = []  # written by a copy that this stream has not waited for

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Kept | Saved:
        shard = local(tensor)
        if not self._sends or not self._may_go(tensor, shard):
            return Kept(tensor)
        cargo = self._cargos.get(_place(shard))
        if cargo is None:
            cargo = self._cargos[_place(shard)] = Cargo(shard)
        return Saved(cargo, tensor)

    def _unpack(self, saved: Kept | Saved) -> Tensor:
        if not self._reached:
            self._reached = True
            self._offload.fetch(self)
        if isinstance(saved, Saved) and saved.cargo.here is None:
            # Another block's, or a second backward pass.
            self.come()
            self.arrive()
        return saved.tensor()

    def _may_go(self, tensor: Tensor, shard: Tensor) -> bool:
        if type(shard) is not Tensor or shard.device != self._offload.device:
            return False  # a parameter, or of a kind that only its own library knows
        if shard.layout is not torch.strided or _of_weights(tensor):
            return False
        if shard.is_conj() or shard.is_neg():
            return False  # whose storage holds other numbers than the tensor
        storage = shard.untyped_storage()
        large = storage.nbytes() >= max(self._offload.least_numbers, 1) * shard.itemsize
        return large and storage.data_ptr() not in self._given

    def send(self) -> int:
        """Let copies to the host begin; how many bytes."""
        stay = _places(lasting(self._block))
        self._given.clear()
        cargos = [c for place, c in self._cargos.items() if place not in stay and c.nbytes]
        self._gone = self._offload.copies.out(cargos)
        return sum(cargo.nbytes for cargo in cargos)

    def let_go(self) -> None:
        """Free the device's memory, behind the copies."""
        self._offload.copies.wait(self._gone)
        for cargo in self._cargos.values():
            cargo.let_go()

    def come(self) -> bool:
        """Let copies back begin, of what is not there; whether there are any."""
        cargos = [cargo for cargo in self._cargos.values() if cargo.here is None]
        if cargos:
            self._come = self._offload.copies.back(cargos)
            self._under_way += [cargo.here for cargo in cargos if cargo.here is not None]
        return bool(cargos)

    def arrive(self) -> None:
        """Let this stream go on behind the copies back."""
        self._offload.copies.wait(self._come)
        self._come = None
        self._under_way.clear()
        self._offload.arrived(self)


def apply_offload(
    blocks: Iterable[nn.Module],
    offload: Offload,
    *,
    count: int | None = None,
    parts: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
) -> int:
    """Let `blocks` keep in the host's memory what they save for their backward pass, in place.

    Outputs, gradients and names of parameters stay. A block gives its first argument up to its
    successor; what it is given besides lives on with the caller. Without gradients nothing is
    saved, and nothing done.

    Args:
        blocks: in the order they run; those that are compiled, by their own `compile`, already so.
        offload: of this rank.
        count: of how many of them, at `evenly_spread` places; None, or more than there are: all.
        parts: which modules of a block, each of them whole; None: all of it.

    Returns:
        How many blocks or, with `parts`, modules keep it there now.

    Raises:
        ValueError: one module, a `count` below 0, or parts of a compiled block.
    """
    chosen = list(dict.fromkeys(several(blocks, "blocks")))
    count = len(chosen) if count is None else count
    at_least_0(count=count)
    sending, found = evenly_spread(count, len(chosen)), 0
    # The last block, without sending anything, lets go of what the one before kept, and calls it.
    for place in dict.fromkeys([*sending, len(chosen) - 1] if sending else []):
        block, sends = chosen[place], place in sending
        inside = list(dict.fromkeys(parts(block))) if parts is not None and sends else None
        if inside and is_compiled_in_place(block):
            raise ValueError(
                "Expected blocks that are not compiled for parts of them, got a compiled "
                f"{type(block).__name__}. Pass parts=None, or compile nothing."
            )
        setattr(block, _PLACE, (offload, place == 0, sends, inside is None))
        if is_compiled_in_place(block):  # around what is compiled, not inside
            inner = block._compiled_call_impl
            assert inner is not None
            block._compiled_call_impl = functools.partial(_call_block, block, inner)
        else:
            wrap_forward(block, _call_block)
        for module in inside or ():
            setattr(module, _PLACE, offload)
            wrap_forward(module, _call_part)
        found += sends * (1 if inside is None else len(inside))
    return found


def evenly_spread(count: int, total: int) -> list[int]:
    """Which of `total` blocks send what they keep: the first, and others at even distances.

    So the copies of one hide behind all that compute before the next.
    """
    count = min(count, total)
    return [number * total // count for number in range(count)]


def _call_block(block: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kw)
    offload, first, sends, whole = getattr(block, _PLACE)
    beside = [*args[1:], *([*kw.values()] if args else [*kw.values()][1:])]
    call = offload.begin(block, tree_leaves(beside), first=first, sends=sends)
    failed = True
    try:
        if whole:
            with call.hooks():
                result = forward(*args, **kw)
        else:
            result = forward(*args, **kw)
        failed = False
    finally:
        offload.end(call, failed=failed)
    return result


def _call_part(module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    hooks = getattr(module, _PLACE).part()
    if hooks is None:
        return forward(*args, **kw)
    with hooks:
        return forward(*args, **kw)


def lasting(module: nn.Module) -> Iterator[Tensor]:
    """What a module and those in it hold from step to step."""
    for each in module.modules():
        own = (*each._parameters.values(), *each._buffers.values())
        yield from (tensor for tensor in own if tensor is not None)
        if isinstance(each, Experts):
            yield from each.working_copies.values()
        if isinstance(each, MoELayer):
            dispatcher = innermost(each.dispatcher)
            if isinstance(dispatcher, PeerDispatcher):
                yield from dispatcher.buffers.arenas


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(given: Iterable[Any]) -> set[int]:
    """Those of tensors among these; of kinds that hold others, such as DTensors, of this rank's."""
    shards = (local(each) for each in given if isinstance(each, Tensor))
    return {_place(shard) for shard in shards if type(shard) in (Tensor, nn.Parameter)}


def _of_weights(tensor: Tensor) -> bool:
    """Whether this is a parameter, a view of one, or a parameter in another dtype."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter):
        return True
    node = base.grad_fn
    while node is not None and not hasattr(node, "variable"):
        made_of = [other for other, _ in node.next_functions if other is not None]
        node = made_of[0] if len(made_of) == 1 else None
    leaf = getattr(node, "variable", None)
    # What was looked up in a table is made of one parameter as well.
    return isinstance(leaf, nn.Parameter) and local(leaf).numel() == local(base).numel()
