"""MegaBlocks' Arguments and state dicts: every field accounted for, weights where they belong."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layers_oracle import assert_close
from mb_layers import LocalDispatcher, MoE, MoEConfig, dMoE
from mb_layers.compat import (
    FIELDS,
    config_from_arguments,
    from_megablocks,
    layer_from_arguments,
    to_megablocks,
)
from torch import Tensor, nn

E, K, D, WIDTH = 4, 2, 16, 128
SMALL = {
    "hidden_size": D,
    "ffn_hidden_size": WIDTH,
    "moe_num_experts": E,
    "moe_top_k": K,
    "device": "cpu",
    "fp16": False,
}
gelu_tanh = functools.partial(F.gelu, approximate="tanh")


def test_defaults_are_megablocks_own() -> None:
    config = config_from_arguments({})
    assert (config.hidden_size, config.ffn_hidden_size) == (1024, 4096)
    assert (config.num_experts, config.top_k) == (1, 1)
    assert config.activation == "gelu_tanh"
    assert config.load_balancing_loss_weight == 0.1
    assert config.output_bias
    assert (config.init_method_std, config.output_init_std) == (0.02, 0.02)
    assert config_from_arguments({}, layer="MoE").capacity_factor == 1


HONOURED = {
    "moe_jitter_eps": (0.1, {"jitter_eps": 0.1}),
    "moe_loss_weight": (0.3, {"load_balancing_loss_weight": 0.3}),
    "moe_zloss_weight": (1e-3, {"z_loss_weight": 1e-3}),
    "moe_normalize_expert_weights": (2, {"renormalize": True, "renormalize_p": 2}),
    "uniform_expert_assignment": (True, {"uniform_assignment": True}),
    "bias": (False, {"output_bias": False}),
    "shared_expert": (
        True,
        {"shared_expert_hidden_size": WIDTH, "shared_expert_bias": True},
    ),
    "activation_fn": (F.silu, {"activation": "silu"}),
    "mlp_impl": ("sparse", {"mlp_impl": "sparse"}),
    "mlp_type": ("glu", {"activation": "geglu_tanh"}),
    "init_method": (
        functools.partial(nn.init.normal_, std=0.5),
        # overriding init_method alone leaves w2's init as it was, there and here
        {"init_method_std": 0.5, "output_init_std": 0.02},
    ),
    "output_layer_init_method": (
        functools.partial(nn.init.normal_, std=0.1),
        {"output_init_std": 0.1},
    ),
}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [(name, value, expected) for name, (value, expected) in HONOURED.items()],
    ids=HONOURED.keys(),
)
def test_field_is_honoured(field: str, value: object, expected: dict) -> None:
    plain = config_from_arguments(SMALL)
    changed = config_from_arguments(SMALL | {field: value})
    assert changed == dataclasses.replace(plain, **expected)


@pytest.mark.parametrize(
    ("activation_fn", "mlp", "glu"),
    [
        (gelu_tanh, "gelu_tanh", "geglu_tanh"),
        (F.gelu, "gelu", "geglu"),
        (nn.GELU("tanh"), "gelu_tanh", "geglu_tanh"),
        (nn.GELU(), "gelu", "geglu"),
        (F.silu, "silu", "swiglu"),
        (nn.SiLU(), "silu", "swiglu"),
        (F.relu, "relu", "reglu"),
        (torch.relu, "relu", "reglu"),
        (functools.partial(F.gelu), "gelu", "geglu"),
        (functools.partial(F.silu), "silu", "swiglu"),
        (functools.partial(F.relu, inplace=False), "relu", "reglu"),
    ],
)
def test_activations(activation_fn: object, mlp: str, glu: str) -> None:
    for mlp_type, name in (("mlp", mlp), ("glu", glu)):
        arguments = SMALL | {"activation_fn": activation_fn, "mlp_type": mlp_type}
        assert config_from_arguments(arguments).activation == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 3),
        ("pipeline_model_parallel_size", 3),
        ("num_layers_per_virtual_pipeline_stage", 2),
        ("quantize_inputs_num_bits", 8),
        ("quantize_scatter_num_bits", 4),
        ("quantize_rematerialize_num_bits", 4),  # without memory_optimized_mlp
    ],
)
def test_field_is_not_needed(field: str, value: int) -> None:
    assert config_from_arguments(SMALL | {field: value}) == config_from_arguments(SMALL)


def test_quantised_activations_need_the_memory_optimised_mlp() -> None:
    arguments = SMALL | {"memory_optimized_mlp": True, "quantize_rematerialize_num_bits": 4}
    assert config_from_arguments(arguments).saved_activation_bits == 4


@pytest.mark.parametrize(
    "field",
    [
        "return_bias",
        "moe_lbl_in_fp32",
        "moe_zloss_in_fp32",
        "memory_optimized_mlp",
        "remat_act_fn",
    ],
)
def test_field_may_be_either(field: str) -> None:
    both = [config_from_arguments(SMALL | {field: value}) for value in (False, True)]
    assert both[0] == both[1]


REFUSED = {
    "activation_fn": torch.tanh,
    "moe_normalize_expert_weights": 3,
    "moe_expert_model_parallelism": True,
    "expert_parallel_group": object(),
    "moe_weight_parallelism": True,
    "weight_parallel_group": object(),
    "quantize_inputs_num_bits": 2,
    "quantize_rematerialize_num_bits": 16,
    "quantize_scatter_num_bits": 0,
    "mlp_impl": "dense",
    "mlp_type": "moe",
}


@pytest.mark.parametrize("field", REFUSED)
def test_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        config_from_arguments(SMALL | {field: REFUSED[field]})


@pytest.mark.parametrize("change", [{"fc_cls": nn.Bilinear}, {"fc_kwargs": {"bias": False}}])
def test_other_linears_for_the_shared_expert_are_refused(change: dict) -> None:
    config_from_arguments(SMALL | change)  # no shared expert: not read
    with pytest.raises(ValueError, match=next(iter(change))):
        config_from_arguments(SMALL | {"shared_expert": True} | change)


def test_a_dispatcher_makes_expert_parallelism_acceptable() -> None:
    arguments = SMALL | {"moe_expert_model_parallelism": True, "expert_parallel_group": object()}
    dispatcher = LocalDispatcher(E)
    assert layer_from_arguments(arguments, dispatcher=dispatcher).dispatcher is dispatcher


def test_moe_takes_the_capacity_and_refuses_glu() -> None:
    assert layer_from_arguments(SMALL | {"moe_capacity_factor": 2}).config.capacity_factor is None
    capped = layer_from_arguments(SMALL | {"moe_capacity_factor": 1.5}, layer="MoE")
    assert isinstance(capped, MoE)
    assert capped.config.capacity_factor == 1.5
    assert isinstance(layer_from_arguments(SMALL | {"moe_capacity_factor": 0}, layer="MoE"), dMoE)
    with pytest.raises(ValueError, match="MegaBlocks ignores it there"):
        config_from_arguments(SMALL | {"mlp_type": "glu"}, layer="MoE")
    with pytest.raises(ValueError, match="'dMoE' or 'MoE', got 'moe'"):
        config_from_arguments(SMALL, layer="moe")


def test_a_mapping_a_dataclass_and_a_namespace_read_alike() -> None:
    expected = config_from_arguments(SMALL)
    cls = dataclasses.make_dataclass("Arguments", [(n, object, v) for n, v in SMALL.items()])
    assert config_from_arguments(cls()) == expected
    megatron = argparse.Namespace(**SMALL, lr=1e-4, num_attention_heads=8)
    assert config_from_arguments(megatron) == expected
    with pytest.raises(ValueError, match="got 'moe_topk'; did you mean 'moe_top_k'"):
        config_from_arguments({"moe_topk": 2})
    with pytest.raises(ValueError, match="with some of its fields, got None"):
        config_from_arguments(None)


def test_dtype_and_custom_init_reach_the_layer() -> None:
    assert layer_from_arguments(SMALL).experts.w1.dtype == torch.float32
    half = layer_from_arguments(SMALL | {"bf16": True, "device": lambda: "cpu"})
    assert half.experts.w1.dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="fp16 and bf16 are both True"):
        both = layer_from_arguments(SMALL | {"fp16": True, "bf16": True})
    assert both.experts.w1.dtype == torch.float16
    torch.set_default_dtype(torch.float64)
    try:
        assert layer_from_arguments(SMALL).experts.w1.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    seen = []

    def init(weight: Tensor) -> None:
        seen.append(tuple(weight.shape))
        weight.view(-1).fill_(3)  # as nn.init.orthogonal_ does

    arguments = SMALL | {"mlp_type": "glu", "activation_fn": F.silu}
    layer = layer_from_arguments(
        arguments | {"init_method": init, "output_layer_init_method": init}
    )
    # as MegaBlocks calls it: w1, v1 and w2 as [E, F, D], the router as [E, D]
    assert sorted(seen) == sorted([(E, D), *[(E, WIDTH, D)] * 3])
    assert all((p == 3).all() for n, p in layer.named_parameters() if n != "bias")
    # The shared expert is MegaBlocks' nn.Linear: its init functions do not touch that either.
    with_shared = layer_from_arguments(arguments | {"init_method": init, "shared_expert": True})
    assert with_shared.shared_expert is not None
    assert with_shared.shared_expert.w1.std().item() == pytest.approx(0.02, rel=0.2)


def checkpoint(*, glu: bool, shared: bool, capped: bool = False) -> dict[str, Tensor]:
    """A MegaBlocks state dict with random weights."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64) * 0.3

    state = {"router.layer.weight": random(E, D), "experts.bias": random(D)}
    if capped:
        state |= {"experts.mlp.w1": random(E, D, WIDTH), "experts.mlp.w2": random(E, WIDTH, D)}
    else:
        names = ("w1", "v1", "w2") if glu else ("w1", "w2")
        state |= {f"experts.mlp.{name}": random(E * WIDTH, D) for name in names}
    if shared:
        up = ("up_proj", "gate_proj") if glu else ("up_proj",)
        for name in up:
            state[f"shared_expert.{name}.weight"] = random(WIDTH, D)
            state[f"shared_expert.{name}.bias"] = random(WIDTH)
        state["shared_expert.down_proj.weight"] = random(D, WIDTH)
        state["shared_expert.down_proj.bias"] = random(D)
    return state


