"""What tasks of models made of BERTs share: a trained one to begin from, and no cut through it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mb_parallel import ParallelMesh
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig
from mb_train.models.bert import Bert
from mb_train.models.config import TransformerConfig
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.base import Borders

_SAME = (
    "vocab_size", "max_positions", "positions", "num_layers", "hidden_size", "num_heads",
    "ffn_size", "activation", "norm", "post_norm",
)  # fmt: skip


class UncutTask:
    """Base of tasks whose models are spread by data and expert parallelism alone.

    Args:
        config: the run.
        vocab_size: padded.
        mesh: how the run is spread.

    Raises:
        ValueError: tensor or pipeline parallelism, or experts that mb_layers refuses.
    """

    first_input = "tokens_BS"
    sentences = True

    def __init__(self, config: TrainConfig, *, vocab_size: int, mesh: ParallelMesh) -> None:
        if mesh.tp_size > 1 or mesh.pp_size > 1:
            raise ValueError(
                f"Expected data and expert parallelism alone for --model {config.model}, got "
                f"tensor-parallel size {mesh.tp_size} and {mesh.pp_size} pipeline stages."
            )
        self.model_config = transformer_config(config, vocab_size)
        self.layers = self.model_config.num_layers
        self._config = config

    def borders(self, runs: Sequence[range]) -> Borders:
        """Not reached: see the class."""
        raise ValueError(f"Expected no pipeline stages for --model {self._config.model}.")

    def tensor_plan(self) -> Plan:
        """Not reached: see the class."""
        raise ValueError(f"Expected no tensor parallelism for --model {self._config.model}.")


def trained_bert(run: str, wanted: TransformerConfig) -> Bert:
    """The BERT of a run (`--bert-load`).

    Raises:
        ValueError: no BERT there, or one of other sizes than `wanted`.
    """
    from mb_train.loading import load_trained  # which makes models by tasks

    trained = load_trained(Path(run), kinds=("bert",))
    found = trained.model.config
    for name, here, there in (
        *((name, getattr(wanted, name), getattr(found, name)) for name in _SAME),
        ("experts", _experts(wanted), _experts(found)),
    ):
        if here != there:
            raise ValueError(
                f"Expected a BERT of this model's {name}, {here}, in {run} (--bert-load), got "
                f"{there}."
            )
    return trained.model


def _experts(config: TransformerConfig) -> tuple[int, int] | None:
    """How many, and their width; how they are trained is the run's own matter."""
    moe = config.moe
    return None if moe is None else (moe.num_experts, moe.ffn_hidden_size)
