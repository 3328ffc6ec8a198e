"""Records the routing of one run of a model and replays it in another.

In reinforcement learning, rounding makes the engine that generates and the one that trains choose
different experts for some tokens. The update is then not of the policy that acted. Rollout routing
replay (R3, arXiv 2510.11370) trains through the experts of the rollout; the router still gives the
weights, and gets its gradient.

    with record_routing(policy) as routing:
        policy.generate(prompt)
    with replay_routing(trained, routing.expert_ids()):
        loss = trained(tokens, labels=labels).loss
        loss.backward()

Both work on every `dMoE` and `MoE` of a model, transformers' after `swap_blocks`.

Letters: L MoE layers, E experts, K top-k, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mb_layers.arguments import described
from mb_layers.model import after_forward, in_backward, moe_layers
from mb_layers.moe import MoELayer, MoEOutput
from mb_layers.router import RouterOutput, is_ours

Ids: TypeAlias = Any  # a tensor, or a NumPy array, which this package does not import


class RecordedRouting:
    """The experts that tokens visited, by layer name, one entry per forward pass."""

    def __init__(self) -> None:
        self.passes: dict[str, list[Tensor]] = {}
        self.repeated: set[str] = set()  # layers that ran several times in one pass of the model

    def expert_ids(self) -> dict[str, Tensor]:
        """Return each layer's ids [..., S, K], its passes one behind the other along S.

        The passes of `generate` are the prompt and then one token each: the routing of the whole
        sequence but for its last token, which no layer has seen.

        Beam search puts its sequences in another order between these passes, so that theirs do not
        make up sequences.

        Raises:
            ValueError: no layer ran, one ran several times in one pass of the model, or passes had
                different numbers of sequences.
        """
        if self.repeated:
            raise ValueError(
                "expected each layer to run once in a pass of the model, got several runs of "
                f"{', '.join(sorted(self.repeated))}, whose ids do not make up one sequence; "
                "`passes` has those of each run, and replay_routing gives all runs the same"
            )
        if not self.passes:
            raise ValueError(
                "expected MoE layers to run inside record_routing(model), none did; a model that "
                "was compiled before has no hooks: record one that is not compiled"
            )
        for name, passes in self.passes.items():
            batches = {tuple(ids.shape[:-2]) for ids in passes}
            if len(batches) > 1:
                raise ValueError(
                    "expected passes of the same sequences, which are joined along S, got batches "
                    f"of {', '.join(map(str, sorted(batches)))} in {name!r}; record each batch in "
                    "a context of its own, or take `passes`"
                )
        return {name: torch.cat(ids, dim=-2) for name, ids in self.passes.items()}


@contextmanager
def record_routing(model: nn.Module) -> Generator[RecordedRouting]:
    """Record the experts that each MoE layer of the model chooses while the context is open.

    A pass that raises an error counts as if it had not been. Not for compiled models: their hooks
    are fixed when they are compiled. Nor for passes of several threads at the same time, whose ids
    would mix.

    Yields:
        A `RecordedRouting`; its `expert_ids()` are what `replay_routing` takes.

    Raises:
        ValueError: a layer's router chooses tokens for experts, or does not run because the call
            brings a `RouterOutput`.
    """
    recorded = RecordedRouting()
    chosen: dict[str, Tensor] = {}
    ran: list[str] | None = None  # in the pass of the model that is under way, if one is
    hooks = []

    def begin(model: nn.Module, args: Any) -> None:
        nonlocal ran
        undo()  # after a Ctrl-C, for which torch calls no hook
        ran = None if in_backward() else []

    def end(model: nn.Module, args: Any, output: Any) -> None:
        nonlocal ran
        ran = None

    def undo(*_: Any) -> None:
        """Forget a pass that did not come to its end: the caller may run it again."""
        nonlocal ran
        for name in ran or ():
            recorded.passes[name].pop()
            if not recorded.passes[name]:
                del recorded.passes[name]
        chosen.clear()
        ran = None

    def choose(name: str, routed: RouterOutput) -> None:
        _check_by_token(name, routed)
        chosen[name] = routed.expert_ids_TK.detach()

    def keep(name: str, output: MoEOutput) -> None:
        ids_TK = chosen.pop(name, None)
        chosen.clear()  # a router that layers share has chosen for this one alone
        if in_backward():
            return
        if ids_TK is None:
            raise ValueError(
                f"expected the router of {name!r} to run, got a call with a RouterOutput, whose "
                "experts the caller knows, or a layer that was compiled before and has no hooks "
                "inside"
            )
        # A copy: the router's backward pass reads its ids, and autograd does not notice what a
        # collective writes into these.
        ids = ids_TK.view(*output.y.shape[:-1], ids_TK.shape[1]).clone()
        recorded.passes.setdefault(name, []).append(ids)
        if ran is not None:
            if name in ran:
                recorded.repeated.add(name)
            ran.append(name)

    try:
        for name, layer in moe_layers(model).items():
            hooks.append(after_forward(layer.router, partial(choose, name)))
            hooks.append(after_forward(layer, partial(keep, name)))
        hooks.append(model.register_forward_pre_hook(begin))
        hooks.append(model.register_forward_hook(end))
        hooks.append(model.register_forward_hook(undo, always_call=True))
        yield recorded
    finally:
        undo()
        for hook in hooks:
            hook.remove()


@contextmanager
def replay_routing(model: nn.Module, expert_ids: Mapping[str, Ids] | Ids) -> Generator[None]:
    """Send tokens to the given experts in every pass of the model while the context is open.

    The backward pass belongs inside too, into the context of its own pass if there are several:
    layers that are recomputed there outside of it raise an error, for they would choose anew, or
    get other ids. Reentrant checkpoints are refused, for they could not tell. A copy of the model
    that is made inside (an average of the weights, say) chooses for itself.

    Args:
        model: its MoE layers are called with x [..., D].
        expert_ids: integers, tensors or NumPy arrays, by layer name [..., K] as `record_routing`
            has them, or for all layers in their order [..., L, K], as vLLM returns them
            (`enable_return_routed_experts`). The leading dimensions are x's, or T = their product.
            They are copied: for the next ones, written into the same memory or not, open a context
            of their own.
            A token whose ids are all negative (of a prompt, or the last one of a rollout) is routed
            by the router. A layer that runs several times gets the same ids each time.

    Raises:
        ValueError: no ids, ids of other layers, of another shape, or of no expert, tokens left to a
            router that chooses tokens for experts, or a second context of the same layers inside.
    """
    layers = moe_layers(model)
    for name, layer in layers.items():
        hooks = layer._forward_pre_hooks.values()
        if any(isinstance(hook, _Forced) and hook.ids is not None for hook in hooks):
            raise ValueError(
                f"expected one replay_routing at a time, got {name!r} inside another one, whose "
                "passes would be recomputed with these ids; leave that before this one opens"
            )
    by_name = _by_name(expert_ids, layers)
    forced = [_Forced(name, layer, by_name[name]) for name, layer in layers.items()]
    try:
        yield
    finally:
        for one in forced:
            one.close()


def _by_name(
    expert_ids: Mapping[str, Ids] | Ids, layers: Mapping[str, MoELayer]
) -> dict[str, Tensor]:
    if not isinstance(expert_ids, Mapping):
        all_ids = _as_tensor("all layers", expert_ids)
        if all_ids.dim() < 3 or all_ids.shape[-2] != len(layers):
            raise ValueError(
                f"expected expert ids [..., {len(layers)} MoE layers, K], got a tensor of shape "
                f"{tuple(all_ids.shape)}"
            )
        expert_ids = dict(zip(layers, all_ids.unbind(-2), strict=True))
    if expert_ids.keys() != layers.keys():
        raise ValueError(
            f"expected expert ids of the layers {', '.join(layers)}, got those of "
            f"{', '.join(map(str, expert_ids)) or 'none'}"
        )
    by_name = {name: _as_tensor(repr(name), ids) for name, ids in expert_ids.items()}
    for name, ids in by_name.items():
        choices = layers[name].config.num_choices
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.numel() and not (whole and int(ids.max()) < choices):
            raise ValueError(
                f"expected integer expert ids below {choices} for {name!r}, got {ids.dtype}"
                + (f" up to {ids.max()}" if whole else "")
            )
    return by_name


def _as_tensor(whose: str, ids: object) -> Tensor:
    """The ids as a tensor that can be compared. vLLM returns a NumPy array, of uint16 for one."""
    # A copy: what is written into the ids later has not been checked, nor seen by the layers'
    # forward pass, which a recomputation has to repeat. And an array may be read-only.
    if isinstance(ids, Tensor):
        ids = ids.clone()
    elif hasattr(ids, "__array__"):
        ids = torch.tensor(ids)
    if not isinstance(ids, Tensor):
        hint = "; pass its expert_ids()" if isinstance(ids, RecordedRouting) else ""
        raise ValueError(
            f"expected the expert ids of {whose} as a tensor or an array, got {described(ids)}"
            + hint
        )
    # Of what has no sign torch compares little, and clamps -1 to its largest number.
    return ids if ids.dtype.is_signed or ids.dtype is torch.bool else ids.long()


class _Forced:
    """Hooks that call a layer with `routing`, and refuse to recompute that call with other ids."""

    def __init__(self, name: str, layer: MoELayer, ids: Tensor) -> None:
        self.name = name
        self.ids: Tensor | None = ids
        self.some_are_free = bool((ids < 0).all(dim=-1).any())
        self.id = layer.register_forward_pre_hook(self, with_kwargs=True).id
        self.id_of_mark = layer.register_forward_hook(self.mark).id

    def close(self) -> None:
        self.ids = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which comes with a copied or saved layer: nobody would ever close it."""
        return self.__dict__ | {"ids": None}

    def __call__(self, layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.ids is not None:
            return args, kwargs | {"routing": self._routing(layer, *args, **kwargs)}
        if in_backward():
            raise ValueError(
                "expected the backward pass inside replay_routing, got a layer recomputed outside, "
                "which would choose its experts anew; move loss.backward() into the context"
            )
        # A new pass, so nothing of the old one will be recomputed: the hook removes itself, from
        # this layer, which may be a copy. Not in a compiled graph, which cannot remove hooks; the
        # next pass outside of one does.
        if not torch.compiler.is_compiling():
            layer._forward_pre_hooks.pop(self.id, None)
            layer._forward_pre_hooks_with_kwargs.pop(self.id, None)
            layer._forward_hooks.pop(self.id_of_mark, None)
        return None

    def mark(self, layer: MoELayer, args: tuple[Any, ...], output: MoEOutput) -> MoEOutput:
        """Let the backward pass find out whether it recomputed this call with these ids."""
        # What a compiled graph recomputes by itself has its own ids.
        if self.ids is None or torch.compiler.is_compiling() or not output.y.requires_grad:
            return output
        number = torch.tensor(id(self), device="cpu")  # reading it waits for no GPU
        return output._replace(y=_OfContext.apply(output.y, number, self))

    def _routing(
        self, layer: MoELayer, x: Tensor, *, mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        assert self.ids is not None
        shape = (*x.shape[:-1], layer.config.top_k)
        if self.ids.shape not in (shape, (math.prod(shape[:-1]), shape[-1])):
            raise ValueError(
                f"expected expert ids of shape {shape} for {self.name!r}, got "
                f"{tuple(self.ids.shape)}"
            )
        # Clamped first: int32 would make an expert of a number below -2**31.
        routing = self.ids.clamp(min=-1).to(x.device, torch.int32).reshape(shape)
        if not self.some_are_free:
            return routing
        # As the layer does: some routers look at all real tokens, and padding may be NaN. The layer
        # is about to run its router again, for the weights, and must draw the same noise: jitter
        # that differs would weigh these tokens' experts by other logits than those that chose them.
        with torch.no_grad(), _same_draws_again(layer, x.device):
            own = layer.route(x, mask=mask)
        _check_by_token(self.name, own)
        is_free = (routing < 0).all(dim=-1, keepdim=True)
        return torch.where(is_free, own.expert_ids_TK.view(shape), routing)


class _OfContext(torch.autograd.Function):
    """The identity, which knows the context of its call and saves that context's number.

    A checkpoint saves the number anew when it recomputes the call: that of the context open then.
    """

    @staticmethod
    def forward(y: Tensor, number: Tensor, forced: _Forced) -> Tensor:
        return y.detach()  # no view for autograd, so that the caller may write into it

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, _Forced], output: Tensor) -> None:
        _, number, ctx.forced = inputs
        ctx.save_for_backward(number)
        ctx.is_remade = in_backward()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # ty: ignore[incompatible-method-override]
        if ctx.is_remade:  # a reentrant checkpoint runs the backward pass of what it recomputed
            raise ValueError(
                "expected checkpoints with use_reentrant=False inside replay_routing, got one with "
                f"True of {ctx.forced.name!r}, which cannot tell whether it recomputes the pass of "
                "this context"
            )
        (number,) = ctx.saved_tensors
        if int(number) != id(ctx.forced):
            raise ValueError(
                "expected the backward pass of each pass of the model inside its own "
                f"replay_routing, got {ctx.forced.name!r} recomputed inside another one, with the "
                "experts of other tokens; call loss.backward() before the next context opens"
            )
        return grad, None, None


def _same_draws_again(layer: MoELayer, device: torch.device) -> AbstractContextManager[None]:
    """Put the random streams back at the end, so that the next run of the router draws the same."""
    router = layer.router
    draws = router.training and layer.config.jitter_eps > 0
    if is_ours(router, "forward", "logits") and not draws:
        return nullcontext()  # the compiler, and a CUDA graph, could not save the streams
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _check_by_token(name: str, routed: RouterOutput) -> None:
    if routed.token_ids_N is not None:
        raise ValueError(
            f"expected routers that choose experts for tokens, got {name!r} with one that "
            "chooses tokens for experts"
        )