def megablocks_forward(state: dict[str, Tensor], x: Tensor, *, glu: bool, shared: bool) -> Tensor:
    """What MegaBlocks computes from that state dict, written from its documented layouts."""
    probs = torch.softmax(x @ state["router.layer.weight"].T, dim=-1)
    weights, ids = probs.topk(K)
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t], strict=True):
            w1, w2 = state["experts.mlp.w1"], state["experts.mlp.w2"]
            if w1.dim() == 3:  # MoE: [E, D, F] and [E, F, D]
                y[t] += weight * (gelu_tanh(x[t] @ w1[e]) @ w2[e])
                continue
            rows = slice(e * WIDTH, (e + 1) * WIDTH)
            h = gelu_tanh(w1[rows] @ x[t])
            if glu:
                h = h * (state["experts.mlp.v1"][rows] @ x[t])
            y[t] += weight * (h @ w2[rows])
    y = y + state["experts.bias"]  # return_bias=False, which a shared expert needs
    if shared:

        def linear(name: str, value: Tensor) -> Tensor:
            name = f"shared_expert.{name}_proj"
            return F.linear(value, state[f"{name}.weight"], state[f"{name}.bias"])

        h = gelu_tanh(linear("gate", x)) * linear("up", x) if glu else gelu_tanh(linear("up", x))
        y = (linear("down", h) + K * y) / (K + 1)
    return y


