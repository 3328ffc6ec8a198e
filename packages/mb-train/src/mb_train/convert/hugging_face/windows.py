"""Windows of attention: which layers of a config.json have one, and ours, both ways.

Theirs of W tokens holds a token's own: W - 1 before it are seen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

from mb_train.config import TrainConfig, whole
from mb_train.config.layers import told
from mb_train.convert.hugging_face.config_json import Json

NEAR, FULL = "sliding_attention", "full_attention"
LAYER_TYPES = "layer_types"


def fitting(config: Json) -> int:
    """How long a text of this model may be, where its window is none of ours.

    A window of W tokens leaves nothing out of W tokens.
    """
    positions, window = config["max_position_embeddings"], config.get("sliding_window")
    return positions if window is None else min(positions, window)


Layers: TypeAlias = int | list[int]


def window_fields(config: Json, near: Layers | None) -> dict[str, Any]:
    """Fields of a model whose class heeds `sliding_window`.

    Args:
        near: n if all layers but every n-th have the window, see `all_layers`, or 1 for each that
            has it and 0 for the others; None where nobody knows: then none has it here, and texts
            have to fit.
    """
    window, positions = config.get("sliding_window"), config["max_position_embeddings"]
    if window is None or near == 1:
        return {"max_position_embeddings": positions}
    if near is None:
        return {"max_position_embeddings": fitting(config)}
    return {
        "max_position_embeddings": positions,
        "window_size": window - 1,
        **said_of_layers(config, near, "window_attn_skip_freq", "window_layers"),
    }


def said_of_layers(config: Json, has: Layers, every: str, listed: str) -> dict[str, Any]:
    """What layers have, as one of two fields, of every n-th that lacks it or of each."""
    if isinstance(has, list):
        return {every: None, listed: has}
    return {every: None if has >= all_layers(config) else has, listed: None}


def all_layers(config: Json) -> int:
    """n where every n-th layer is none of them."""
    return config["num_hidden_layers"] + 1


def types_of_layers(config: Json, *kinds: str, before: Collection[str] = ()) -> list[str] | None:
    """`layer_types` of these kinds; None where the file leaves that to the class.

    Args:
        before: names that kinds had before.

    Raises:
        ValueError: other types, or of other layers.
    """
    types, layers = config.get(LAYER_TYPES), config["num_hidden_layers"]
    if types is not None and (len(types) != layers or not {*kinds, *before}.issuperset(types)):
        raise ValueError(
            f"Expected {LAYER_TYPES} of config.json to be {' or '.join(kinds)} for each of "
            f"{layers} layers, got {types}: this model has something that ours have not."
        )
    return types


def by_type(config: Json, default: Layers | None) -> Layers | None:
    """As `layer_types` says; `default` where the file leaves that to the class.

    Raises:
        ValueError: other types, or of other layers.
    """
    types = types_of_layers(config, NEAR, FULL)
    return default if types is None else told([kind == NEAR for kind in types])


def by_number(config: Json) -> Layers | None:
    """The same in layers from a number on, unless the file says in which."""
    layers, first = config["num_hidden_layers"], config["max_window_layers"]
    return by_type(config, told([layer >= first for layer in range(layers)]))


def qwen_windows(config: Json) -> dict[str, Any]:
    """Of a dense Qwen."""
    return windows_if_used(config, by_number(config))


def windows_if_used(config: Json, near: Layers | None) -> dict[str, Any]:
    """With Qwen's switch, which other classes pass over."""
    return window_fields(config, near if config["use_sliding_window"] else 1)


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
    return [NEAR if config.has_window(layer) else FULL for layer in layers]
