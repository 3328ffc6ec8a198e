"""Everything a config can be given wrongly fails at construction, and says what to do."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
from mb_layers import MoE, MoEConfig, Router, dMoE

GOOD = {"hidden_size": 16, "ffn_hidden_size": 32, "num_experts": 8, "top_k": 2}

BAD = {
    "k > E": ({"top_k": 9}, "top_k <= num_experts, got top_k=9"),
    "no width": ({"hidden_size": 0}, "hidden_size to be an integer >= 1, got 0"),
    "fewer than no zero experts": ({"num_zero_experts": -1}, "num_zero_experts >= 0, got -1"),
    "no experts": ({"num_experts": 0}, "num_experts to be an integer >= 1, got 0"),
    "half an expert": ({"num_experts": 2.5}, "num_experts to be int, got 2.5 of type float"),
    "true hidden": ({"hidden_size": True}, "hidden_size to be int, got True of type bool"),
    "activation": ({"activation": "swigu"}, "swiglu"),
    "interleaved": ({"activation": "swiglu(interleaved)"}, "leave out `interleaved`"),
    "capacity 0": ({"capacity_factor": 0.0}, "dMoE with capacity_factor=None"),
    "capacity -1": ({"capacity_factor": -1.0}, "capacity_factor > 0, got -1"),
    "capacity nan": ({"capacity_factor": float("nan")}, "finite capacity_factor"),
    "drop": ({"drop_policy": "probabilty"}, "did you mean 'probability'"),
    "score": ({"score_function": "tanh"}, "softmax, sigmoid, got 'tanh'"),
    "balance": ({"balance_over": "batch"}, "micro_batch, sequence, global_batch"),
    "sequence in D": ({"sequence_dim": -1}, "got -1, which is D"),
    "p": ({"renormalize_p": 3}, "1 or 2, got 3"),
    "p of no norm": ({"renormalize_p": 2}, "renormalize=True with renormalize_p=2.*, got False"),
    "jitter": ({"jitter_eps": 1.0}, "0 <= jitter_eps < 1"),
    "loss weight": ({"load_balancing_loss_weight": -0.1}, "load_balancing_loss_weight >= 0"),
    "z weight": ({"z_loss_weight": float("inf")}, "finite z_loss_weight"),
    "std": ({"init_method_std": -1.0}, "init_method_std >= 0"),
    "output std": ({"output_init_std": -1.0}, "output_init_std >= 0"),
    "scale": ({"routed_scaling_factor": 0.0}, "routed_scaling_factor > 0"),
    "gate of no shared expert": ({"shared_expert_gate": True}, "give the shared expert a width"),
    "shared width": ({"shared_expert_hidden_size": 0}, "shared_expert_hidden_size .* >= 1, got 0"),
    "implementation": ({"mlp_impl": "spares"}, "did you mean 'sparse'"),
    "sparse width": ({"mlp_impl": "sparse"}, "multiple of 128 .* got 32; mlp_impl='grouped'"),
    "sparse shared width": (
        {"mlp_impl": "sparse", "ffn_hidden_size": 128, "shared_expert_hidden_size": 64},
        "shared_expert_hidden_size to be a multiple of 128",
    ),
    "sparse bias": (
        {"mlp_impl": "sparse", "ffn_hidden_size": 128, "mlp_bias": True},
        "no biases inside the experts",
    ),
    "bits": ({"saved_activation_bits": 2}, "4, 8 or None, got 2"),
    "bits and recompute": (
        {"saved_activation_bits": 8, "recompute": True},
        "with recompute=True, got 8; recompute saves no activations",
    ),
    "bits and relu": (
        {"saved_activation_bits": 8, "activation": "reglu"},
        "with activation='reglu', got 8; values that round to 0 would lose their gradient",
    ),
    "bits and sparse": (
        {"saved_activation_bits": 8, "mlp_impl": "sparse", "ffn_hidden_size": 128},
        "with mlp_impl='sparse', got 8; use mlp_impl='grouped'",
    ),
    "fp8 and sparse": (
        {"fp8": True, "mlp_impl": "sparse", "ffn_hidden_size": 128},
        "fp8=False with mlp_impl='sparse', got True; use mlp_impl='grouped'",
    ),
    "eval capacity alone": ({"eval_capacity_factor": 2.0}, "expected capacity_factor with eval"),
    "least capacity alone": ({"min_capacity": 4}, "with min_capacity=4, got None"),
    "drop policy alone": (
        {"drop_policy": "probability"},
        "with drop_policy='probability', got None.* leave drop_policy out",
    ),
    "eval capacity 0": (
        {"capacity_factor": 1.0, "eval_capacity_factor": 0.0},
        "finite eval_capacity_factor > 0",
    ),
    "input weights by probability": (
        {"weights_on_input": True, "capacity_factor": 1.0, "drop_policy": "probability"},
        "drop_policy='position' with weights_on_input",
    ),
    "input weights in a weighted sum": (
        {
            "weights_on_input": True,
            "shared_expert_hidden_size": 16,
            "shared_expert_weighted_sum": True,
        },
        "shared_expert_weighted_sum=False with weights_on_input",
    ),
    "zero experts in groups": (
        {"num_zero_experts": 2, "num_expert_groups": 4, "top_k_groups": 2},
        "num_zero_experts=0 with expert groups",
    ),
    "latent of nothing": ({"latent_size": 0}, "latent_size .* >= 1, got 0"),
    "zero experts behind a latent": (
        {"latent_size": 4, "num_zero_experts": 2},
        "num_zero_experts=0 with latent_size, got 2",
    ),
    "biases behind a latent": (
        {"latent_size": 4, "mlp_bias": True},
        "mlp_bias=False with latent_size, got True",
    ),
    "half groups": ({"num_expert_groups": 2}, "together"),
    "other half": ({"top_k_groups": 2}, "together"),
    "no open groups": ({"num_expert_groups": 2, "top_k_groups": 0}, "top_k_groups .* >= 1, got 0"),
    "no groups": ({"num_expert_groups": 0, "top_k_groups": 0}, "num_expert_groups .* >= 1, got 0"),
    "groups divide": ({"num_expert_groups": 3, "top_k_groups": 1}, "3 groups for 8 experts"),
    "too many groups": ({"num_expert_groups": 2, "top_k_groups": 3}, "num_expert_groups=2, got 3"),
    "group score": (
        {"num_expert_groups": 8, "top_k_groups": 2},
        "group_score_top <= 1, the experts in one group, got 2",
    ),
    "k > open experts": (
        {"num_expert_groups": 4, "top_k_groups": 1, "top_k": 3},
        "top_k <= 2, the experts in 1 groups of 2, got 3; raise top_k_groups",
    ),
}


FLOATS = ("load_balancing_loss_weight", "jitter_eps", "capacity_factor", "output_init_std")
FLAGS = ("renormalize", "balancing_bias", "mlp_bias", "recompute", "fp8")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *((name, value, "float") for name in FLOATS for value in ("0.1", True)),
        *((name, value, "bool") for name in FLAGS for value in ("False", 1, None)),
        *((name, None, "int") for name in ("hidden_size", "top_k", "sequence_dim")),
        ("z_loss_weight", None, "float"),
        ("activation", None, "str"),
        ("score_function", 3, "str"),
        ("saved_activation_bits", "8", "int or None"),
    ],
)
def test_wrong_types_name_the_field(name: str, value: object, kind: str) -> None:
    expected = f"{name} to be {kind}.*, got {value!r} of type {type(value).__name__}"
    with pytest.raises(ValueError, match=expected):
        MoEConfig(**(GOOD | {name: value}))


@pytest.mark.parametrize(("overrides", "message"), BAD.values(), ids=BAD.keys())
def test_bad_config_says_what_to_do(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**(GOOD | overrides))


def test_dmoe_refuses_a_capacity_and_moe_needs_one() -> None:
    with pytest.raises(ValueError, match="use MoE"):
        dMoE(MoEConfig(**GOOD, capacity_factor=1.0))
    with pytest.raises(ValueError, match="is dMoE"):
        MoE(MoEConfig(**GOOD))
    with pytest.raises(ValueError, match=r"a MoEConfig, got a dict; MegaBlocks' Arguments are for"):
        dMoE(GOOD)
    with pytest.raises(ValueError, match="expected router to be a module, got a type"):
        dMoE(MoEConfig(**GOOD), router=Router)


def test_top1_renormalized_warns_at_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="gives the router no gradient") as caught:
        MoEConfig(**(GOOD | {"top_k": 1, "renormalize": True}))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoEConfig(**(GOOD | {"top_k": 1}))
        MoEConfig(**GOOD, renormalize=True)


def test_numbers_and_flags_of_numpy_become_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    sizes = {name: numpy.int64(size) for name, size in GOOD.items()}
    config = MoEConfig(**sizes, jitter_eps=numpy.float32(0.5), z_loss_weight=numpy.float64(0.1))
    plain = MoEConfig(**GOOD, jitter_eps=0.5, z_loss_weight=0.1)
    assert json.dumps(dataclasses.asdict(config)) == json.dumps(dataclasses.asdict(plain))
    with pytest.raises(ValueError, match=r"num_experts to be int, got 2\.5 of type float"):
        MoEConfig(**GOOD | {"num_experts": numpy.float64(2.5)})
    assert MoEConfig(**GOOD, recompute=numpy.bool_(True)).recompute is True
    with pytest.raises(ValueError, match="expected top_k to be int, got True of type bool"):
        MoEConfig(**GOOD | {"top_k": numpy.bool_(True)})


def test_config_is_frozen_and_comparable() -> None:
    config = MoEConfig(**GOOD)
    assert dataclasses.replace(config) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3
