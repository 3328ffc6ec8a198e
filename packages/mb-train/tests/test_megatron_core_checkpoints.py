"""Checkpoints of Megatron Core's format torch: layers and experts of each kind, on any ranks."""

import itertools
from fractions import Fraction

import pytest
import torch
from mb_train.convert import read_megatron
from mb_train.loading import load_trained
from mb_train.models.mamba import Mamba2
from megatron_core_models import (
    ALIKE,
    ALIKE_ARGS,
    BIASED,
    BIASED_ARGS,
    FURTHER,
    GATES,
    HIDDEN,
    HYBRID,
    HYBRID_FURTHER,
    LATENT,
    LAYERS,
    LLAMA,
    MIXTURE,
    MIXTURE_ARGS,
    OF_ONE,
    OF_ONE_ARGS,
    ON_INPUT,
    ON_INPUT_ARGS,
    OURS,
    SIGMOID,
    SINKHORN,
    SINKHORN_ARGS,
    SINKS,
    SINKS_ARGS,
    STATES,
    VOCAB,
    arguments,
    check_read,
    our_model,
    their_share,
)


def write(folder, model, *, tp=1, pp=1, ep=1, chunks=1, kind="te", experts="modules", **also):
    """A checkpoint as Megatron's `save_checkpoint` leaves it."""
    gated = "swiglu" in model.config.activation
    args = arguments(tp=tp, pp=pp, ep=ep, chunks=chunks, **also)
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("50")
    state = model.state_dict()
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        name = f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) + f"_{e:03d}" * (ep > 1)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 50}
        each = LAYERS // pp // chunks
        for chunk in range(chunks):
            first = (chunk * pp + p) * each
            content["model" if chunks == 1 else f"model{chunk}"] = their_share(
                state, gated, (t, e), (tp, ep), range(first, first + each), kind, experts
            )
        path = folder / "iter_0000050" / name
        path.mkdir(parents=True)
        torch.save(content, path / "model_optim_rng.pt")
    return folder


