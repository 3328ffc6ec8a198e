"""Windows of attention: which layers of a config.json have one, and ours, both ways.

Theirs of W tokens holds a token's own: W - 1 before it are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mb_train.config import TrainConfig, whole
from mb_train.convert.hugging_face.config_json import Json
from mb_train.flags.layer_patterns import every_nth_full

_NEAR, _FULL = "sliding_attention", "full_attention"
LAYER_TYPES = "layer_types"


def fitting(config: Json) -> int:
    """How long a text of this model may be, where its window is none of ours.

    A window of W tokens leaves nothing out of W tokens.
    """
    positions, window = config["max_position_embeddings"], config.get("sliding_window")
    return positions if window is None else min(positions, window)


def window_fields(config: Json, near: Sequence[bool]) -> dict[str, Any]:
    """Fields of a model whose class heeds `sliding_window`.

    Layers that no flag of ours tells from the others have none here: then texts have to fit.

    Args:
        near: whether each layer has a window, if there is one.
    """
    window, every = config.get("sliding_window"), every_nth_full(near)
    if window is None or every == 1:
        return {"max_position_embeddings": config["max_position_embeddings"]}
    if every is None:
        return {"max_position_embeddings": fitting(config)}
    return {
        "max_position_embeddings": config["max_position_embeddings"],
        "window_size": window - 1,
        "window_attn_skip_freq": every if every <= len(near) else None,
    }


def every_layer(config: Json) -> list[bool]:
    """All of them."""
    return [True] * config["num_hidden_layers"]


def by_type(config: Json) -> list[bool] | None:
    """As `layer_types` says, one for each layer; None where the file leaves them to the class.

    Raises:
        ValueError: other types, or of other layers.
    """
    types = config.get(LAYER_TYPES)
    if types is None:
        return None
    layers = config["num_hidden_layers"]
    if len(types) != layers or not {_NEAR, _FULL}.issuperset(types):
        raise ValueError(
            f"Expected {LAYER_TYPES} of config.json to be {_NEAR} or {_FULL} for each of {layers} "
            f"layers, got {types}: this model has something that ours have not."
        )
    return [kind == _NEAR for kind in types]


def qwen_windows(config: Json) -> dict[str, Any]:
    """Of a dense Qwen: in layers from a number on, unless the file says in which."""
    layers, first = range(config["num_hidden_layers"]), config["max_window_layers"]
    return windows_if_used(config, by_type(config) or [layer >= first for layer in layers])


def windows_if_used(config: Json, near: Sequence[bool] | None) -> dict[str, Any]:
    """With Qwen's switch, which other classes pass over.

    Args:
        near: as for `window_fields`; None: it is not known, and texts have to fit.
    """
    if not config["use_sliding_window"]:
        return window_fields(config, [False] * config["num_hidden_layers"])
    return {} if near is None else window_fields(config, near)


def window_config(config: TrainConfig) -> dict[str, Any]:
    """Back; classes that have no pattern of layers pass over it."""
    if config.windows is None:
        return {"sliding_window": None, "use_sliding_window": False}
    size, every = config.windows
    found = {"sliding_window": size + 1, "use_sliding_window": True, "max_window_layers": 0}
    return found if every is None else found | {LAYER_TYPES: layer_types(config)}


def layer_types(config: TrainConfig) -> list[str]:
    """The kind of each layer."""
    layers = range(whole(config.num_layers))
    return [_NEAR if config.has_window(layer) else _FULL for layer in layers]
