"""A configuration refuses what cannot work, in words; its defaults are Megatron's."""

import pytest
from mb_train.config import TrainConfig
from mb_train.recipes import RECIPES, recipe

RUN = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8,
    "micro_batch_size": 2, "train_iters": 10, "lr": 1e-3,
}  # fmt: skip


def test_defaults_derive_from_sizes():
    config = TrainConfig(**RUN)
    assert (config.head_size, config.ffn_size, config.positions) == (8, 128, 8)
    assert config.activation_name == "gelu_tanh"
    assert TrainConfig(**RUN, glu=True).activation_name == "geglu_tanh"
    assert (config.weight_decay, config.clip_grad, config.seed) == (0.01, 1.0, 1234)
    assert config.batch_size(3) == 6
    assert TrainConfig(**RUN, global_batch_size=12).batch_size(2) == 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": None}, "missing --num-layers"),
        ({"hidden_size": 30}, "--hidden-size to be divisible by --num-attention-heads, got 30 and"),
        ({"moe_num_experts": 2, "moe_top_k": 3}, "--moe-top-k of at most --moe-num-experts, got 3"),
        ({"lr": 0.0}, "--lr above 0, got 0"),
        ({"lr": float("nan")}, "--lr above 0, got nan"),
        ({"moe_capacity_factor": -1.0}, "--moe-capacity-factor of at least 0, got -1"),
        ({"hidden_dropout": 1.0}, r"--hidden-dropout in \[0, 1\), got 1"),
        ({"optimizer": "lion"}, "--optimizer to be one of adam, sgd, got 'lion'"),
        ({"max_position_embeddings": 4}, "--max-position-embeddings of at least --seq-length"),
        ({"train_iters": None}, "one of --train-iters and --train-samples, got neither"),
        ({"train_samples": 4}, "one of --train-iters and --train-samples, got both"),
        ({"global_batch_size": 3}, "micro batch x data-parallel ranks = 2 x 1 = 2, got 3"),
        ({"min_lr": 1.0}, "--min-lr of at most --lr 0.001, got 1.0"),
        ({"lr_decay_samples": 8}, "in the unit of --train-iters, got --lr-decay-samples"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, "one kind of warm-up"),
        ({"weight_decay_incr_style": "linear"}, "--start-weight-decay and --end-weight-decay"),
        ({"glu": True, "activation": "relu"}, "gated --activation with --glu, got 'relu'"),
        ({"zero_stage": 1}, "--zero-stage 2 or 3, got 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**{**RUN, **change})


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_whole_run(name):
    config = TrainConfig(**recipe(name))
    assert config.num_layers
    assert (config.moe_num_experts is None) == name.startswith("dense")
    assert (config.moe_capacity_factor > 0) == name.startswith("moe-")


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"got 'dmoe-125'. Did you mean dmoe-125m\?"):
        recipe("dmoe-125")