def change_each(folder, change):
    for file in folder.glob("iter_0000050/*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


L2_NORMS = {"qk_layernorm": False, "qk_l2_norm": True}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["te", "local"])
@pytest.mark.parametrize(
    ("fields", "args", "ranks"),
    [
        ({}, {}, {}),
        ({"activation": "gelu"}, {"bias_gelu_fusion": False}, {"tp": 2, "pp": 2}),
        ({}, {"bias_gelu_fusion": False, "use_te_activation_func": True}, {}),
        ({}, {"bias_gelu_fusion": False, "use_transformer_engine_op_fuser": True}, {}),
        (
            {"activation": "gelu", "add_bias_linear": False},
            {"add_bias_linear": False, "openai_gelu": True, "config": "a"},
            {},
        ),
        ({}, {"num_experts": 0}, {"tp": 2}),
        ({"attention_scale": 0.2}, {"softmax_scale": 0.2, "use_mup": False}, {"tp": 4}),
        (
            {"use_mup": True, "mup_base_hidden_size": 8, "embedding_multiplier": 3.0},
            {
                "use_mup": True,
                "mup_base_hidden_size": 8,
                "mup_embedding_mult": 3.0,
                "mup_output_mult": 0.25,
                "mup_width_mult": 4.0,
                "scaling_recipe": "mup",
                "scaling_base_hidden_size": 8,
            },
            {"tp": 2},
        ),
        (LLAMA, LLAMA, {"tp": 2, "pp": 2, "chunks": 2}),
        (
            LLAMA | {"swiglu": False, "activation": "swiglu(alpha=1.702, limit=7.0)"},
            LLAMA | {"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 7.0},
            {"tp": 2},
        ),
        (LLAMA | MIXTURE, LLAMA | MIXTURE_ARGS, {"tp": 2, "pp": 2, "ep": 2}),
        (LLAMA | MIXTURE, LLAMA | MIXTURE_ARGS, {"ep": 4, "experts": "numbered"}),
        (
            LLAMA | MIXTURE | OURS,
            LLAMA | MIXTURE_ARGS | SIGMOID,
            {"tp": 2, "ep": 2, "experts": "two"},
        ),
        (LATENT, LATENT, {"tp": 2, "pp": 2}),
        (
            LATENT | MIXTURE | OURS | {"q_lora_rank": 16},
            LATENT | MIXTURE_ARGS | SIGMOID | {"q_lora_rank": 16},
            {"tp": 4, "ep": 2},
        ),
        (LLAMA | FURTHER, LLAMA | FURTHER, {"tp": 2, "pp": 2}),
        (
            LATENT | MIXTURE | FURTHER | {"moe_loss_weight": 0.05},
            LATENT | MIXTURE_ARGS | FURTHER,
            {"tp": 2, "pp": 2, "ep": 2},
        ),
        (LATENT | {"qk_layernorm": False}, LATENT | {"qk_layernorm": False}, {"tp": 2}),
        (LLAMA | ON_INPUT, LLAMA | ON_INPUT_ARGS, {}),
        (
            LLAMA | MIXTURE | L2_NORMS
            | {"moe_first_k_dense": 0, "moe_layers": [0, 1, 1, 0], "moe_loss_weight": 0.02},
            LLAMA | MIXTURE_ARGS | L2_NORMS | {"moe_layer_freq": [0, 1, 1, 0]},
            {"tp": 2, "pp": 2},
        ),
        (BIASED, BIASED_ARGS, {"tp": 2, "ep": 2, "pp": 4}),
        (BIASED, BIASED_ARGS, {"experts": "numbered"}),
        (LLAMA | SINKHORN, LLAMA | SINKHORN_ARGS, {"tp": 2, "ep": 2}),
        (
            LLAMA | SINKHORN | {"moe_top_k": 2, "moe_router_score_function": "softmax"},
            LLAMA | SINKHORN_ARGS | {"moe_router_topk": 2, "moe_router_pre_softmax": False},
            {},
        ),
        (
            LLAMA | BIASED | SINKS
            | {"window_size": 5, "activation": "swiglu(alpha=1.702, offset=1.0, limit=7.0)"},
            LLAMA | BIASED_ARGS | SINKS_ARGS,
            {"tp": 2, "ep": 2},
        ),
        (
            LLAMA | {"window_size": 3, "window_attn_skip_freq": 4},
            LLAMA | {"window_size": [3, 0], "window_attn_skip_freq": [1, 1, 1, 0]},
            {},
        ),
        (
            LLAMA | {"window_size": 3, "window_layers": [0, 1, 1, 0], "rope_layers": [0, 1, 1, 1]},
            LLAMA
            | {"window_size": [3, 0], "window_attn_skip_freq": [0, 1, 1, 0]}
            | {"no_rope_freq": [1, 0, 0, 0]},
            {"pp": 2},
        ),
        (LLAMA | GATES, LLAMA | GATES, {"tp": 2, "pp": 2, "chunks": 2}),
        (
            LLAMA | GATES | {"add_qkv_bias": True},
            LLAMA | GATES | {"add_qkv_bias": True, "no_rope_freq": [0, 1, 0, 1]},
            {},
        ),
        (LLAMA | STATES, LLAMA | STATES, {"tp": 2, "pp": 2}),
        (
            LLAMA | STATES | GATES | MIXTURE | {"linear_attention_freq": 2},
            LLAMA | STATES | GATES | MIXTURE_ARGS
            | {"experimental_attention_variant": "gdn", "linear_attention_freq": [1, 0, 1, 0]},
            {"tp": 4, "ep": 2},
        ),
        (
            LLAMA | FURTHER | STATES | {"linear_attention_freq": None},
            LLAMA | FURTHER | STATES | {"linear_attention_freq": None},
            {"tp": 2},
        ),
        (
            LLAMA | STATES,
            LLAMA | STATES
            | {"experimental_attention_variant": None, "linear_attention_type": "gated_delta_net"},
            {},
        ),
        (
            HYBRID | MIXTURE | OF_ONE,
            HYBRID | MIXTURE_ARGS | OF_ONE_ARGS | {"hybrid_layer_pattern": "ME|*-"},
            {"tp": 4, "pp": 2, "ep": 2},
        ),
        (
            HYBRID_FURTHER | MIXTURE | OF_ONE | {"moe_loss_weight": 0.03},
            HYBRID | MIXTURE_ARGS | OF_ONE_ARGS | {
                "hybrid_layer_pattern": "ME|*-/*ME/*ME", "mtp_num_layers": 2,
                "mtp_loss_scaling_factor": 0.3,
            },
            {"tp": 4, "pp": 2, "ep": 2},
        ),
        (
            HYBRID | {"hybrid_layer_pattern": "M*M-"},
            HYBRID | {"hybrid_layer_pattern": None, "hybrid_override_pattern": "M*M-"},
            {"tp": 2},
        ),
        (
            HYBRID | {"hybrid_layer_pattern": "M-M-"},
            HYBRID | {"hybrid_layer_pattern": None, "hybrid_mlp_ratio": 0.5, "is_hybrid_model": 1},
            {"pp": 4},
        ),
        (ALIKE | OF_ONE | {"moe_loss_weight": 0.04}, ALIKE_ARGS | OF_ONE_ARGS,
         {"ep": 2, "experts": "two"}),
        # What a checkpoint says of them whatever its model is.
        (LLAMA, LLAMA | STATES | {"experimental_attention_variant": None}, {}),
        (LLAMA | {"no_rope_freq": 1}, LLAMA | {"no_rope_freq": [1] * 4}, {}),
        (LLAMA | {"no_rope_freq": 5}, LLAMA | {"no_rope_freq": [0] * 4}, {}),
        (
            LLAMA | FURTHER | {"attention_output_gate": True, "no_rope_freq": 1},
            LLAMA | FURTHER | {"attention_output_gate": True, "no_rope_freq": 1},
            {"tp": 2, "pp": 2},
        ),
    ],
)  # fmt: skip
def test_ranks_are_joined(tmp_path, fields, args, ranks, kind):
    model = our_model(**fields)
    folder = write(tmp_path / "checkpoints", model, kind=kind, **args, **ranks)
    check_read(folder, model)


def test_the_command_makes_a_run(tmp_path):
    from mb_train.cli import main

    model = our_model(**LLAMA, **MIXTURE)
    folder = write(
        tmp_path / "checkpoints", model, ep=2, pp=2, experts="numbered", **LLAMA, **MIXTURE_ARGS
    )
    words = ["convert", str(folder), str(tmp_path / "run"), "--tokenizer", "null:90"]
    assert main(words) == 0
    tokens_BS = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        read = load_trained(tmp_path / "run").model.logits(tokens_BS)
        torch.testing.assert_close(read, model.logits(tokens_BS))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"mtp_num_layers": 1}, r"missing .*mtp\.layers\.0\.eh_proj\.weight"),
        ({"mtp_use_repeated_layer": True}, "each module of --mtp-num-layers is a layer"),
        ({"hybrid_override_pattern": "M*-"}, "a letter for each of --num-layers 4, got 3: M"),
        (HYBRID | {"hybrid_layer_pattern": "M*M-/*-/M"}, "modules of the same layers .*, got"),
        ({"rotary_interleaved": True}, "rotary positions pair a head's first"),
        ({"scaling_recipe": "depth_mup"}, "none or mup, got 'depth_mup'"),
        ({"rotary_base_per_layer": [1e4, 1e6]}, "all layers have --rotary-base, but for"),
        (
            {"experimental_attention_variant": "dsa"},
            "--experimental-attention-variant to be one of gated_delta_net, got 'dsa'",
        ),
        (STATES | {"linear_attention_freq": [0, 1, 1, 1]}, "to be states in all layers but every"),
        (STATES | {"linear_conv_kernel_dim": 4}, r"missing .*in_proj\.weight\.alpha"),
        ({"head_wise_attn_gate": True}, "its gate that of --attention-output-gate"),
        ({"attention_output_gate": True}, r"attention\.qkv\.weight of .* to be \[128, 32\], got"),
        (LLAMA | {"no_rope_freq": [0, 1]}, "--no-rope-freq to be of --num-layers 4, got"),
        ({"softmax_type": "learnable"}, r"missing .* layers\.0\..*core_attention\.softmax_off"),
        ({"window_size": (5, 2)}, r"--window-size to be the tokens before .* got \(5, 2\)"),
        ({"window_size": (5, 0), "window_attn_skip_freq": [0, 1]}, "to be of --num-layers 4, got"),
        ({"glu_linear_offset": 1.0}, "with --quick-geglu alone"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type to be"),
        ({"apply_residual_connection_post_layernorm": True}, "some versions of Megatron Core"),
    ],
)
def test_what_we_have_not_is_refused(tmp_path, args, says):
    folder = write(tmp_path / "checkpoints", our_model(), **args)
    with pytest.raises(ValueError, match=says):
        read_megatron(folder)


