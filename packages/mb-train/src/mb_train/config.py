"""One training run as one dataclass that checks itself; the command line is generated from it.

Names, meanings and defaults are Megatron-LM's (2023), so that its launch scripts carry over; a
field that Megatron does not have says so with "(ours)". A recipe, a TOML file and the command line
are layers of the same fields: see `flags`. This module imports no torch: `--help` must be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
# What makes a checkpoint's tensors what they are: it loads only into a model alike in these.
_MODEL_IDENTITY = (
    "num_layers", "hidden_size", "num_attention_heads", "head_size", "ffn_size", "positions",
    "activation_name", "moe_num_experts",
)  # fmt: skip


def flag(group: str, text: str, default: Any = None, *, choices: tuple[str, ...] = ()) -> Any:
    """A field of the configuration with what its command-line flag needs."""
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


_model = partial(flag, "model")
_moe = partial(flag, "moe")
_regularization = partial(flag, "regularization")
_training = partial(flag, "training")
_init = partial(flag, "initialization")
_rate = partial(flag, "learning rate")
_checkpoint = partial(flag, "checkpointing")
_device = partial(flag, "precision and devices")
_validation = partial(flag, "validation")
_data = partial(flag, "data")
_logging = partial(flag, "logging")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every choice of a training run. Fields that derive from others are properties.

    Raises:
        ValueError: values that cannot work, alone or together; says expected, got and remedy.
    """

    num_layers: int | None = _model("transformer layers")
    hidden_size: int | None = _model("width of the residual stream")
    num_attention_heads: int | None = _model("attention heads")
    kv_channels: int | None = _model("width of one head; default hidden size / heads")
    ffn_hidden_size: int | None = _model(
        "width inside a feed-forward or an expert; default 4 x hidden size"
    )
    max_position_embeddings: int | None = _model("learned positions; default the sequence length")
    make_vocab_size_divisible_by: int = _model("pad the vocabulary to a multiple of this", 128)
    layernorm_epsilon: float = _model("epsilon of layer norm", 1e-5)
    glu: bool = _model("gate the feed-forward: two up projections instead of one", False)
    activation: str | None = _model(
        "feed-forward activation by mb_kernels' name; default gelu_tanh, or geglu_tanh (ours)"
    )

    moe_num_experts: int | None = _moe(
        "experts in every layer's feed-forward; default a dense model"
    )
    moe_capacity_factor: float = _moe(
        "slots per expert over the even share; 0 drops no token (dMoE)", 0.0
    )
    moe_top_k: int = _moe("experts per token", 1)
    moe_loss_weight: float = _moe("weight of the load-balancing loss", 0.1)
    moe_z_loss_weight: float = _moe("weight of the router's z-loss (ours)", 0.0)
    moe_jitter_eps: float = _moe(
        "noise on the router's input in training, uniform in 1 +- eps", 0.0
    )
    moe_renormalize: bool = _moe("make the routing weights of a token sum to one (ours)", False)
    moe_recompute: bool = _moe(
        "recompute the experts' activations in the backward pass (ours)", False
    )

    attention_dropout: float = _regularization("dropout on attention weights", 0.1)
    hidden_dropout: float = _regularization(
        "dropout on embeddings and on what joins the residual", 0.1
    )
    weight_decay: float = _regularization("decoupled weight decay, none for biases and norms", 0.01)
    start_weight_decay: float | None = _regularization("weight decay at the start of its schedule")
    end_weight_decay: float | None = _regularization("weight decay at the end of its schedule")
    weight_decay_incr_style: str = _regularization(
        "course of the weight decay over the run", "constant", choices=WEIGHT_DECAY_STYLES
    )
    clip_grad: float = _regularization("clip the gradient norm to this; 0 does not clip", 1.0)
    adam_beta1: float = _regularization("decay of Adam's first moment", 0.9)
    adam_beta2: float = _regularization("decay of Adam's second moment", 0.999)
    adam_eps: float = _regularization("epsilon in Adam's denominator", 1e-8)
    sgd_momentum: float = _regularization("momentum of SGD", 0.9)

    micro_batch_size: int | None = _training("sequences per rank and forward pass")
    global_batch_size: int | None = _training(
        "sequences per step over all ranks; default micro batch x ranks"
    )
    train_iters: int | None = _training("steps to train; this or --train-samples")
    train_samples: int | None = _training("sequences to train on; this or --train-iters")
    optimizer: str = _training("optimizer", "adam", choices=("adam", "sgd"))
    exit_interval: int | None = _training("save and stop at steps divisible by this")
    exit_duration_in_mins: float | None = _training("save and stop after this many minutes")
    recompute_granularity: str | None = _training(
        "full: keep only each layer's input for the backward pass", choices=("full",)
    )

    seed: int = _init("seed of weights, data order and dropout", 1234)
    init_method_std: float = _init("standard deviation of the initial weights", 0.02)

    lr: float | None = _rate("peak learning rate")
    min_lr: float = _rate("learning rate at the end of the decay and after it", 0.0)
    lr_decay_style: str = _rate("shape of the decay", "linear", choices=DECAY_STYLES)
    lr_decay_iters: int | None = _rate("steps until --min-lr; default the length of training")
    lr_decay_samples: int | None = _rate("sequences until --min-lr, with --train-samples")
    lr_warmup_fraction: float | None = _rate("share of the decay spent in linear warm-up")
    lr_warmup_iters: int = _rate("steps of linear warm-up", 0)
    lr_warmup_samples: int = _rate("sequences of linear warm-up, with --train-samples", 0)

    save: str | None = _checkpoint(
        "run folder: checkpoints, log, picture; default with --load its folder, else none"
    )
    save_interval: int | None = _checkpoint(
        "steps between checkpoints; the last step is always saved"
    )
    keep_checkpoints: int | None = _checkpoint("how many checkpoints to keep; default all (ours)")
    async_save: bool = _checkpoint("write checkpoints beside the training", False)
    load: str | None = _checkpoint("run folder or iteration folder to go on from")
    finetune: bool = _checkpoint("take only the weights of --load: a new run from step 0", False)
    no_load_optim: bool = _checkpoint("do not take the optimizer state of --load", False)
    no_save_optim: bool = _checkpoint("leave the optimizer state out of checkpoints", False)

    device: str = _device(
        "where to train; auto takes a GPU if there is one (ours)",
        "auto",
        choices=("auto", "cpu", "cuda"),
    )
    bf16: bool | None = _device(
        "compute in bf16 over fp32 master weights; default on a GPU yes, on a CPU no"
    )
    compile: bool = _device(
        "on a GPU, compile every layer: seconds to start, faster steps (ours)", False
    )
    zero_stage: int = _device(
        "data-parallel ranks share optimizer and gradients (2) or weights as well (3) (ours)", 2
    )

    eval_iters: int = _validation("global batches per evaluation", 100)
    eval_interval: int | None = _validation(
        "steps between evaluations; 0 evaluates only at the end", 1000
    )

    data_path: list[str] | None = _data(  # noqa: RUF009, a field like the others
        "prefix of .bin and .idx files, or weights and prefixes by turns; default: Python's library"
    )
    split: str = _data("shares of documents for training, validation and test", "969,30,1")
    seq_length: int | None = _data("tokens per sample")
    num_workers: int = _data("threads that prepare batches ahead", 2)
    tokenizer: str = _data("tokenizer by name or file (ours)", "gpt2")
    data_cache_path: str | None = _data("folder for sample indices; default beside the data")

    log_interval: int = _logging("steps between progress lines", 100)
    log_params_norm: bool = _logging("log the norm of the weights", False)
    tensorboard_dir: str | None = _logging(
        "write TensorBoard scalars here (needs mb-train[tensorboard])"
    )

    def __post_init__(self) -> None:
        from mb_train.checks import check

        check(self)

    # What follows derives from the fields.

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or whole(self.hidden_size) // whole(self.num_attention_heads)

    @property
    def ffn_size(self) -> int:
        """F, the width inside a feed-forward or an expert."""
        return self.ffn_hidden_size or 4 * whole(self.hidden_size)

    @property
    def positions(self) -> int:
        """Number of learned position embeddings."""
        return self.max_position_embeddings or whole(self.seq_length)

    @property
    def activation_name(self) -> str:
        """The activation by mb_kernels' name."""
        return self.activation or ("geglu_tanh" if self.glu else "gelu_tanh")

    @property
    def by_samples(self) -> bool:
        """Whether the length of training is given in sequences."""
        return self.train_samples is not None

    def model_identity(self) -> dict[str, Any]:
        """The values that a checkpoint must share with this run, the vocabulary's size apart."""
        return {name: getattr(self, name) for name in _MODEL_IDENTITY}

    def batch_size(self, data_parallel: int) -> int:
        """Sequences per step on `data_parallel` ranks.

        Raises:
            ValueError: the global batch is no multiple of micro batch x ranks.
        """
        per_pass = whole(self.micro_batch_size) * data_parallel
        size = self.global_batch_size or per_pass
        if size % per_pass:
            raise ValueError(
                f"Expected --global-batch-size to be a multiple of micro batch x data-parallel "
                f"ranks = {self.micro_batch_size} x {data_parallel} = {per_pass}, got {size}. "
                "Lower --micro-batch-size, or change the global batch."
            )
        return size


def whole(value: int | None) -> int:
    """A field that the checks have found to be there."""
    assert value is not None
    return value


def flag_name(name: str) -> str:
    """`hidden_size` as it is typed: `--hidden-size`."""
    return "--" + name.replace("_", "-")
