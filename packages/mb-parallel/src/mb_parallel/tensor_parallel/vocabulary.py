"""The two ends of a language model, with the vocabulary split by rows of the embedding.

Letters: B sequences, S tokens of a sequence, D hidden, V vocabulary, R tokens, P ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mb_kernels
from torch import Tensor, nn

from mb_parallel.engines import is_dtensor
from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import adapt, shard, to_local
from mb_parallel.tensor_parallel.styles import Region, Style, own


@dataclass(frozen=True)
class VocabParallelEmbedding(Style):
    """An `nn.Embedding` of tokens: each rank looks up its own rows, and the ranks add up.

    A token outside the vocabulary raises on every rank, as in the embedding itself. If the head is
    tied to the embedding, pass `embedding.weight` to the loss (see `VocabParallelLoss`).
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        for option, unset in (
            ("padding_idx", None),
            ("max_norm", None),
            ("scale_grad_by_freq", False),
        ):
            given = getattr(module, option, unset)
            if given != unset:
                raise ValueError(
                    f"Expected an embedding with {option}={unset}, got {given}, which would act on "
                    "a rank's rows as if they were all. Make the embedding without it, and mask "
                    "padded tokens in the loss."
                )
        own(module, "weight")
        shard(module, "weight", 0, region.mesh, what="vocabulary")
        size = module.get_parameter("weight").shape[0]
        rows = size // region.size
        start = rows * region.rank

        def forward(_: nn.Module, original: Callable[..., Any], tokens_BS: Tensor) -> Tensor:
            mine_BS = (tokens_BS >= start) & (tokens_BS < start + rows)
            known_BS = (tokens_BS >= 0) & (tokens_BS < size)
            x_BSD = original((tokens_BS - start).masked_fill(known_BS & ~mine_BS, 0))
            return region.leave(x_BSD.masked_fill(~mine_BS[..., None], 0))

        how = (self, rows)
        adapt(module, region.adapted, how, views={"weight": to_local}, forward=forward)


@dataclass(frozen=True)
class VocabParallelLoss(Style):
    """A module that calls a head's loss, whose weight is sharded over the vocabulary.

    The module has `mb_kernels.linear_cross_entropy` as an attribute and calls it as
    `self.cross_entropy(x_BSD, weight, labels_BS, weights_BS, ...)`, with the stream, unflattened,
    and the embedding's or the head's weight. Every rank gets the whole loss.

    Args:
        attribute: its name.
        bias: the name of a parameter [V] of the module itself that is added to the scores.
        whole: whether all hidden states are on every rank even with sequence parallelism (after a
            `JoinOutput`), instead of being spread as the stream is.
    """

    attribute: str = "cross_entropy"
    bias: str | None = None
    whole: bool = False

    def apply(self, module: nn.Module, region: Region) -> None:
        if getattr(module, self.attribute, None) is not mb_kernels.linear_cross_entropy:
            raise ValueError(
                f"Expected {type(module).__name__}.{self.attribute} to be "
                f"mb_kernels.linear_cross_entropy, got {getattr(module, self.attribute, None)!r}. "
                "The module keeps it in an attribute and calls it there."
            )
        if self.bias is not None and module._parameters.get(self.bias) is not None:
            shard(module, self.bias, 0, region.mesh, what="vocabulary")
        if self.whole:
            region = replace(region, sequence_parallel=False)
        loss = functools.partial(vocab_parallel_cross_entropy, region=region)
        setattr(module, self.attribute, loss)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return [module] if own(module) == [self.bias] else []


def vocab_parallel_cross_entropy(
    x: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    region: Region,
    bias_V: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`mb_kernels.linear_cross_entropy` over a vocabulary that is split over the ranks.

    For every token the ranks exchange three numbers: the highest score, the sum of exponentials and
    the label's score. Logits stay on their rank.

    Args:
        x: the stream, [..., S, D] or, with sequence parallelism, this rank's part of S.
        weight_VD, bias_V: DTensors sharded by rows, or this rank's rows.
        labels, weights: [..., S], all of them on every rank.

    Raises:
        ValueError: a weight that no style has split.
    """
    if isinstance(weight_VD, nn.Parameter) and not is_dtensor(weight_VD):
        raise ValueError(
            f"Expected a head's weight shared out by rows, got all {weight_VD.shape[0]} of them. "
            "Give the head ColumnParallel(enter=False), or what it is tied to "
            "VocabParallelEmbedding()."
        )
    weight_VD = to_local(weight_VD)
    bias_V = None if bias_V is None else to_local(bias_V)
    rows = weight_VD.shape[0]
    gather = functools.partial(collectives.stacked, group=region.group)
    place = mb_kernels.VocabularyShard(rows * region.rank, rows * region.size, gather)
    return mb_kernels.linear_cross_entropy(
        region.enter(x),
        weight_VD,
        labels,
        weights,
        bias_V=bias_V,
        reduction=reduction,
        shard=place,
    )
