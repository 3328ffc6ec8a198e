"""A model's passes over further tokens of a cache, the host's part of them taken once.

To launch the kernels of a token takes the host longer than the GPU takes to run them. So what comes
again and again, one token of each row, is captured as a CUDA graph and replayed. It attends to all
places of the cache, of which a mask hides what is not filled yet, and holds until there are more
places or fewer rows. On a CPU, and where a layer asks the host, nothing is captured. A capture runs
nothing, so what cannot be captured goes on as it was.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from mb_train.models.cache import KVCache
from mb_train.models.gpt import GPT

# Passes of a shape that run as they are before one is captured: kernels are built, libraries
# allocate workspaces.
WARM_UP = 2
_CAPTURING = threading.Lock()  # all captures are on one stream of torch's


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What replays what a function does on the GPU; it returns the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile. Where a capture cannot even begin, torch leaves its
    # stream the current one.
    with (
        _CAPTURING,
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
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
        self._graph: Callable[[Tensor], Tensor] | None = None  # for passes of that shape

    def __call__(self, tokens_BQ: Tensor, new_B: Tensor, cache: KVCache) -> Tensor:
        """Scores after each row's last new token, [B, V] fp32."""
        cache.reserve(tokens_BQ.shape[1])
        shape = (*tokens_BQ.shape, cache.places)
        if shape != self._shape:
            self._shape, self._passes, self._graph = shape, 0, None
        self._passes += 1
        again = tokens_BQ.shape[1] == 1 and self._passes > WARM_UP
        if again and self._may and self._graph is None:
            self._graph = self._captured(tokens_BQ.clone(), cache)
        if self._graph is None:
            return self._model.go_on(tokens_BQ, new_B, cache)
        return self._graph(tokens_BQ)

    def _captured(self, tokens_B1: Tensor, cache: KVCache) -> Callable[[Tensor], Tensor] | None:
        """The scores after other tokens in place of these; None if that is not to be had."""

        def go_on() -> Tensor:  # reads no tensor that would be gone when it is replayed
            return self._model.go_on(tokens_B1, torch.ones_like(tokens_B1[:, 0]), cache)

        try:
            replay = captured(go_on)
        except RuntimeError as error:  # another library's kernel may wait for the device
            self._may = False
            warnings.warn(
                "A token's pass could not be captured as a CUDA graph, and is launched kernel by "
                f"kernel, which is slower: {error}",
                stacklevel=3,
            )
            return None

        def replayed(others_B1: Tensor) -> Tensor:
            tokens_B1.copy_(others_B1)
            return replay().clone()

        return replayed


def can_be_captured(model: GPT, device: torch.device) -> bool:
    """Whether a pass asks the host for nothing."""
    if device.type != "cuda":
        return False
    return model.config.moe is None or model.config.moe.mlp_impl == "grouped"
