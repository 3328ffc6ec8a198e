"""What the configuration can say and the program cannot do yet.

One table, by field: the values that are refused, or `ANY` for all but the default. Whoever builds
a feature takes its line out; an empty table means that every flag does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mb_train.config import TrainConfig, flag_name

ANY: tuple[Any, ...] = ()

NOT_YET: Mapping[str, tuple[Any, ...]] = {
    # models
    "apply_residual_connection_post_layernorm": ANY,
    # training
    "cuda_graph": ANY,
    "fp32_residual_connection": ANY,
    # parallelism
    "pipeline_model_parallel_split_rank": ANY,
    # retrieval beyond the training of its towers
    "retriever_seq_length": ANY,
    # logging
    "log_num_zeros_in_grad": ANY,
}


def not_supported(
    config: TrainConfig, table: Mapping[str, tuple[Any, ...]] = NOT_YET
) -> dict[str, Any]:
    """The fields of a run that ask for what cannot be done yet, with their values."""
    found = {}
    for f in fields(config):
        if f.name not in table:
            continue
        value, refused = getattr(config, f.name), table[f.name]
        if value in refused if refused else value != f.default:
            found[f.name] = value
    return found


def check_supported(config: TrainConfig, table: Mapping[str, tuple[Any, ...]] = NOT_YET) -> None:
    """Raise ValueError for a run that asks for what cannot be done yet."""
    found = not_supported(config, table)
    if found:
        asked = ", ".join(f"{flag_name(name)} ({value})" for name, value in found.items())
        raise ValueError(f"Not supported yet: {asked}. Leave it out, or give another value.")
