"""What a configuration must satisfy before anything is built or written.

Each check says what was expected, what it got, and, where it is not plain, what to do.
"""

from __future__ import annotations

from dataclasses import fields

from mb_train.config import TrainConfig, flag_name, whole


def check(config: TrainConfig) -> None:
    """Raise ValueError for the first thing that cannot work."""
    _check_required(config)
    _check_ranges(config)
    _check_model(config)
    _check_batch(config)
    _check_schedule(config)


def _check_required(config: TrainConfig) -> None:
    needed = (
        "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr",
    )  # fmt: skip
    missing = [flag_name(name) for name in needed if getattr(config, name) is None]
    if missing:
        raise ValueError(
            f"Expected a whole model and run, missing {', '.join(missing)}. "
            "Give them, or start from a --recipe."
        )


def _check_ranges(config: TrainConfig) -> None:
    positive = (
        "num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size",
        "max_position_embeddings", "make_vocab_size_divisible_by", "moe_num_experts", "moe_top_k",
        "micro_batch_size", "global_batch_size", "train_iters", "train_samples", "exit_interval",
        "exit_duration_in_mins", "save_interval", "keep_checkpoints", "seq_length", "log_interval",
        "lr", "lr_decay_iters", "lr_decay_samples", "layernorm_epsilon", "adam_eps",
    )  # fmt: skip
    for name in positive:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"Expected {flag_name(name)} above 0, got {value}.")
    not_negative = (
        "moe_capacity_factor", "moe_loss_weight", "moe_z_loss_weight", "weight_decay", "clip_grad",
        "init_method_std", "min_lr", "lr_warmup_iters", "lr_warmup_samples", "eval_iters",
        "eval_interval", "num_workers", "seed", "start_weight_decay", "end_weight_decay",
    )  # fmt: skip
    for name in not_negative:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"Expected {flag_name(name)} of at least 0, got {value}.")
    fractions = (
        "attention_dropout", "hidden_dropout", "adam_beta1", "adam_beta2", "sgd_momentum",
        "moe_jitter_eps",
    )  # fmt: skip
    for name in fractions:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"Expected {flag_name(name)} in [0, 1), got {value}.")
    for f in fields(config):
        choices, value = f.metadata["choices"], getattr(config, f.name)
        if choices and value is not None and value not in choices:
            raise ValueError(
                f"Expected {flag_name(f.name)} to be one of {', '.join(choices)}, got {value!r}."
            )
    if config.zero_stage not in (2, 3):
        raise ValueError(f"Expected --zero-stage 2 or 3, got {config.zero_stage}.")


def _check_model(config: TrainConfig) -> None:
    hidden, heads = whole(config.hidden_size), whole(config.num_attention_heads)
    if config.kv_channels is None and hidden % heads:
        raise ValueError(
            f"Expected --hidden-size to be divisible by --num-attention-heads, got {hidden} and "
            f"{heads}. Change one, or give --kv-channels."
        )
    if config.positions < whole(config.seq_length):
        raise ValueError(
            f"Expected --max-position-embeddings of at least --seq-length, got {config.positions} "
            f"and {config.seq_length}."
        )
    experts = config.moe_num_experts
    if experts is not None and config.moe_top_k > experts:
        raise ValueError(
            f"Expected --moe-top-k of at most --moe-num-experts, got {config.moe_top_k} and "
            f"{experts}: a token can choose an expert only once."
        )
    gated = config.activation_name.startswith(("swi", "geglu", "reglu"))
    if config.activation is not None and config.glu and not gated:
        raise ValueError(
            f"Expected a gated --activation with --glu, got {config.activation!r}. "
            "Leave one of the two out, or take swiglu, geglu, geglu_tanh or reglu."
        )


def _check_batch(config: TrainConfig) -> None:
    if (config.train_iters is None) == (config.train_samples is None):
        got = "neither" if config.train_iters is None else "both"
        raise ValueError(f"Expected one of --train-iters and --train-samples, got {got}.")
    config.batch_size(1)
    if config.by_samples and config.global_batch_size is None:
        raise ValueError("Expected --global-batch-size with --train-samples, got none.")


def _check_schedule(config: TrainConfig) -> None:
    if config.min_lr > (config.lr or 0):
        raise ValueError(f"Expected --min-lr of at most --lr {config.lr}, got {config.min_lr}.")
    unit, other = ("samples", "iters") if config.by_samples else ("iters", "samples")
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}"):
        if getattr(config, name):
            raise ValueError(
                f"Expected the schedule in the unit of --train-{unit}, got {flag_name(name)}."
            )
    fraction = config.lr_warmup_fraction
    if fraction is not None:
        if not 0 <= fraction < 1:
            raise ValueError(f"Expected --lr-warmup-fraction in [0, 1), got {fraction}.")
        if config.lr_warmup_iters or config.lr_warmup_samples:
            raise ValueError("Expected one kind of warm-up, got --lr-warmup-fraction and another.")
    if config.weight_decay_incr_style != "constant":
        start, end = config.start_weight_decay, config.end_weight_decay
        if start is None or end is None or end < start:
            raise ValueError(
                "Expected --start-weight-decay and --end-weight-decay, not falling, with --weight-"
                f"decay-incr-style {config.weight_decay_incr_style}, got {start} and {end}."
            )
