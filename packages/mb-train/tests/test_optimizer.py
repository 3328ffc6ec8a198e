"""Which parameters an optimizer takes how: matrices of Muon, rates of routers."""

from types import SimpleNamespace

import pytest
import torch
from mb_train.assembly.optimizer import (
    apply_schedule,
    build_optimizer,
    build_scaler,
    parameter_groups,
)
from mb_train.config import TrainConfig
from mb_train.schedule import build_schedule
from mb_train.tasks import GPTTask
from mb_train.tasks.make import one_process_task

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 9,
    "micro_batch_size": 2, "train_iters": 1, "lr": 1e-3, "ffn_hidden_size": 48,
    "moe_num_experts": 4, "moe_top_k": 2, "activation": "swiglu",
}  # fmt: skip


def make(**change):
    torch.manual_seed(3)
    config = TrainConfig(**{**SIZES, **change})
    model = GPTTask(config, vocab_size=61, eod=0).build_model(compute_dtype=torch.float32)
    return config, model


def test_muon_takes_the_matrices_between_the_ends():
    change = {"optimizer": "muon", "untie_embeddings_and_output_weights": True}
    _, model = make(**change)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def groups(**more):
        config = TrainConfig(**{**SIZES, **change, **more})
        optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
        groups = optimizer.param_groups
        return [({names[p] for p in group["params"]}, group["fused"]) for group in groups]

    *muon, (matrices, _), (vectors, _) = groups()
    head = model.stack.blocks["0"].attention.head_size
    apart = {name: rows for names, rows in muon for name in names if rows}
    assert {name: rows for name, rows in apart.items() if "experts" not in name} == {
        f"stack.blocks.{layer}.attention.qkv.weight": (head,) * 3 for layer in (0, 1)
    }
    whole = set().union(*(names for names, rows in groups(muon_split_qkv=False) if not rows))
    assert whole >= {name for name in apart if "qkv" in name}
    muon = set().union(*(names for names, _ in muon))
    ends = {"embedding.tokens.weight", "embedding.positions.weight", "head.weight"}
    assert matrices == ends
    assert "stack.blocks.0.mlp.router.weight" in muon
    assert all(name.endswith("bias") or ".norm" in name for name in vectors)


