"""Multipliers of embeddings, of what joins the residual and of scores; what μP makes of them."""

import math
from types import SimpleNamespace

import pytest
import torch
from mb_train.assembly.optimizer import apply_schedule, build_optimizer
from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.architectures import architecture_for
from mb_train.flags.command_line import parse, resolve
from mb_train.schedule import build_schedule
from mb_train.tasks import GPTTask
from mb_train.tasks.architecture import transformer_config

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 9,
    "micro_batch_size": 2, "train_iters": 1, "lr": 1e-3, "lr_decay_style": "constant",
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "activation": "swiglu", "ffn_hidden_size": 48}
UNTIED = {"untie_embeddings_and_output_weights": True}


def make(**change):
    torch.manual_seed(3)
    config = TrainConfig(**{**SIZES, **change})
    model = GPTTask(config, vocab_size=61, eod=0).build_model(compute_dtype=torch.float32)
    return config, model


def batch_of(config):
    torch.manual_seed(4)
    names = ["labels_BS", *(f"labels_{k + 1}_BS" for k in range(config.mtp_num_layers))]
    batch = {name: torch.randint(61, (2, 9)) for name in names}
    weights = (f"weights_{k + 1}_BS" for k in range(config.mtp_num_layers))
    batch |= {name: torch.rand(2, 9) for name in weights}
    return torch.randint(61, (2, 9)), batch