@pytest.mark.parametrize("kind", ["te", "local"])
@pytest.mark.parametrize(
    "fields",
    [
        LLAMA | STATES | FURTHER,
        LATENT | {"q_lora_rank": 16},
        {},
        HYBRID | {"hybrid_layer_pattern": "M*M-"},
        HYBRID_FURTHER | {"hybrid_layer_pattern": "M*M-", "mtp_hybrid_override_pattern": "*M"},
    ],
)
def test_norms_around_one_are_ours_and_one(tmp_path, fields, kind):
    model = our_model(**fields)
    with torch.no_grad():
        mixers = [m.norm.weight for m in model.modules() if isinstance(m, Mamba2)]
        norms = [p for name, p in model.named_parameters() if "norm" in name and "weight" in name]
        norms = [p for p in norms if not any(p is own for own in mixers)]  # which are mamba-ssm's
        for norm in norms:
            norm.copy_((64 * norm).round() / 64)  # of which one less is exact
    folder = write(tmp_path / "checkpoints", model, kind=kind, **fields, apply_layernorm_1p=True)
    theirs = []

    def from_one(content):
        for name, tensor in content["model"].items():
            if name.endswith(("norm_weight", "norm.weight")) and "mixer.norm." not in name:
                content["model"][name] = tensor - 1
                theirs.append(name)

    change_each(folder, from_one)
    assert len(theirs) == len(norms)
    check_read(folder, model)


