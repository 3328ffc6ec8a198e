"""One training run as one dataclass that checks itself: all groups of fields, flat.

Names, meanings and defaults are Megatron-LM's (2023), so that its launch scripts carry over; a
field that Megatron does not have says so with "(ours)". A recipe, a TOML file and the command line
are layers of the same fields: see `mb_train.flags.command_line`. Nothing here imports torch:
`--help` must be quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from mb_train.config.attention import AttentionFields
from mb_train.config.data import DataFields
from mb_train.config.field import (
    Bounds,
    Spec,
    check_field,
    check_kind,
    flag_name,
    spec,
    value_types,
    whole,
)
from mb_train.config.hybrid import HybridFields
from mb_train.config.masking import MaskingFields
from mb_train.config.model import ModelFields
from mb_train.config.moe import MoEFields
from mb_train.config.network import Network
from mb_train.config.offloading import OffloadingFields
from mb_train.config.outputs import CheckpointingFields, LoggingFields, ValidationFields
from mb_train.config.parallel import ParallelFields
from mb_train.config.positions import PositionFields
from mb_train.config.rates import RateFields
from mb_train.config.training import (
    InitializationFields,
    PrecisionFields,
    RegularizationFields,
    TrainingFields,
)
from mb_train.config.width import WidthFields
from mb_train.words import counted

# Headings of --help, and tables of a TOML file, in this order.
GROUPS: dict[str, type[Any]] = {
    "model": ModelFields,
    "attention": AttentionFields,
    "hybrid models": HybridFields,
    "positions": PositionFields,
    "width": WidthFields,
    "moe": MoEFields,
    "regularization": RegularizationFields,
    "training": TrainingFields,
    "activations on the host": OffloadingFields,
    "initialization": InitializationFields,
    "learning rate": RateFields,
    "checkpointing": CheckpointingFields,
    "precision and devices": PrecisionFields,
    "parallelism": ParallelFields,
    "validation": ValidationFields,
    "data": DataFields,
    "masked models and retrieval": MaskingFields,
    "logging": LoggingFields,
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    Network, MoEFields, RegularizationFields, TrainingFields, OffloadingFields,
    InitializationFields, RateFields, CheckpointingFields, PrecisionFields, ParallelFields,
    ValidationFields, DataFields, MaskingFields, LoggingFields,
):  # fmt: skip
    """Every choice of a training run. Fields that derive from others are properties.

    `mb-train --help` says what each means: field `num_layers` is the flag `--num-layers`.

    Raises:
        ValueError: values that cannot work, alone or together; says expected, got and remedy.
    """

    def __post_init__(self) -> None:
        missing = [
            flag_name(f.name)
            for f in fields(self)
            if spec(f).required and getattr(self, f.name) is None
        ]
        if missing:
            raise ValueError(
                f"Expected a whole model and run, missing {', '.join(missing)}. "
                "Give them, or start from a --recipe."
            )
        kinds = _kinds()
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None or f.default is not None:
                check_kind(f.name, value, kinds[f.name])
                check_field(f, value)
        self.check_model()
        self.check_moe()
        self.check_training()
        self.check_offloading(
            sum(self._stacks.values()) + self.mtp_num_layers * self._layers_of_module,
            experts=self.moe_num_experts is not None,
            recompute=self.recompute_granularity,
            compiles=self.compile,
            graph=self.cuda_graph,
        )
        self.check_rates(by_samples=self.by_samples)
        self.check_regularization()
        self.check_precision()
        if self.model == "t5":  # a pipeline cuts its encoder and its decoder as one row of layers
            self.check_parallel(sum(self._stacks.values()), "--num-layers + --decoder-num-layers")
        else:
            self.check_parallel(whole(self.num_layers), "--num-layers")
        self.check_data()
        if self.reads_token_files:
            self.check_blends()
        self.check_checkpointing()
        self.check_logging()
        self._check_skipped()
        self._check_positions()
        self._check_decoder()
        self._check_context()
        self._check_tensor()
        self._check_shared_sequences()
        self._check_samples()
        self._check_classifier()
        self._check_places()
        self._check_dispatcher()
        self._check_layers_of_experts()
        self._check_fp8()
        self._check_mup()

    @property
    def reads_token_files(self) -> bool:
        """Data sets are .bin and .idx files, which may be weighed; those of a task are text."""
        return self.task is None

    @property
    def positions(self) -> int:
        """Longest sequence."""
        return self.max_position_embeddings or self._longest

    @property
    def position_rows(self) -> int | None:
        """Rows of learned positions; a model without them takes sequences of any length."""
        return self.positions if self.position_embedding_type == "learned" else None

    @property
    def _longest(self) -> int:
        return max(whole(self.seq_length), self.decoder_seq_length or 0)

    @property
    def blocks_at_once(self) -> int | None:
        """Blocks on a rank among which a retriever finds a query's own; None for other models."""
        return self.micro_batch_size if self.model == "ict" else None

    @property
    def expert_ffn_size(self) -> int:
        """F, the width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    def expert_layers(self, layers: int) -> Sequence[int]:
        """Those of so many layers that have experts."""
        if self.hybrid_layer_pattern is None:
            return super().expert_layers(layers)
        kinds = enumerate(self.hybrid_layer_pattern[:layers])
        return [layer for layer, kind in kinds if kind == "E"]

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a feed-forward without experts."""
        if self.hybrid_layer_pattern is not None:
            return "-" in self.hybrid_layer_pattern
        layers = whole(self.num_layers)
        return len(self.expert_layers(layers)) < layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, as `moe_layer_names` has them."""
        return len(self.moe_layer_names)

    @property
    def moe_layer_names(self) -> list[str]:
        """Layers with experts, counted from 0 in their stack or module, in the order of metrics."""
        names = [
            f"{stack}layer {layer}"
            for stack, layers in self._stacks.items()
            for layer in self.expert_layers(layers)
        ]
        if self.mtp_pattern is not None:
            experts = [layer for layer, kind in enumerate(self.mtp_pattern) if kind == "E"]
        else:
            experts = [0] if self.has_experts(whole(self.num_layers) - 1) else []
        modules = range(self.mtp_num_layers)
        return names + [f"mtp {module} layer {layer}" for module in modules for layer in experts]

    @property
    def _stacks(self) -> dict[str, int]:
        """Layers of each of the model's stacks, T5's two or ICT's two towers, by its prefix."""
        layers = whole(self.num_layers)
        if self.model == "t5":
            return {"encoder ": layers, "decoder ": self.decoder_layers}
        return {"query ": layers, "block ": layers} if self.model == "ict" else {"": layers}

    @property
    def _layers_of_module(self) -> int:
        """Of one for further tokens: of halves there may be several."""
        return 1 if self.mtp_pattern is None else len(self.mtp_pattern)

    @property
    def decay_length(self) -> str:
        """Length of the learning rate's decay, with its unit."""
        if self.by_samples:
            return counted(self.lr_decay_samples or whole(self.train_samples), "sample")
        return counted(self.lr_decay_iters or whole(self.train_iters), "step")

    @property
    def weight_decay_length(self) -> str | None:
        """Length of the weight decay's course, with its unit; None if it is constant."""
        if self.weight_decay_incr_style == "constant":
            return None
        if self.by_samples:
            return counted(self.weight_decay_incr_samples or whole(self.train_samples), "sample")
        return counted(self.weight_decay_incr_iters or whole(self.train_iters), "step")

    def model_identity(self, *, vocab_size: int, tokenizer: str) -> dict[str, Any]:
        """The values that a checkpoint must share with this run, by name.

        Args:
            vocab_size: padded.
            tokenizer: its fingerprint.
        """
        own = {name: getattr(self, name) for name in self.names_on_load("model")}
        return own | {"padded_vocab_size": vocab_size, "tokenizer": tokenizer}

    def dataset_arguments(self) -> dict[str, Any]:
        """Arguments that all of `mb_data.build_gpt_datasets`, `build_bert_datasets`, ... take."""
        return {
            "split": self.split,
            "split_rounding": self.split_rounding,
            "seed": self.seed,
            "cache_dir": self.data_cache_path,
        }

    @classmethod
    def names_on_load(cls, on_load: str) -> dict[str, list[str]]:
        """Values in force of one kind (see `OnLoad`), and the fields behind each."""
        names: dict[str, list[str]] = {}
        for members in GROUPS.values():
            for f in fields(members):
                if spec(f).on_load == on_load:
                    names.setdefault(spec(f).in_force or f.name, []).append(f.name)
        return names

    def lacking(self, name: str, *, said: Mapping[str, Any] | None = None) -> str:
        """What a field needs to do something and has not, as it is typed; "" if it does something.

        Args:
            said: what was typed: a run may begin without the --load that was said, where nothing
                is saved yet.
        """
        needs = _specs()[name].needs
        if self.moe_num_experts is None and name.startswith(("moe_", "expert_")):
            needs = ("moe_num_experts",)
        every = needs if isinstance(needs, list) else [needs]
        return next(filter(None, (self._lacking(name, one, said) for one in every)), "")

    def _lacking(self, name: str, needs: tuple[Any, ...], said: Mapping[str, Any] | None) -> str:
        """Of one of the tuples that say what it needs."""
        if not needs or name in needs:
            return ""
        names, *wanted = needs
        ways = []
        for needed in names if isinstance(names, tuple) else (names,):
            there = getattr(self, needed)
            met = [w.holds(there) if isinstance(w, Bounds) else there == w for w in wanted]
            way = self.lacking(needed, said=said)
            if not way and not (any(met) if wanted else there or (said or {}).get(needed)):
                words = (w.words if isinstance(w, Bounds) else w for w in wanted)
                way = f"{flag_name(needed)} {' or '.join(words)}".rstrip()
            ways.append(way)
        return " or ".join(ways) if all(ways) else ""

    def _check_skipped(self) -> None:
        if not self.skip_train:
            return
        if self.load is None:
            raise ValueError("Expected --load with --skip-train, which evaluates it, got none.")
        if self.save is not None:
            raise ValueError(
                f"Expected no --save with --skip-train, which saves nothing, got {self.save}."
            )

    def _check_positions(self) -> None:
        if self.model == "gpt" and self.position_embedding_type == "relative":
            raise ValueError(
                "Expected --position-embedding-type learned, rope or none with --model gpt, got "
                "relative."
            )
        if self.positions < self._longest:
            raise ValueError(
                "Expected --max-position-embeddings of at least --seq-length and "
                f"--decoder-seq-length, got {self.positions} and {self._longest}."
            )

    def _check_decoder(self) -> None:
        if self.model == "t5" and self.decoder_seq_length is None:
            raise ValueError("Expected --decoder-seq-length with --model t5, got none.")
        if self.model in ("gpt", "t5") and self._experts_choose:
            raise ValueError(
                "Expected another --moe-router-type than expert_choice with --model "
                f"{self.model}: which experts choose a token depends on those behind it, which it "
                "must not see. Models that see whole texts take it: bert, ict, classifier."
            )

    def _check_context(self) -> None:
        cp, tp = self.context_parallel_size, self.tensor_model_parallel_size
        if cp > 1 and self.model != "gpt":
            raise ValueError(
                f"Expected --context-parallel-size 1 with --model {self.model}, whose sequences "
                f"are short, and padded, got {cp}. Leave it out: the ranks then share the samples."
            )
        across = f" x --tensor-model-parallel-size {tp}" if tp > 1 else ""
        shared = {"--num-attention-heads": self.num_attention_heads}
        if self.delta_sizes is not None:
            shared["--linear-num-key-heads"] = self.linear_num_key_heads
        if self.mamba_sizes is not None:
            shared["--mamba-num-heads"] = self.mamba_sizes[0]
        for words, heads in shared.items():
            if cp > 1 and whole(heads) % (cp * tp):
                raise ValueError(
                    f"Expected {words} to be a multiple of --context-parallel-size {cp}{across}, "
                    f"for each rank computes with whole heads, got {heads}. Lower "
                    "--context-parallel-size."
                )

    def _check_tensor(self) -> None:
        pattern, tp = self.hybrid_layer_pattern, self.tensor_model_parallel_size
        attends = any(map(self._attends, range(whole(self.num_layers))))
        groups, heads = self.kv_heads, whole(self.num_attention_heads)
        # Of norms over the width of all heads each rank has channels of its own.
        over_width = self.qk_layernorm and self.qk_layernorm_over == "width"
        in_common = tp % groups == 0 and heads % tp == 0 and not over_width
        if (attends if pattern is None else "*" in pattern) and groups % tp and not in_common:
            words = "--num-query-groups" if self.group_query_attention else "--num-attention-heads"
            raise ValueError(
                f"Expected {words} to be a multiple of --tensor-model-parallel-size {tp}, or to "
                "divide it, as it divides --num-attention-heads, without norms over the width of "
                f"all heads, for each rank computes with whole heads, got {groups}. Lower "
                "--tensor-model-parallel-size."
            )
        if self.ffn_size % tp and self.has_dense_layers:
            raise ValueError(
                f"Expected --ffn-hidden-size to be a multiple of --tensor-model-parallel-size {tp}"
                f", for each rank computes an equal part, got {self.ffn_size}. Change one."
            )

    def _attends(self, layer: int) -> bool:
        return self.delta_sizes is None or not self.has_state(layer)

    def _check_shared_sequences(self) -> None:
        sharing: dict[str, int] = {}
        if self.context_parallel_size > 1:
            sharing["--context-parallel-size"] = self.context_parallel_size
        if self.sequence_parallel:
            tensor = self.tensor_model_parallel_size
            sharing["--tensor-model-parallel-size with --sequence-parallel"] = tensor
        ranks = math.prod(sharing.values())
        less = ", or leave --sequence-parallel out" if self.sequence_parallel else ""
        lengths = {"--seq-length": self.seq_length}
        if self.model == "t5":
            lengths["--decoder-seq-length"] = self.decoder_seq_length
        for words, length in lengths.items():
            if whole(length) % ranks:
                raise ValueError(
                    f"Expected {words} to be a multiple of {' x '.join(sharing)}, got {length} and "
                    f"{ranks}. Change one{less}."
                )

    def _check_samples(self) -> None:
        of_a_gpt = {
            "--fim-data": self.fim_data,
            "--document-packing best_fit": self.packs_whole,
            "--mock-data": self.mock_data,
            "--sft": self.sft,
        }
        for words, given in of_a_gpt.items():
            if given and self.model != "gpt":
                raise ValueError(f"Expected --model gpt with {words}, got {self.model}.")
        if self.model == "bert" and not (self.mask_prob or self.bert_binary_head):
            raise ValueError(
                "Expected a --mask-prob above 0 with --bert-no-binary-head, got 0: the BERT would "
                "have nothing to learn."
            )

    def _check_classifier(self) -> None:
        if (self.model == "classifier") != (self.task is not None):
            raise ValueError(
                "Expected --model classifier and --task together, got --model "
                f"{self.model} and {'no --task' if self.task is None else f'--task {self.task}'}."
            )
        if self.task is not None and self.train_data_path is None:
            raise ValueError("Expected --train-data with --task, its files, got none.")

    def _check_places(self) -> None:
        numbered = {
            "--moe-router-num-groups": self.moe_router_num_groups is not None,
            "--moe-uniform-expert-assignment": self.moe_uniform_expert_assignment,
        }
        for words, given in numbered.items():
            if given and self.moe_rebalance_interval:
                raise ValueError(
                    f"Expected --moe-rebalance-interval 0 with {words}, where an expert's number "
                    f"decides who chooses it, got {self.moe_rebalance_interval}."
                )

    def _check_dispatcher(self) -> None:
        has_experts = self.moe_num_experts is not None
        if has_experts and self.moe_dispatcher == "fixed" and not self.moe_capacity_factor:
            raise ValueError(
                "Expected --moe-capacity-factor above 0 with --moe-dispatcher fixed, got 0. "
                "Without a capacity take another dispatcher."
            )
        spread = self.moe_expert_model_parallelism or self.expert_model_parallel_size > 1
        halves = "zero-bubble" in self.schedule_in_force
        if has_experts and spread and halves and self.moe_dispatcher == "peer":
            raise ValueError(
                "Expected another --moe-dispatcher than peer with --pipeline-schedule "
                f"{self.schedule_in_force}, the second half of whose backward pass finds others' "
                "rows in the peers' memory. Take all_to_all, or interleaved-1f1b."
            )

    def _check_layers_of_experts(self) -> None:
        pattern = self.hybrid_layer_pattern
        if pattern is not None:
            self._check_pattern_of_experts(pattern)
        if self.moe_num_experts is not None and self.moe_layers is not None:
            self._check_listed_experts(self.moe_layers)
        if self.moe_num_experts is not None and not any(
            map(self.expert_layers, self._stacks.values())
        ):
            raise ValueError(
                f"Expected a layer of --num-layers {self.num_layers} to have experts with "
                f"--moe-num-experts {self.moe_num_experts}, got --moe-first-k-dense "
                f"{self.moe_first_k_dense} and --moe-layer-freq {self.moe_layer_freq}. Lower "
                "--moe-first-k-dense, or leave --moe-num-experts out."
            )

    def _check_listed_experts(self, listed: list[int]) -> None:
        if self.model == "t5":
            raise ValueError("Expected another --model than t5 with --moe-layers.")
        if (self.moe_layer_freq, self.moe_first_k_dense) != (1, 0):
            raise ValueError(
                "Expected --moe-layers or --moe-layer-freq and --moe-first-k-dense, got both."
            )
        if len(listed) != self.num_layers or 1 not in listed:
            raise ValueError(
                f"Expected --moe-layers to have a number for each of --num-layers "
                f"{self.num_layers}, and 1 for one of them, got {listed}."
            )

    def _check_pattern_of_experts(self, pattern: str) -> None:
        if ("E" in pattern) != (self.moe_num_experts is not None):
            raise ValueError(
                "Expected a layer E in --hybrid-layer-pattern with --moe-num-experts alone, got "
                f"{pattern} and {self.moe_num_experts} experts."
            )
        if self.moe_layers is not None:
            raise ValueError("Expected --moe-layers or --hybrid-layer-pattern, got both.")
        if (self.moe_layer_freq, self.moe_first_k_dense) != (1, 0):
            raise ValueError(
                "Expected --moe-layer-freq 1 and --moe-first-k-dense 0 with "
                "--hybrid-layer-pattern, which says itself which layers have experts, got "
                f"{self.moe_layer_freq} and {self.moe_first_k_dense}."
            )

    def _check_fp8(self) -> None:
        spared = self.fp8_spares
        if spared is None:
            return
        if all(layers <= sum(spared) for layers in self._stacks.values()):
            raise ValueError(
                "Expected --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 to leave "
                f"one of {max(self._stacks.values())} layers to --fp8-format, got {spared[0]} and "
                f"{spared[1]}."
            )
        if self.moe_num_experts is not None and self.moe_mlp_impl == "sparse":
            raise ValueError(
                "Expected --moe-mlp-impl grouped with --fp8-format, got sparse, whose products are "
                "not computed in 8-bit floats."
            )

    def _check_mup(self) -> None:
        if self.use_mup and self.optimizer != "adam":
            raise ValueError(
                "Expected --optimizer adam with --use-mup, whose rules for rates are of its steps, "
                f"got {self.optimizer}. Leave one of the two out."
            )


@cache
def _kinds() -> dict[str, Any]:
    return value_types(TrainConfig)


@cache
def _specs() -> dict[str, Spec]:
    return {f.name: spec(f) for f in fields(TrainConfig)}