@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_dmoe_state_dict_computes_the_same(glu: bool, shared: bool) -> None:
    arguments = SMALL | {
        "mlp_type": "glu" if glu else "mlp",
        "shared_expert": shared,
        "shared_expert_weighted_sum": True,
    }
    state = checkpoint(glu=glu, shared=shared)
    layer = layer_from_arguments(arguments).double()
    layer.load_state_dict(from_megablocks(state, layer.config))
    x = torch.randn(9, D, dtype=torch.float64)
    assert_close("y", layer(x).y, megablocks_forward(state, x, glu=glu, shared=shared))


def test_moe_state_dict_computes_the_same() -> None:
    state = checkpoint(glu=False, shared=False, capped=True)
    layer = layer_from_arguments(SMALL | {"moe_capacity_factor": E}, layer="MoE").double()
    layer.load_state_dict(from_megablocks(state, layer.config))
    x = torch.randn(9, D, dtype=torch.float64)
    assert_close("y", layer(x).y, megablocks_forward(state, x, glu=False, shared=False))


@pytest.mark.parametrize("factor", [0, E])
def test_moe_state_dict_goes_back_to_moe(factor: int) -> None:
    """Also where nothing is dropped: then the layer here is a dMoE."""
    state = checkpoint(glu=False, shared=False, capped=True)
    arguments = SMALL | {"moe_capacity_factor": factor}
    config = config_from_arguments(arguments, layer="MoE")
    back = to_megablocks(from_megablocks(state, config), config, layer="MoE")
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


