"""Fields that say how the model is trained: batches, length, optimizer, precision."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import (
    AT_LEAST_0,
    FRACTION,
    LEFT_OUT,
    POSITIVE,
    SCALE,
    SEED,
    SHARE,
    flag,
    whole,
)

# Muon leaves to Adam what is no matrix.
_ADAMS = ("optimizer", "adam", "muon")
_MUON = ("optimizer", "muon")
_ADAPTS = ("loss_scale", LEFT_OUT)
_RISING = ("weight_decay_incr_style", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class RegularizationFields:
    """Dropout, weight decay, and the optimizer's constants."""

    attention_dropout: float = flag(
        "dropout on attention weights", 0.1, bounds=FRACTION, on_load="said"
    )
    hidden_dropout: float = flag(
        "dropout on embeddings and on what joins the residual", 0.1, bounds=FRACTION,
        on_load="said",
    )  # fmt: skip
    weight_decay: float = flag(
        "decoupled weight decay, none for biases and norms", 0.01, bounds=AT_LEAST_0,
        on_load="said",
        instead_of=(
            "start_weight_decay",
            "end_weight_decay",
            "weight_decay_incr_style",
            "weight_decay_incr_iters",
            "weight_decay_incr_samples",
        ),
        needs=("weight_decay_incr_style", "constant"),
    )  # fmt: skip
    start_weight_decay: float | None = flag(
        "weight decay at the start of its schedule", bounds=AT_LEAST_0, on_load="said"
    )
    end_weight_decay: float | None = flag(
        "weight decay at the end of its schedule", bounds=AT_LEAST_0, on_load="said"
    )
    weight_decay_incr_style: str = flag(
        "course of the weight decay over the run", "constant",
        choices=("constant", "linear", "cosine"), on_load="said",
    )  # fmt: skip
    weight_decay_incr_iters: int | None = flag(
        "steps until --end-weight-decay; default the length of training (ours)", bounds=POSITIVE,
        on_load="said", in_force="weight_decay_length", needs=_RISING,
    )  # fmt: skip
    weight_decay_incr_samples: int | None = flag(
        "sequences until --end-weight-decay, with --train-samples (ours)", bounds=POSITIVE,
        on_load="said", in_force="weight_decay_length", needs=_RISING,
    )  # fmt: skip
    clip_grad: float = flag(
        "clip the gradient norm to this; 0 does not clip", 1.0, bounds=AT_LEAST_0, on_load="said"
    )
    adam_beta1: float = flag(
        "decay of Adam's first moment", 0.9, bounds=FRACTION, on_load="said", needs=_ADAMS
    )
    adam_beta2: float = flag(
        "decay of Adam's second moment", 0.999, bounds=FRACTION, on_load="said", needs=_ADAMS
    )
    adam_eps: float = flag(
        "epsilon in Adam's denominator", 1e-8, bounds=POSITIVE, on_load="said", needs=_ADAMS
    )
    sgd_momentum: float = flag(
        "momentum of SGD", 0.9, bounds=FRACTION, on_load="said", needs=("optimizer", "sgd")
    )
    muon_momentum: float = flag(
        "momentum of Muon", 0.95, bounds=FRACTION, on_load="said", needs=_MUON
    )
    muon_nesterov: bool = flag(
        "Muon moves along where its momentum will be, a step ahead; off in Megatron's scripts "
        "(those with --num-layers and no recipe) that do not ask for it",
        True,
        on_load="said",
        also=("--muon-use-nesterov",),
        needs=_MUON,
    )
    muon_num_ns_steps: int = flag(
        "iterations with which Muon makes a matrix orthogonal", 5, bounds=POSITIVE, on_load="said",
        needs=_MUON,
    )  # fmt: skip
    muon_coefficient_type: str = flag(
        "coefficients of these iterations: Jordan's, or such as change from step to step; quintic "
        "in Megatron's scripts that do not say it", "simple",
        choices=("simple", "quintic", "polar_express"), on_load="said", needs=_MUON,
    )  # fmt: skip
    muon_extra_scale_factor: float = flag(
        "size of Muon's steps: with 0.2 they are as large as Adam's; 1 in Megatron's scripts that "
        "do not say it", 0.2, bounds=POSITIVE, on_load="said", needs=_MUON,
    )  # fmt: skip
    muon_split_qkv: bool = flag(
        "Muon takes queries, keys and values for matrices of their own", True,
        off=("--muon-no-split-qkv",), on_load="said", needs=_MUON,
    )  # fmt: skip

    def check_regularization(self) -> None:
        """Raise ValueError for a schedule of the weight decay without its ends, or ends of none."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is not None or end is not None:
                raise ValueError(
                    "Expected --weight-decay-incr-style linear or cosine with --start-weight-decay "
                    f"and --end-weight-decay, {start} and {end}, got constant. Give the style, or "
                    "--weight-decay alone."
                )
            return
        if start is None or end is None or end < start:
            raise ValueError(
                "Expected --start-weight-decay and --end-weight-decay, not falling, with --weight-"
                f"decay-incr-style {self.weight_decay_incr_style}, got {start} and {end}."
            )


@dataclass(frozen=True, kw_only=True)
class TrainingFields:
    """Batches, the length of training, the optimizer, recompute."""

    micro_batch_size: int | None = flag(
        "sequences per rank and forward pass",
        bounds=POSITIVE,
        on_load="said",
        in_force="blocks_at_once",
        required=True,
        also=("--batch-size",),
    )
    global_batch_size: int | None = flag(
        "sequences per step over all ranks; default micro batch x ranks", bounds=POSITIVE,
        on_load="said",
    )  # fmt: skip
    rampup_batch_size: list[int] | None = flag(  # noqa: RUF009, a field like the others
        "START INCREMENT SAMPLES: let the global batch grow from START by INCREMENT to its size "
        "over the first SAMPLES", bounds=AT_LEAST_0, count=3, on_load="said",
    )  # fmt: skip
    train_iters: int | None = flag(
        "steps to train; this or --train-samples",
        bounds=POSITIVE,
        instead_of=(
            "train_samples",
            "lr_decay_samples",
            "lr_warmup_samples",
            "lr_wsd_decay_samples",
            "weight_decay_incr_samples",
            "rampup_batch_size",
        ),
    )
    train_samples: int | None = flag(
        "sequences to train on; this or --train-iters",
        bounds=POSITIVE,
        instead_of=(
            "train_iters",
            "lr_decay_iters",
            "lr_warmup_iters",
            "lr_wsd_decay_iters",
            "weight_decay_incr_iters",
        ),
    )
    optimizer: str = flag(
        "optimizer", "adam", choices=("adam", "sgd", "adafactor", "muon"), on_load="fixed",
        said_as={"dist_muon": "muon"},
    )  # fmt: skip
    optimizer_state_dtype: str = flag(
        "dtype of the optimizer's moments (ours)", "fp32", choices=("fp32", "bf16"),
        on_load="said", needs=_ADAMS,
    )  # fmt: skip
    optimizer_cpu_offload: bool = flag(
        "keep Adam's moments in pinned memory of the host, and read and write them there; weights "
        "stay on the GPU", False, also=("--offload-optimizer-states",),
    )  # fmt: skip
    optimizer_offload_fraction: float = flag(
        "share of the moments that is kept there, of whole parameters", 1.0, bounds=SHARE,
        needs=("optimizer_cpu_offload",),
    )  # fmt: skip
    exit_interval: int | None = flag(
        "save and stop at steps divisible by this", bounds=POSITIVE, on_load="own",
        falsy_is_none=True,
    )  # fmt: skip
    exit_duration_in_mins: float | None = flag(
        "save and stop this many minutes after the start", bounds=POSITIVE, on_load="own",
        falsy_is_none=True,
    )  # fmt: skip
    nan_limit: int = flag(
        "stop after this many steps in a row without finite loss and gradients, at the next "
        "progress line; 0: never (ours)",
        10, bounds=AT_LEAST_0,
    )  # fmt: skip
    recompute_granularity: str | None = flag(
        "what is recomputed in the backward pass: full layers, or their attention alone",
        choices=("full", "selective"), instead_of=("recompute_method",),
    )  # fmt: skip
    recompute_method: str | None = flag(
        "uniform: all layers, each by itself; block: the first --recompute-num-layers of a stage",
        choices=("uniform", "block"), needs=("recompute_granularity", "full"),
    )  # fmt: skip
    recompute_num_layers: int = flag(
        "see --recompute-method",
        1,
        bounds=POSITIVE,
        also=("--activations-checkpoint-num-layers", "--checkpoint-num-layers"),
        needs=("recompute_method", "block"),
    )
    deterministic_mode: bool = flag(
        "refuse every operation whose result may differ between two runs", False
    )
    cuda_graph: bool = flag(
        "replay micro-batches as CUDA graphs; on several GPUs with --zero-stage 0 (ours)", False
    )
    compile: bool = flag(
        "on a GPU, compile every layer: seconds to start, faster steps, dropout by other masks "
        "(ours)",
        False,
    )

    @property
    def by_samples(self) -> bool:
        """Whether the length of training is given in sequences."""
        return self.train_samples is not None

    @property
    def offload_fraction(self) -> float:
        """Share of the optimizer's moments in the host's memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def batch_size(self, data_parallel: int) -> int:
        """Sequences per step on `data_parallel` ranks, ramp-up apart.

        Raises:
            ValueError: the global batch is no multiple of micro batch x ranks.
        """
        per_pass = whole(self.micro_batch_size) * data_parallel
        size = self.global_batch_size or per_pass
        if size % per_pass:
            multiple = f"--micro-batch-size {self.micro_batch_size}"
            if data_parallel > 1:  # of more ranks than these, too, it has to be
                multiple = (
                    f"micro batch x data-parallel ranks = {self.micro_batch_size} x "
                    f"{data_parallel} = {per_pass}"
                )
            raise ValueError(
                f"Expected --global-batch-size to be a multiple of {multiple}, got {size}. "
                "Lower --micro-batch-size, or change the global batch."
            )
        return size

    def check_training(self) -> None:
        """Raise ValueError for batches and lengths that do not go together."""
        if (self.train_iters is None) == (self.train_samples is None):
            got = "neither" if self.train_iters is None else "both"
            raise ValueError(f"Expected one of --train-iters and --train-samples, got {got}.")
        if self.optimizer_cpu_offload and self.optimizer != "adam":
            raise ValueError(
                "Expected --optimizer adam with --optimizer-cpu-offload, whose moments a kernel "
                f"updates where they lie, got {self.optimizer}. Leave one out, or see --zero-stage."
            )
        self.batch_size(1)
        if self.rampup_batch_size is not None and not self.by_samples:
            raise ValueError(
                "Expected --train-samples with --rampup-batch-size, got --train-iters."
            )
        if self.recompute_method is not None and self.recompute_granularity == "selective":
            raise ValueError(
                "Expected --recompute-granularity full with --recompute-method "
                f"{self.recompute_method}, got {self.recompute_granularity}."
            )


