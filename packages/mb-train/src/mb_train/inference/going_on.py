"""A model's passes over further tokens of a cache, the host's part of them taken once.

To launch the kernels of a token takes the host longer than the GPU takes to run them. So what comes
again and again, one token of each row, is captured as a CUDA graph and replayed. It attends to all
places of the cache, of which a mask hides what is not filled yet, and holds until there are more
places or fewer rows. On a CPU, and where a layer asks the host, nothing is captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mb_train.models.cache import KVCache
from mb_train.models.gpt import GPT

# Passes of a shape that run as they are before one is captured: kernels are built, libraries
# allocate workspaces. To capture takes as long as one or two.
WARM_UP = 2


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What replays what a function does on the GPU; it returns the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads of a server may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class GoingOn:
    """`GPT.go_on` with room made in the cache, as a graph where that comes again and again.

    Args:
        model: in eval mode, on one device.
    """

    def __init__(self, model: GPT, device: torch.device) -> None:
        self._model = model
        self._may = can_be_captured(model, device)
        self._shape: tuple[int, ...] = ()
        self._passes = 0
        self._tokens_B1: Tensor | None = None  # where a graph reads them
        self._graph: Callable[[], Tensor] | None = None

    def __call__(self, tokens_BQ: Tensor, new_B: Tensor, cache: KVCache) -> Tensor:
        """Scores after each row's last new token, [B, V] fp32."""
        cache.reserve(tokens_BQ.shape[1])
        shape = (*tokens_BQ.shape, cache.places)
        if shape != self._shape:
            self._shape, self._passes, self._graph = shape, 0, None
        self._passes += 1
        if not self._may or tokens_BQ.shape[1] > 1 or self._passes <= WARM_UP:
            return self._model.go_on(tokens_BQ, new_B, cache)
        if self._graph is None or self._tokens_B1 is None:
            self._tokens_B1 = tokens_B1 = tokens_BQ.clone()

            def go_on() -> Tensor:  # reads no tensor that would be gone when it is replayed
                return self._model.go_on(tokens_B1, torch.ones_like(tokens_B1[:, 0]), cache)

            self._graph = captured(go_on)
        self._tokens_B1.copy_(tokens_BQ)
        return self._graph().clone()


def can_be_captured(model: GPT, device: torch.device) -> bool:
    """Whether a pass asks the host for nothing."""
    if device.type != "cuda":
        return False
    return model.config.moe is None or model.config.moe.mlp_impl == "grouped"