CAPPED = {"activation": "gelu", "capacity_factor": 1.0}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"score_function": "sigmoid"}, {}, "score_function='softmax', got 'sigmoid'"),
        ({"routed_scaling_factor": 2.5}, {}, "routed_scaling_factor=1.0, got 2.5"),
        ({"num_zero_experts": 2}, {}, "num_zero_experts=0, got 2"),
        ({"latent_size": 4}, {}, "latent_size=None, got 4"),
        ({"weights_on_input": True}, {}, "weights_on_input=False, got True"),
        ({"mlp_bias": True}, {}, "mlp_bias=False, got True"),
        ({"activation": "swiglu(limit=7)"}, {}, "of the gate alone, got 'swiglu"),
        (CAPPED | {"drop_policy": "probability"}, {}, "='position', got 'probability'"),
        (CAPPED | {"min_capacity": 4}, {}, "min_capacity=0, got 4"),
        (CAPPED | {"eval_capacity_factor": 2.0}, {}, "eval_capacity_factor=None, got 2.0"),
        ({}, {"layer": "MoE"}, "without a gate for MegaBlocks' MoE, got 'swiglu'"),
        ({}, {"layer": "moe"}, "'dMoE' or 'MoE', got 'moe'"),
    ],
)
def test_what_megablocks_does_not_compute_is_not_written(change, options, message) -> None:
    """Its names and shapes would fit most of these."""
    config = MoEConfig(hidden_size=D, ffn_hidden_size=WIDTH, num_experts=E, top_k=K, **change)
    with pytest.raises(ValueError, match=message):
        to_megablocks({}, config, **options)


def test_older_names_load_too() -> None:
    state = checkpoint(glu=True, shared=False)
    config = config_from_arguments(SMALL | {"mlp_type": "glu"})
    older = {name.removeprefix("experts."): tensor for name, tensor in state.items()}
    older["bias"] = older["bias"].view(1, 1, D)
    expected = from_megablocks(state, config)
    for name, tensor in from_megablocks(older, config).items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("capped", [False, True], ids=["dMoE", "MoE"])