@dataclass(frozen=True, kw_only=True)
class InitializationFields:
    """Where the weights begin."""

    seed: int = flag("seed of weights, data order and dropout", 1234, bounds=SEED, on_load="said")
    init_method_std: float = flag(
        "standard deviation of the initial weights", 0.02, bounds=AT_LEAST_0
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionFields:
    """The dtype of the arithmetic, and the device."""

    device: str = flag(
        "where to train; auto takes a GPU if there is one (ours)", "auto",
        choices=("auto", "cpu", "cuda"),
    )  # fmt: skip
    bf16: bool | None = flag(
        "compute in bf16 over fp32 master weights; default on a GPU yes, on a CPU no",
        on_load="said", instead_of=("fp16", "loss_scale"),
    )  # fmt: skip
    fp16: bool = flag(
        "compute in fp16 over fp32 master weights, with a loss scale",
        False,
        on_load="said",
        instead_of=("bf16",),
    )
    fp8_format: str | None = flag(
        "multiply by the weights of blocks in 8-bit floats, all of them E4M3; needs a GPU from Ada "
        "or Hopper on, or an MI300, MI350 or RX 9070", choices=("e4m3", "hybrid"), on_load="said",
        in_force="fp8_spares",
    )  # fmt: skip
    first_last_layers_bf16: bool = flag(
        "but not in the first and the last layers", False, on_load="said", in_force="fp8_spares",
        needs=("fp8_format",),
    )  # fmt: skip
    num_layers_at_start_in_bf16: int = flag(
        "how many these are at the start", 1, bounds=AT_LEAST_0, on_load="said",
        in_force="fp8_spares", needs=("first_last_layers_bf16",),
    )  # fmt: skip
    num_layers_at_end_in_bf16: int = flag(
        "and at the end", 1, bounds=AT_LEAST_0, on_load="said", in_force="fp8_spares",
        needs=("first_last_layers_bf16",),
    )  # fmt: skip
    loss_scale: float | None = flag(
        "a constant loss scale for fp16; default one that adapts", bounds=SCALE,
        on_load="said", needs=("fp16",), falsy_is_none=True,
    )  # fmt: skip
    initial_loss_scale: float = flag(
        "where the loss scale begins", 2.0**32, bounds=SCALE, needs=_ADAPTS
    )
    min_loss_scale: float = flag("the least loss scale", 1.0, bounds=SCALE, needs=_ADAPTS)
    loss_scale_window: int = flag(
        "steps without an overflow until the loss scale doubles", 1000, bounds=POSITIVE,
        needs=_ADAPTS,
    )  # fmt: skip
    hysteresis: int = flag(
        "overflows until the loss scale halves", 2, bounds=POSITIVE, needs=_ADAPTS
    )
    fp32_residual_connection: bool = flag("keep the residual stream in fp32", False, on_load="said")

    @property
    def fp8_spares(self) -> tuple[int, int] | None:
        """How many layers at the start and at the end FP8 leaves in bf16; None: there is no FP8."""
        if self.fp8_format is None:
            return None
        if not self.first_last_layers_bf16:
            return 0, 0
        return self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16

    def check_precision(self) -> None:
        """Raise ValueError for two dtypes at once, or a loss scale that begins below its least."""
        if self.fp16 and self.bf16:
            raise ValueError("Expected one of --fp16 and --bf16, got both.")
        if self.fp16 and self.fp8_format is not None:
            raise ValueError(
                "Expected --bf16 with --fp8-format, got --fp16, which does not hold all products "
                "of 8-bit floats."
            )
        if self.loss_scale is not None and not self.fp16:
            raise ValueError("Expected --fp16 with --loss-scale, got another precision.")
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                f"Expected --initial-loss-scale of at least --min-loss-scale {self.min_loss_scale},"
                f" got {self.initial_loss_scale}."
            )