@pytest.mark.sweep(2)
@pytest.mark.parametrize("norms", ["before", "output", "both", "kept"])
@pytest.mark.parametrize("further", [0, 2])
@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_multipliers_are_weights_that_are_as_much_larger(experts, further, norms):
    """Where a number multiplies what a map puts out, the map may have it in its weights."""
    change = {**experts, **UNTIED, "norm_placement": norms, "mtp_num_layers": further}
    change |= {"position_embedding_type": "rope"}
    numbers = {"embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 5.0}
    _, plain = make(**change)
    config, scaled = make(**change, **numbers)
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        plain.embedding.tokens.weight *= 3
        plain.head.weight /= 5
        for name, parameter in plain.named_parameters():
            *_, module, kind = name.split(".")
            behind = "norm_1.", "norm_2."
            if norms in ("output", "both"):
                behind = ("norm_1_out.", "norm_2_out.") if norms == "both" else behind
                adds = any(norm in name for norm in behind)
            else:
                adds = module in ("out", "down") or kind in ("w2", "b2")
            if adds:
                parameter *= 0.25
    tokens_BS, batch = batch_of(config)
    found, expected = (model(tokens_BS, **batch).losses for model in (scaled, plain))
    assert found.keys() == expected.keys()
    for name, loss in found.items():
        torch.testing.assert_close(loss, expected[name], msg=name)
    torch.testing.assert_close(scaled.logits(tokens_BS), plain.logits(tokens_BS))
    other = make(**change)[1]
    other.load_state_dict(scaled.state_dict())
    assert not torch.allclose(other.logits(tokens_BS), scaled.logits(tokens_BS), rtol=0.1)


def test_numbers_of_one_change_no_run_of_before():
    identity = TrainConfig(**SIZES).model_identity(vocab_size=61, tokenizer="")
    assert (identity["multipliers"], identity["mup"]) == (None, None)
    other = TrainConfig(**SIZES, logits_scaling=2.0).model_identity(vocab_size=61, tokenizer="")
    assert {n: v for n, v in other.items() if v != identity[n]} == {"multipliers": [1, 1, 2]}


def test_mup_is_the_rules_of_its_paper():
    """At four times the base's width: weights half as large, rates and epsilon a quarter."""
    change = {**EXPERTS, **UNTIED, "num_attention_heads": 1, "hidden_size": 256}
    change |= {"moe_router_lr_mult": 0.5, "adam_eps": 1e-6, "init_method_std": 0.08}
    config, model = make(**change, use_mup=True, mup_base_hidden_size=64)
    assert config.multipliers == [1, 1, 4]
    made = transformer_config(config, 61)
    assert made.attention_scale == 1 / 256
    head = {"mup_base_head_dim": 64.0, "mup_attn_scale_power": 0.75}
    other = TrainConfig(**SIZES | change, use_mup=True, **head)
    assert transformer_config(other, 61).attention_scale == 8 / 256**0.75
    optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
    apply_schedule(optimizer, build_schedule(config, 2), 0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            table = name.startswith("embedding.")
            matrix = not table and "norm" not in name and not name.endswith(("bias", "b1", "b2"))
            rate = (0.25e-3 if matrix else 1e-3) * (0.5 if "router" in name else 1)
            assert group["lr"] == pytest.approx(rate), name
            assert group["eps"] == (0.25e-6 if matrix else 1e-6), name
            seen.add(name)
            if not (matrix or table):
                continue
            std = 0.08 if table or name == "head.weight" else 0.04
            if name.endswith(("out.weight", "w2", "down.weight")):
                std /= math.sqrt(2 * 2)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
    assert seen == set(names.values())


def test_a_rate_of_their_own_for_the_ends_stays_theirs():
    change = {**UNTIED, "use_mup": True, "mup_base_hidden_size": 8, "decoupled_lr": 5e-3}
    config, model = make(**change)
    optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
    apply_schedule(optimizer, build_schedule(config, 2), 0)
    found = {p: (g["lr"], g["eps"]) for g in optimizer.param_groups for p in g["params"]}
    eps = config.adam_eps
    assert found[model.head.weight] == (5e-3, eps / 4)
    assert found[model.embedding.tokens.weight] == (5e-3, eps)
    assert found[model.stack.blocks["0"].attention.qkv.weight] == (1e-3 / 4, eps / 4)


def moved(width, *, mup):
    """How far a step of one rate moves the scores of a model of this width, on average."""
    change = {"hidden_size": width, "num_attention_heads": width // 16, "lr": 4e-3, **UNTIED}
    if mup:
        change |= {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": 16.0}
    config, model = make(**change)
    optimizer = build_optimizer(SimpleNamespace(parts=[model], working_copies=None), config)
    tokens_BS, batch = batch_of(config)
    before = model.logits(tokens_BS).detach()
    for step in range(3):
        apply_schedule(optimizer, build_schedule(config, 2), 2 * step)
        optimizer.zero_grad()
        model(tokens_BS, **batch).losses["lm loss"].backward()
        optimizer.step()
    return (model.logits(tokens_BS) - before).square().mean().sqrt().item()


def test_a_rate_moves_models_of_any_width_as_far():
    """What μP is for (arXiv 2203.03466, figure 5): without it wider models move further."""
    narrow, wide = (moved(width, mup=True) for width in (128, 512))
    assert 0.6 < wide / narrow < 1.4
    assert moved(512, mup=False) / moved(128, mup=False) > 2.5


RUN = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1
    --train-iters 1 --lr 1e-3"""


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (
            "--use-mup --mup-base-hidden-size 16 --mup-embedding-mult 10 --mup-output-mult 0.5",
            {"embedding_multiplier": 10.0, "logits_scaling": 2.0, "mup_base_hidden_size": 16},
        ),
        ("--use-mup --mup-output-mult 1.0", {"logits_scaling": None, "use_mup": True}),
        (
            "--scaling-recipe mup --scaling-base-hidden-size 16 --scaling-base-head-dim 8",
            {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 8.0},
        ),
        ("--scaling-recipe none --mup-embedding-mult 1", {"use_mup": False}),
    ],
)
def test_cores_flags(words, fields):
    config = resolve(parse([*RUN.split(), *words.split()]))
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--mup-embedding-mult 10", "--use-mup with --mup-embedding-mult, without which Megatron"),
        ("--scaling-base-hidden-size 8", "--use-mup with --scaling-base-hidden-size"),
        ("--scaling-recipe depth_mup", "none or mup, got 'depth_mup'"),
        ("--use-mup --mup-width-mult 4", "it follows from --hidden-size and --mup-base-hidden"),
        (
            "--use-mup --mup-base-hidden-size 8 --scaling-base-hidden-size 16",
            "one base of μP, got --scaling-base-hidden-size 16 and 8",
        ),
        ("--use-mup --optimizer muon", "--optimizer adam with --use-mup"),
        ("--use-mup --multi-latent-attention --position-embedding-type rope", "no --multi-latent"),
        (
            "--model bert --residual-multiplier 2",
            "--model gpt with --residual-multiplier, got bert",
        ),
        ("--model bert --use-mup", "--model gpt with --use-mup, got bert"),
        ("--model ict --use-mup --mup-base-hidden-size 8", "--model gpt with --use-mup, got ict"),
        ("--logits-scaling 0", "--logits-scaling above 0, got 0"),
    ],
)
def test_what_does_not_go_together_is_said(words, says, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        resolve(parse([*RUN.split(), *words.split()]))
    assert says in capsys.readouterr().err + str(error.value)


@pytest.mark.parametrize("norms", ["both", "output"])
def test_a_scale_of_attention_that_follows_is_not_lost_on_the_way_to_hugging_face(norms):
    """By mup alone, without a multiplier, scores are divided by the head's width, not its root."""
    shape = {"normalization": "RMSNorm", "add_bias_linear": False}
    shape |= {"activation": "swiglu", "position_embedding_type": "rope", "norm_placement": norms}
    if norms == "output":
        shape |= {"qk_layernorm": True, "qk_layernorm_over": "width"}
    shape |= UNTIED
    name = {"both": "Glm4ForCausalLM", "output": "Olmo2ForCausalLM"}[norms]
    assert architecture_for(TrainConfig(**SIZES, **shape)).name == name
    with pytest.raises(ValueError, match=rf"{name}, cannot say its --attention-scale 0\.0625"):
        architecture_for(TrainConfig(**SIZES, **shape, use_mup=True))