def test_norms_of_mamba_have_the_epsilon_that_they_have_there(tmp_path):
    fields = HYBRID | {"hybrid_layer_pattern": "M*M-", "layernorm_epsilon": 1e-6}
    folder = write(tmp_path / "checkpoints", our_model(**fields), **fields, norm_epsilon=1e-6)
    with pytest.raises(ValueError, match=r"--norm-epsilon 1e-05 with layers of Mamba-2, .* 1e-06"):
        read_megatron(folder)


def test_modules_for_further_tokens_are_left_out_if_asked_for(tmp_path):
    model = our_model(**LLAMA, **FURTHER)
    folder = write(tmp_path / "checkpoints", model, pp=2, **LLAMA, **FURTHER)

    def rename(content):  # as Core calls it since 2025
        for name in [n for n in content["model"] if ".transformer_layer." in n]:
            new = name.replace(".transformer_layer.", ".mtp_model_layer.")
            content["model"][new] = content["model"].pop(name)

    change_each(folder, rename)
    check_read(folder, model)
    for kept in (1, 0):
        config, weights = read_megatron(folder, mtp_num_layers=kept)
        assert config.mtp_num_layers == kept
        numbers = {name.split(".")[1] for name in weights if name.startswith("mtp.")}
        assert numbers == ({"0"} if kept else set())
    uneven = {"no_rope_freq": 2}, {"window_size": [3, 0], "window_attn_skip_freq": 2}
    for number, some in enumerate(uneven):
        there = write(tmp_path / f"uneven-{number}", model, **LLAMA, **FURTHER, **some)
        with pytest.raises(ValueError, match=r"no modules for .*-freq, got 2: .* leaves them out"):
            read_megatron(there)
        assert read_megatron(there, mtp_num_layers=0)[0].mtp_num_layers == 0
    experts = our_model(**LLAMA, **MIXTURE, **FURTHER)
    there = write(tmp_path / "experts", experts, **LLAMA, **MIXTURE_ARGS, **FURTHER)
    config, _ = read_megatron(there, mtp_num_layers=0)
    assert config.moe_loss_weight == pytest.approx(0.03)  # of three layers with 0.01 each
    with pytest.raises(ValueError, match=r"--mtp-num-layers of 0 to 2, .* got 3"):
        read_megatron(folder, mtp_num_layers=3)
    file = folder / "iter_0000050" / "mp_rank_00_000" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["embedding.word_embeddings.weight"].mul_(2)
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"all stages .* same embedding\.word_embeddings"):
        read_megatron(folder)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            r"--moe-aux-loss-coeff 0.0 with --moe-router-load-balancing-type sinkhorn, .* got 0.01",
        ),
        (
            SINKHORN_ARGS | {"moe_router_enable_expert_bias": True},
            "--moe-router-type topk with --moe-router-enable-expert-bias",
        ),
        ({"moe_layer_freq": [0, 0, 0, 0]}, r"--moe-layer-freq .*\[0, 0, 0, 0\]"),
        ({"qk_l2_norm": True, "no_rope_freq": 4}, "--qk-l2-norm or --no-rope-freq, got both"),
        (L2_NORMS | {"position_embedding_type": "none"}, "--qk-l2-norm or --position-.*, got both"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size to be"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "--moe-router-score-function to be"),
        ({"moe_router_topk": 1}, "--moe-router-pre-softmax with --moe-router-topk 1"),
        ({"moe_latent_size": 8}, r"missing .*mlp\.fc1_latent_proj\.weight"),
        ({"moe_mlp_glu_interleave_size": 32}, "blocks of each in turn: --moe-mlp-glu-inter"),
        ({"moe_shared_expert_glu_interleave_size": 8}, "in turn: --moe-shared-expert-glu-inter"),
        ({"moe_n_hash_layers": 2}, "chooses by its scores"),
        ({"num_experts": 2}, "nothing uses|missing"),
    ],
)
def test_experts_that_we_have_not_are_refused(tmp_path, args, says):
    model = our_model(**LLAMA, **MIXTURE)
    folder = write(tmp_path / "checkpoints", model, **(LLAMA | MIXTURE_ARGS | args))
    with pytest.raises(ValueError, match=says):
        read_megatron(folder)