def test_muon_takes_the_maps_of_latent_attention_apart():
    change = {"optimizer": "muon", "multi_latent_attention": True, "qk_head_dim": 8}
    change |= {"position_embedding_type": "rope", "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    change |= {"q_lora_rank": 10, "kv_lora_rank": 16, "qk_layernorm": True}
    config, model = make(**change)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups([model], config)
    rows = {names[p]: group.get("fused") for group in groups for p in group["params"]}
    muon = {names[p] for group in groups if group["muon"] for p in group["params"]}
    kept = "stack.blocks.0.attention."
    assert {name.removeprefix(kept): rows[name] for name in muon if name.startswith(kept)} == {
        "q_down.weight": (), "q_up.weight": (), "kv_down.weight": (16, 4),
        "kv_up.weight": (8, 6), "out.weight": (),
    }  # fmt: skip
    optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
    model(torch.randint(61, (2, 8)), labels_BS=torch.randint(61, (2, 8))).total().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name in (name for name in muon if name.startswith(kept)):
        assert not torch.equal(before[name], model.get_parameter(name)), name


def test_muon_takes_gates_apart_from_their_queries():
    groups = {"group_query_attention": True, "num_query_groups": 2, "num_attention_heads": 4}
    config, model = make(optimizer="muon", attention_output_gate=True, **groups)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = {
        names[p]: group["fused"] for group in parameter_groups([model], config) if group["muon"]
        for p in group["params"]
    }  # fmt: skip
    C = model.stack.blocks["0"].attention.head_size
    assert rows["stack.blocks.0.attention.qkv.weight"] == (2 * C, 2 * C, C, C)
    weight = model.stack.blocks["0"].attention.qkv.weight
    assert len(weight) == 2 * (2 + 2 + 1 + 1) * C


def test_muon_takes_no_head_of_a_bert():
    config = TrainConfig(**SIZES, model="bert", optimizer="muon")
    model = one_process_task(config, None, vocab_size=61).build_model(compute_dtype=torch.float32)
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon = {
        names[p] for group in parameter_groups([model], config) if group["muon"]
        for p in group["params"]
    }  # fmt: skip
    assert {"lm_head.dense.weight", "pooler.dense.weight"} <= muon
    assert not any("order_head" in name or "embedding" in name for name in muon)


@pytest.mark.parametrize("kind", ["adam", "muon", "adafactor", "sgd"])
def test_routers_have_a_rate_of_their_own(kind):
    def trained(**change):
        change = {"optimizer": kind, "weight_decay": 0.1, "lr_decay_style": "constant"} | change
        config, model = make(**change)
        optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
        schedule, generator = build_schedule(config, 2), torch.Generator().manual_seed(0)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            apply_schedule(optimizer, schedule, 2 * step)
            optimizer.step()
        return dict(model.named_parameters())

    whole, half, mixed = trained(), trained(lr=5e-4), trained(moe_router_lr_mult=0.5)
    for name, parameter in mixed.items():
        expected, other = (half, whole) if ".router." in name else (whole, half)
        torch.testing.assert_close(parameter, expected[name], msg=name)
        assert not torch.equal(parameter, other[name])


@pytest.mark.parametrize("model", ["gpt", "bert", "t5", "ict"])
def test_embeddings_and_head_have_rates_of_their_own(model):
    shape = {"model": model, "decoder_seq_length": 9, "moe_router_lr_mult": 0.5}
    shape |= {"moe_num_experts": 4, "untie_embeddings_and_output_weights": model in ("gpt", "t5")}
    course = {"train_iters": 10, "min_lr": 1e-4, "lr_warmup_iters": 2, "lr_decay_style": "cosine"}
    rates = {"decoupled_lr": 5e-3, "decoupled_min_lr": 1e-3}
    config = TrainConfig(**SIZES | shape | course | rates)
    built = one_process_task(config, None, vocab_size=61).build_model(compute_dtype=torch.float32)
    optimizer = build_optimizer(SimpleNamespace(parts=[built], working_copies=None), config)
    names = {parameter: name for name, parameter in built.named_parameters()}
    apart = TrainConfig(**SIZES | course | {"lr": 5e-3, "min_lr": 1e-3})
    for samples in (0, 2, 9, 20, 30):
        apply_schedule(optimizer, build_schedule(config, 2), samples)
        found = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert found.keys() == set(names.values())
        plain, ends = (build_schedule(c, 2).lr(samples) for c in (config, apart))
        for name, lr in found.items():
            of_ends = name.endswith("embedding.tokens.weight") or name == "head.weight"
            assert lr == (ends if of_ends else plain * (0.5 if ".router." in name else 1)), name
    assert ("head.weight" in found) == (model in ("gpt", "t5"))


ADAMS = ("adam", "muon")
ADAM = {"betas": (0.8, 0.7), "eps": 1e-3}


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        *((kind, {"adam_beta1": 0.8, "adam_beta2": 0.7, "adam_eps": 1e-3}, ADAM) for kind in ADAMS),
        ("sgd", {"sgd_momentum": 0.5}, {"momentum": 0.5}),
        (
            "muon",
            {"muon_momentum": 0.5, "muon_nesterov": False, "muon_num_ns_steps": 3},
            {"momentum": 0.5, "nesterov": False, "ns_steps": 3, "scale": 0.2}
            | {"ns_coefficients": "simple"},
        ),
        (
            "muon",
            {"muon_coefficient_type": "quintic"},
            {"ns_coefficients": "quintic"},
        ),
        ("muon", {"muon_extra_scale_factor": 1.0}, {"scale": 1.0, "nesterov": True}),
        ("adafactor", {}, {}),
    ],
)
def test_an_optimizer_gets_what_is_said_of_it_and_vectors_do_not_decay(kind, flags, expected):
    config, model = make(optimizer=kind, weight_decay=0.1, softmax_type="learnable", **flags)
    optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
    apply_schedule(optimizer, build_schedule(config, 2), 0)
    assert type(optimizer).__name__.lower() == {"adam": "adamw"}.get(kind, kind)
    ends = ("bias", "sinks")
    vectors = {p for name, p in model.named_parameters() if name.endswith(ends) or "norm" in name}
    for group in optimizer.param_groups:
        assert {name: group[name] for name in expected} == expected
        assert {group["weight_decay"]} == {0.0 if p in vectors else 0.1 for p in group["params"]}


def test_adafactor_moves_by_the_rate_however_large_weights_are():
    config, model = make(optimizer="adafactor", lr=1e-3, lr_decay_style="constant")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
    optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
    apply_schedule(optimizer, build_schedule(config, 2), 0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    sizes = {float(values.abs().max()) for values in before.values()}
    assert sizes == {0.0, 1.0}  # biases, norms
    for name, values in before.items():
        moved = (model.get_parameter(name) - values).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-3, atol=0)


def test_a_loss_scale_moves_as_the_flags_say():
    change = {"initial_loss_scale": 16.0, "min_loss_scale": 4.0, "loss_scale_window": 3}
    scaler = build_scaler(make(fp16=True, hysteresis=1, **change)[0])
    course = []
    for overflow in (0, 0, 0, 1, 1, 1, 1):
        scaler.update(torch.tensor(overflow))
        course.append(scaler.state_dict()["scale"])
    assert course == [16, 16, 32, 16, 8, 4, 4]
    constant = build_scaler(make(fp16=True, loss_scale=8.0)[0])
    for overflow in [0] * 1000 + [1] * 3:
        constant.update(torch.tensor(overflow))
    assert constant.state_dict()["scale"] == 8
    assert build_scaler(make()[0]) is None


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_all_parts_of_a_pipeline_on_a_rank_are_trained(kind):
    parts = [make()[1], make()[1]]
    for mult in (1.0, 0.5):
        config, _ = make(optimizer=kind, moe_router_lr_mult=mult)
        found = [p for group in parameter_groups(parts, config) for p in group["params"]]
        assert len(found) == len(set(found))
        assert set(found) == {p for part in parts for p in part.parameters()}