@pytest.mark.parametrize("glu", [False, True], ids=["mlp", "glu"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_there_and_back(capped: bool, glu: bool, shared: bool) -> None:
    if capped and glu:
        pytest.skip("MegaBlocks has no gated MoE")
    arguments = SMALL | {"mlp_type": "glu" if glu else "mlp", "shared_expert": shared}
    config = config_from_arguments(arguments, layer="MoE" if capped else "dMoE")
    state = checkpoint(glu=glu, shared=shared, capped=capped)
    prefixed = {f"blocks.3.ffn.{name}": tensor for name, tensor in state.items()}
    other_layer = {f"blocks.4.ffn.{name}": tensor * 2 for name, tensor in state.items()}
    ours = from_megablocks(prefixed | other_layer, config, prefix="blocks.3.ffn.")
    back = to_megablocks(ours, config, prefix="blocks.3.ffn.")
    assert back.keys() == prefixed.keys()
    for name, tensor in prefixed.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("capped", [False, True], ids=["dMoE", "MoE"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_state_dicts_of_expert_parallel_ranks_are_joined(ranks: int, capped: bool) -> None:
    """Rank r holds the experts' slice r mod shards, of them the features' slice r div shards."""
    state = checkpoint(glu=False, shared=True, capped=capped)
    config = config_from_arguments(
        SMALL | {"shared_expert": True}, layer="MoE" if capped else "dMoE"
    )
    shards = min(ranks, E)
    e, f = E // shards, WIDTH // (ranks // shards)
    states = []
    for rank in range(ranks):
        experts = slice(rank % shards * e, (rank % shards + 1) * e)
        features = slice(rank // shards * f, (rank // shards + 1) * f)
        mine = dict(state)
        for name in ("w1", "w2"):
            whole = state[f"experts.mlp.{name}"]
            if not capped:
                part = whole.view(E, WIDTH, D)[experts, features].reshape(-1, D)
            else:
                part = whole[experts]
                part = part[:, :, features] if name == "w1" else part[:, features]
            mine[f"experts.mlp.{name}"] = part
        states.append(mine)
    expected = from_megablocks(state, config)
    for name, tensor in from_megablocks(states, config).items():
        assert torch.equal(tensor, expected[name]), name


def test_ranks_that_cannot_be_are_refused() -> None:
    state = checkpoint(glu=False, shared=False)
    config = config_from_arguments(SMALL)
    for ranks in (3, 0):
        with pytest.raises(ValueError, match=f"4 experts or is a multiple of them, got {ranks}"):
            from_megablocks([state] * ranks, config)
    lacking = {name: t for name, t in state.items() if name != "experts.mlp.w1"}
    with pytest.raises(ValueError, match=r"got experts\.mlp\.w1 from one of ranks 0 and 1 alone"):
        from_megablocks([state, lacking], config)
    other = state | {"experts.bias": state["experts.bias"] + 1}
    with pytest.raises(ValueError, match=r"experts\.bias to be the same .* another on rank 1"):
        from_megablocks([state, other], config)


@pytest.mark.parametrize(
    ("change", "theirs"),
    [
        ({"moe_top_k": 9}, "moe_top_k <= moe_num_experts, got moe_top_k=9"),
        ({"moe_num_experts": "8"}, "moe_num_experts to be int, got '8' of type str"),
        ({"moe_loss_weight": None}, "moe_loss_weight to be float, got None"),
        ({"moe_jitter_eps": 2.0}, "moe_jitter_eps < 1"),
        ({"bias": "False"}, "bias to be True or False, got 'False'"),
        ({"moe_normalize_expert_weights": 3}, "set moe_normalize_expert_weights=False"),
        ({"mlp_impl": "sparse", "shared_expert": True}, "mlp_impl='sparse', .*, bias=True; use"),
        (
            {"shared_expert": True, "shared_expert_hidden_size": 0},
            "shared_expert_hidden_size to be an integer >= 1",
        ),
        ({"init_method": 0.02}, "init_method to be a function that fills a tensor, got 0.02"),
    ],
)
def test_errors_name_megablocks_fields(change: dict, theirs: str) -> None:
    with pytest.raises(ValueError, match=theirs):
        config_from_arguments(SMALL | change)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    config = config_from_arguments(SMALL)
    with pytest.raises(ValueError, match=r"nothing uses: experts\.mlp\.v1"):
        from_megablocks(checkpoint(glu=True, shared=False), config)
    one_rank = checkpoint(glu=False, shared=False)
    for name in ("experts.mlp.w1", "experts.mlp.w2"):
        one_rank[name] = one_rank[name][: E * WIDTH // 2]
    with pytest.raises(ValueError, match="one rank's experts alone"):
        from_megablocks(one_rank, config)
    one_rank["experts.mlp.w1"] = one_rank["experts.mlp.w1"][1:]
    with pytest.raises(ValueError, match=r"of 4 experts .*, got others: unflatten"):
        from_megablocks(one_rank, config)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("experts.mlp.w2", (D, E * WIDTH)),
        ("experts.mlp.w2", (E, D, WIDTH)),  # Hugging Face's, and ours
        ("experts.mlp.w2", (E * WIDTH * D,)),
        ("experts.bias", (E, D // E)),
    ],
)
def test_tensors_of_the_right_size_in_another_layout_are_refused(name: str, shape: tuple) -> None:
    state = checkpoint(glu=False, shared=False)
    state[name] = state[name].reshape(shape)
    with pytest.raises(ValueError, match=r"expected .* got"):
        from_megablocks(state, config_from_arguments(SMALL))


def test_the_page_lists_every_field_as_the_code_does() -> None:
    page = (Path(__file__).parents[1] / "docs" / "from-megablocks.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, flags=re.MULTILINE))
    assert rows == FIELDS


def test_the_pages_code_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "from-megablocks.md").read_text()
    names: dict = {"checkpoint": checkpoint(glu=True, shared=False)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(code, names)
    assert names["loss"].isfinite()