def test_tensors_are_accounted_for(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(), pp=2, tp=2)
    change_each(folder, lambda c: c["model"].update({"decoder.layers.1.wings": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"nothing uses: layers\.1\.wings, layers\.3\.wings"):
        read_megatron(folder)
    change_each(folder, lambda c: c["model"].pop("decoder.layers.1.wings"))
    change_each(folder, lambda c: c["model"].pop("decoder.layers.0.self_attention.linear_qkv.bias"))
    with pytest.raises(ValueError, match=r"missing.*: layers\.0\.self_attention\.linear_qkv\.bias"):
        read_megatron(folder)
    change_each(
        folder, lambda c: c["model"].update({"decoder.layers.0.mixer.A_log": torch.ones(2)})
    )
    with pytest.raises(
        ValueError, match="position-embedding-type none or rope with --hybrid-layer"
    ):
        read_megatron(folder)


def test_both_kinds_of_a_norm_are_one_too_many(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model())
    norm = {"decoder.layers.1.input_layernorm.weight": torch.ones(HIDDEN)}
    change_each(folder, lambda c: c["model"].update(norm))
    with pytest.raises(ValueError, match=r"one tensor layers\.1\.input_layernorm\.weight"):
        read_megatron(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_are_no_weights(tmp_path, dtype):
    folder = write(tmp_path / "checkpoints", our_model())
    norm = {"decoder.final_layernorm.weight": torch.ones(HIDDEN).to(dtype)}
    change_each(folder, lambda c: c["model"].update(norm))
    with pytest.raises(ValueError, match=rf"final_layernorm\.weight in .* got {dtype}"):
        read_megatron(folder)


def test_a_weight_of_another_library_is_named(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model())
    change_each(folder, lambda c: c["model"].update({"decoder.layers.1.x": Fraction(1)}))
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.x .* got an object of another"):
        read_megatron(folder)


def test_moments_in_fp8_are_left_out(tmp_path):
    model = our_model()
    folder = write(tmp_path / "checkpoints", model)
    change_each(folder, lambda c: c.update(optimizer=torch.ones(3).to(torch.float8_e4m3fn)))
    assert read_megatron(folder)[1].keys() == model.state_dict().keys()


def test_a_head_that_differs_from_its_embedding(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(), pp=2)
    change_each(folder, lambda c: c["model"].get("output_layer.weight", torch.ones(1)).mul_(2))
    with pytest.raises(ValueError, match="differs from the embedding it is tied to"):
        read_megatron(folder)


def test_expert_ranks_are_of_one_model(tmp_path):
    model = our_model(**LLAMA, **MIXTURE)
    folder = write(tmp_path / "checkpoints", model, ep=2, **LLAMA, **MIXTURE_ARGS)
    file = folder / "iter_0000050" / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.2.mlp.router.weight"].mul_(2)
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"expert ranks 0 and 1 .* layers\.2\.mlp\.router\.weight"):
        read_megatron(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"tensor, expert and pipeline ranks .*\(0, 1, 0\)"):
        read_megatron(folder)
