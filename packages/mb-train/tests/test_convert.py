"""Hugging Face models in and out: equal logits in fp32; runs and folders that are made of them."""

import json
import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from mb_layers import MoEConfig, SparseMixerRouter, dMoE
from mb_layers.state_dicts import Translation
from mb_train.cli import main
from mb_train.convert import export_model, import_model, read_model
from mb_train.convert.hugging_face.architectures import architecture_of
from mb_train.convert.hugging_face.safetensors_files import TensorFolder, write_tensors
from mb_train.folder.lock import locked
from mb_train.folder.run_folder import find_checkpoint
from mb_train.inference.decoding import Sampling, continue_tokens
from mb_train.loading import load_trained
from mb_train.models.gpt import GPT
from mb_train.models.linear import Norm
from mb_train.models.rotary import rotary_tables
from mb_train.tasks.architecture import transformer_config
from their_models import (
    ALL,
    DBRX,
    LLAMA3,
    LONG,
    MISTRAL4,
    WRITTEN,
    YARN,
    logits_of,
    ours,
    theirs,
    transformers,
)

NTK = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
TRAINED_ON = {"original_max_position_embeddings": 16}
HALF_LONG = LONG | {"short_factor": [1.0, 3.0], "long_factor": [1.0, 3.0]}
# Of six turned pairs three are not slowed; below of four one, and one by some.
SCOUT = LLAMA3 | {
    "rope_theta": 500.0, "high_freq_factor": 1.0, "factor": 16.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BETWEEN = SCOUT | {"low_freq_factor": 2.0, "high_freq_factor": 4.0}
AROUND_ONE = ("qwen3_next", "minimax_m3_vl_text")
NEAR, FULL, STATE = "sliding_attention", "full_attention", "linear_attention"


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "phimoe"])
def test_the_balancing_loss_is_theirs(tmp_path, kind):
    model = theirs(kind, num_hidden_layers=1, router_aux_loss_coef=0.3)
    model.save_pretrained(tmp_path)
    found, converted = [], ours(tmp_path).train()
    (layer,) = (module for module in converted.modules() if isinstance(module, dMoE))
    layer.register_forward_hook(lambda module, inputs, out: found.append(out.aux_loss))
    logits_of(converted)
    tokens_BS = torch.randint(0, 77, (3, 19), generator=torch.Generator().manual_seed(1))
    expected = 0.3 * model(tokens_BS, output_router_logits=True).aux_loss
    torch.testing.assert_close(found, [expected], rtol=1e-5, atol=0)
    import_model(tmp_path, tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["router_aux_loss_coef"] == pytest.approx(0.3)


@pytest.mark.parametrize("of_sequences", [True, False])
def test_the_balancing_loss_of_deepseek_v2_is_of_the_code_beside_it(tmp_path, of_sequences):
    """Which transformers passes over: E sum_e f_e P_e times a number, and all layers added."""
    model = theirs("deepseek_v2", aux_loss_alpha=0.3, seq_aux=of_sequences)
    model.save_pretrained(tmp_path / "hf")
    found, converted = [], ours(tmp_path / "hf").train()
    for layer in (module for module in converted.modules() if isinstance(module, dMoE)):
        layer.register_forward_hook(lambda module, inputs, out: found.append(out.aux_loss))
    logits_of(converted)
    expected, routers = [], []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, out: routers.append(out))
    logits_of(model)
    for logits_TE, _, ids_TK in routers:
        rows = (3, 19) if of_sequences else (1, 57)
        scores_BSE = logits_TE.softmax(-1).unflatten(0, rows)
        counts_BE = torch.stack([i.flatten().bincount(minlength=8) for i in ids_TK.split(rows[1])])
        shares_BE = counts_BE / (rows[1] * 3 / 8)
        expected.append(0.3 * (shares_BE * scores_BSE.mean(1)).sum(1).mean())
    torch.testing.assert_close(sum(found) / 2, sum(expected), rtol=1e-5, atol=0)
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["aux_loss_alpha"], back["seq_aux"]) == (pytest.approx(0.3), of_sequences)


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("mixtral", {"tie_word_embeddings": True, "rope_theta": 500.0}),
        ("mixtral", {"head_dim": 12}),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": 7.0}},
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 4.0}}),
        ("mixtral", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {**BETWEEN}}),
        ("llama", {"rope_parameters": {**LLAMA3}, **TRAINED_ON}),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "rope_parameters": {**SCOUT}}),
        ("olmoe", {"clip_qkv": 0.7}),
        ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
        ("olmoe", {"norm_topk_prob": True, "rms_norm_eps": 1e-3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3", {"rope_parameters": {**YARN}}),
        ("deepseek_v2", {"rope_parameters": {**YARN}, "q_lora_rank": None}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 4, "topk_group": 1}),
        ("deepseek_v3", {"rms_norm_eps": 1e-2, "tie_word_embeddings": True}),
        ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("mistral4", {"norm_topk_prob": False, "q_lora_rank": None, "rope_parameters": MISTRAL4}),
        ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True, "swiglu_alpha": 0.7}),
        ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}),
        ("glm4_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
        ("glm4_moe", {"partial_rotary_factor": 0.25, "rope_parameters": {**LLAMA3}}),
        ("dots1", {"sliding_window": 5, "max_window_layers": 0}),
        ("dots1", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
        ("minimax_m2", {"rope_parameters": {**YARN}, "head_dim": 12, "rotary_dim": None}),
        ("ernie4_5_moe", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}),
        ("phi3", {"partial_rotary_factor": 0.5, "resid_pdrop": 0.1}),
        ("phi3", {"rope_parameters": HALF_LONG, "partial_rotary_factor": 0.5, **TRAINED_ON}),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2], "rope_parameters": NTK}),
        ("hunyuan_v1_dense", {"tie_word_embeddings": True, "rope_parameters": {**YARN}}),
        ("smollm3", {"rope_parameters": {**YARN}, "no_rope_layers": [1, 0] * 4}),
        ("afmoe", {"mup_enabled": True, "rope_parameters": {**YARN}}),
        ("afmoe", {"mup_enabled": True, "tie_word_embeddings": True}),
        ("granite", {"logits_scaling": 49.0, "tie_word_embeddings": True}),
        ("granite", {"attention_multiplier": 1, "embedding_multiplier": 12, "head_dim": 12}),
        ("granitemoe", {"num_local_experts": 60, "num_hidden_layers": 1}),
        ("granitemoeshared", {"shared_intermediate_size": 0, "rope_parameters": LLAMA3}),
        # Turned by 300, and slowed by that, whatever these say.
        ("granitemoe_swa", {"rope_parameters": {**BETWEEN, "rope_theta": 5e4}}),
        ("granitemoehybrid", {"mamba_n_heads": 12, "mamba_n_groups": 2, "mamba_d_conv": 1}),
        ("qwen3_next", {"partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 1}),
        ("qwen3_5_moe_text", {"rope_parameters": {**YARN}, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_their_options(tmp_path, kind, also):
    model = theirs(kind, **also)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # in several files
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


def test_no_step_of_a_nemotron_is_too_small(tmp_path):
    """As where they were trained; transformers' class has a bound, which is lowered here, and in
    what is written."""
    model = theirs("nemotron_h", time_step_min=1e-12)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter -= 10
    model.save_pretrained(tmp_path / "hf")
    expected = logits_of(ours(tmp_path / "hf"))
    torch.testing.assert_close(expected, logits_of(model), rtol=1e-4, atol=1e-5)
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits_of(again), expected, rtol=1e-4, atol=1e-5)


def test_an_olmo_3_for_longer_texts_slows_what_has_no_window(tmp_path):
    """As its files have it, with the factor of attention that follows from the others."""
    model = theirs("olmo3", rope_parameters={FULL: YARN, NEAR: {"rope_theta": 500_000.0}})
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    about = json.loads(file.read_text())
    del about["rope_parameters"]
    slow = {**YARN, "attention_factor": 0.1 * math.log(YARN["factor"]) + 1}
    file.write_text(json.dumps(about | {"rope_scaling": slow}))
    assert ours(tmp_path).config.local_rope_base == 500_000.0
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 9.0},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ],
    ids=str,
)
def test_far_positions_turn_as_theirs(tmp_path, rope):
    model = theirs("llama", rope_parameters={"rope_theta": 2e5, **rope}, head_dim=32)
    model.save_pretrained(tmp_path)
    positions_BS = torch.tensor([[0, 1, 77, 5000, 100_000]])
    want = model.model.rotary_emb(torch.ones(1), positions_BS)
    for got, table in zip(rotary_tables(ours(tmp_path).config, positions_BS), want, strict=True):
        torch.testing.assert_close(got[:, :, 0], table, rtol=0, atol=0.02)  # 1e5 in fp32: 0.008
        torch.testing.assert_close(got[:, :4, 0], table[:, :4], rtol=0, atol=1e-3)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
        *((kind, {}) for kind in ALL if kind != "gpt2" and kind not in WRITTEN),
        ("dbrx", {"ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": 2.0}}),
        (
            "dbrx",
            {"n_layers": 1, "ffn_config": {**DBRX["ffn_config"], "moe_num_experts": 60}},
        ),
        ("dbrx", {"attn_config": {**DBRX["attn_config"], "kv_n_heads": 6, "attn_pdrop": 0.1}}),
        ("olmoe", {"clip_qkv": 0.7}),
        ("phimoe", {"attention_bias": False, "lm_head_bias": False, "rope_parameters": None}),
        ("phimoe", {"tie_word_embeddings": True, "sliding_window": 5}),
        ("llama4_text", {"use_qk_norm": False, "no_rope_layers": [0, 1, 1, 0]}),
        ("llama4_text", {"moe_layers": [0, 1, 3], "num_experts_per_tok": 3, "head_dim": 8}),
        ("llama4_text", {"interleave_moe_layer_step": 1, "rope_parameters": {**SCOUT}}),
        ("llama4_text", {"moe_layers": [], "tie_word_embeddings": True}),
        ("qwen2_moe", {"mlp_only_layers": [0]}),
        ("glm4_moe", {"n_group": 4, "topk_group": 2, "partial_rotary_factor": 0.75}),
        (
            "deepseek_v2",
            {
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
            },
        ),
        (
            "deepseek_v3",
            {
                "q_lora_rank": None,
                "first_k_dense_replace": 0,
                "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.5},
            },
        ),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("mistral4", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
        ("mistral4", {"rope_parameters": {**MISTRAL4, "factor": 1.0, "llama_4_scaling_beta": 0.0}}),
        ("deepseek_v3", {"qk_rope_head_dim": 2}),
        ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "head_dim": 16}),
        ("gpt_oss", {"attention_bias": False, "rope_parameters": {**YARN, "truncate": False}}),
        ("gpt_oss", {"hidden_size": 48, "num_attention_heads": 4, "swiglu_alpha": 1.0}),
        ("minimax_m2", {"tie_word_embeddings": True, "rotary_dim": 16}),
        ("minimax_m3_vl_text", {"mlp_layer_types": ["sparse"] * 3, "tie_word_embeddings": True}),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "head_dim": 12}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "tie_word_embeddings": False}),
        ("qwen3", {"rope_parameters": LLAMA3, "max_position_embeddings": 4096}),
        ("olmoe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 4.0}}),
        ("glm4", {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 6}),
        ("glm4", {"partial_rotary_factor": 1.0, "head_dim": 8, "rope_parameters": LLAMA3}),
        ("olmo2", {"num_key_value_heads": None, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
        ("olmo3", {"rope_parameters": dict.fromkeys(("full_attention", NEAR), YARN)}),
        ("olmo3", {"layer_types": [NEAR] * 5}),
        ("olmo3", {"rope_parameters": {FULL: YARN, NEAR: {"rope_theta": 50.0}}}),
        ("mellum", {"mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": False}),
        ("mellum", {"layer_types": [NEAR] * 3, "tie_word_embeddings": True}),
        ("hunyuan_v1_moe", {"tie_word_embeddings": True, "num_experts": 5}),
        ("flex_olmo", {"norm_topk_prob": True, "head_dim": 12}),
        ("exaone4", {"rope_parameters": LLAMA3, "head_dim": 12}),
        ("exaone4", {"sliding_window": 5, "layer_types": [NEAR] * 2}),
        ("exaone4", {"sliding_window": 5, "layer_types": [NEAR, FULL]}),
        ("exaone4", {"sliding_window": 5, "layer_types": None, "sliding_window_pattern": 2}),
        ("exaone4", {"sliding_window": 5, "layer_types": [FULL] * 2}),
        ("exaone_moe", {"layer_types": [NEAR] * 4, "head_dim": 12, "num_shared_experts": 1}),
        ("exaone_moe", {"first_k_dense_replace": 4, "layer_types": None, "n_group": 1}),
        ("exaone_moe", {"mlp_layer_types": ["sparse"] * 4, "norm_topk_prob": False}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "head_dim": 12}),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "head_dim": 12}),
        ("granite_swa", {"layer_types": None, "layer_rope_theta": None, "rope_theta": 7.0}),
        ("granitemoe_swa", {"layer_rope_theta": [0.0] * 4, "shared_intermediate_size": 0}),
        ("flint", {"mlp_only_layers": [], "norm_topk_prob": False, "layer_types": [FULL] * 5}),
        ("flint", {"mlp_only_layers": [0, 1, 2, 3, 4]}),
        ("exaone_moe", {"layer_types": [FULL, NEAR, NEAR, NEAR]}),
        ("afmoe", {"layer_types": [FULL, NEAR, NEAR, NEAR]}),
        ("smollm3", {"no_rope_layers": [0] * 4, "tie_word_embeddings": False}),
        ("smollm3", {"sliding_window": 5, "use_sliding_window": True, "layer_types": [NEAR] * 4}),
        ("afmoe", {"layer_types": None, "global_attn_every_n_layers": 2, "num_dense_layers": 0}),
        ("afmoe", {"layer_types": [NEAR] * 4, "num_dense_layers": 4, "tie_word_embeddings": True}),
        ("afmoe", {"layer_types": [FULL] * 4, "num_key_value_heads": None, "head_dim": 8}),
        ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
        (
            "granitemoehybrid",
            {"mamba_n_groups": 4, "layer_types": ["mamba", FULL, FULL], "mamba_expand": 3},
        ),
        ("granitemoehybrid", {"layer_types": [FULL] * 3, "tie_word_embeddings": True}),
        ("granitemoehybrid", {"mamba_expand": 3, "num_local_experts": 6}),
        ("nemotron_h", {"n_group": 2, "topk_group": 1, "norm_topk_prob": False}),
        ("nemotron_h", {"moe_latent_size": 12}),
        ("nemotron_h", {"layers_block_type": ["mlp", "full_attention"], "n_groups": 1}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 1, "norm_eps": 1e-3}),
        ("lfm2", {"block_ffn_dim_multiplier": 1.4, "tie_word_embeddings": False}),
        ("lfm2_moe", {"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False}),
        ("lfm2_moe", {"routed_scaling_factor": 2.5, "rope_parameters": {**YARN}}),
        ("qwen3_next", {"layer_types": None, "mlp_only_layers": [0], "norm_topk_prob": False}),
        ("qwen3_next", {"layer_types": [STATE] * 3 + [FULL], "linear_num_value_heads": 2}),
        ("qwen3_next", {"layer_types": [STATE, FULL] * 2, "mlp_only_layers": [0, 1, 2, 3]}),
    ],
    ids=str,
)
def test_there_and_back_again(tmp_path, kind, also):
    model = theirs(kind, **also)
    model.save_pretrained(tmp_path / "hf")
    said = []
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=said.append)
    torch.testing.assert_close(
        logits_of(load_trained(tmp_path / "run").model), logits_of(model), rtol=1e-4, atol=1e-5
    )
    export_model(tmp_path / "run", tmp_path / "back", say=said.append)
    first, second = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert first.keys() == second.keys()
    for name, tensor in first.items():  # to what is around one ours are not closer than that
        around_one = kind in AROUND_ONE and re.search(r"(?<!linear_attn\.)norm\.weight$", name)
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=2e-7 if around_one else 0)
    # Mistral 4's class is not among those that the general one knows.
    known = type(model) if kind == "mistral4" else transformers.AutoModelForCausalLM
    back = known.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert type(back) is type(model)
    assert back.config.initializer_range == model.config.initializer_range
    torch.testing.assert_close(logits_of(back), logits_of(model), rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "run"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("kind", "also"),
    [
        *((kind, {}) for kind in WRITTEN),
        ("dots1", {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}),
        ("dots1", {"first_k_dense_replace": 0, "head_dim": 16, "sliding_window": 19}),
        ("solar_open", {"attention_bias": True, "rope_parameters": {**YARN}}),
        (
            "glm4_moe_lite",
            {
                "mlp_layer_types": ["dense", "dense", "sparse"],
                "first_k_dense_replace": 2,
                "q_lora_rank": None,
            },
        ),
        ("glm4_moe_lite", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.5}}),
        ("hy_v3", {"mlp_layer_types": ["sparse"] * 3, "tie_word_embeddings": True}),
        ("seed_oss", {"attention_bias": False, "tie_word_embeddings": True}),
        ("ernie4_5", {"tie_word_embeddings": False, "rope_parameters": {**YARN}}),
        ("ernie4_5_moe", {"moe_layer_start_index": 3}),
        ("phi3", {"rope_parameters": {**LONG}, **TRAINED_ON}),
        ("phi3", {"sliding_window": 5, "tie_word_embeddings": True, "rope_theta": 500.0}),
    ],
    ids=str,
)
def test_it_is_written_as_what_computes_the_same(tmp_path, kind, also):
    model = theirs(kind, **also)
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    torch.testing.assert_close(
        logits_of(load_trained(tmp_path / "run").model), logits_of(model), rtol=1e-4, atol=1e-5
    )
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    written = WRITTEN.get(kind, "llama")
    if kind == "seed_oss" and "attention_bias" in also:
        written = "llama"
    if kind == "phi3" and "sliding_window" in also:
        written = "mistral"
    assert back.config.model_type == written
    torch.testing.assert_close(logits_of(back), logits_of(model), rtol=1e-4, atol=1e-5)
    config, weights = read_model(tmp_path / "back")
    first = read_model(tmp_path / "hf")
    assert all(torch.equal(weights[name], first[1][name]) for name in first[1])
    assert config.moe_first_k_dense == first[0].moe_first_k_dense


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("gpt2", {}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
        ("olmo3", {"rope_parameters": dict.fromkeys(("full_attention", NEAR), YARN)}),
        ("qwen3_moe", {}),
        ("dbrx", {}),
        ("phimoe", {}),
        ("llama4_text", {"attention_chunk_size": 24, "attn_temperature_tuning": False}),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.5}}),
        ("afmoe", {}),
        ("granitemoeshared", {"tie_word_embeddings": True}),
        ("granitemoehybrid", {"tie_word_embeddings": True}),
        ("nemotron_h", {}),
        ("qwen3_next", {}),
    ],
    ids=str,
)
def test_trained_further_it_is_theirs_again(tmp_path, kind, also):
    """By the commands: every weight has moved, a balancing bias too, and a tied head is tied."""
    theirs(kind, **also).save_pretrained(tmp_path / "hf")
    run, more, back = (str(tmp_path / name) for name in ("run", "more", "back"))
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "null:76"]) == 0
    words = """--finetune --mock-data --seq-length 24 --micro-batch-size 4 --lr 1e-2 --train-iters 2
        --eval-iters 0 --lr-decay-style constant --device cpu"""
    assert main([*words.split(), "--load", run, "--save", more]) == 0
    assert main(["convert", more, back]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    mine = logits_of(load_trained(more).model)
    torch.testing.assert_close(logits_of(model), mine, rtol=1e-4, atol=1e-5)
    first, second = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == (kind == "gpt2" or "tie_word_embeddings" in also)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_without_a_shared_expert(tmp_path, kind):
    """transformers has one of no width then, and saves it."""
    model = theirs(kind, n_shared_experts=0)
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    for other in (load_trained(tmp_path / "run").model, back):
        torch.testing.assert_close(logits_of(other), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_that_a_class_multiplies_are_multiplied_here_too(tmp_path, tied):
    model = theirs("afmoe", mup_enabled=True, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    assert load_trained(tmp_path / "run").config.embedding_multiplier == 48**0.5
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    assert back.config.mup_enabled
    for other in (load_trained(tmp_path / "run").model, back):
        torch.testing.assert_close(logits_of(other), logits_of(model), rtol=1e-4, atol=1e-5)


def test_a_routers_bias_keeps_its_bits(tmp_path):
    """In bf16 it would be another choice of experts; transformers keeps it in fp32 too."""
    model = theirs("glm4_moe")
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", dtype=torch.bfloat16, say=lambda line: None)
    back = TensorFolder(tmp_path / "back")
    assert back["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    assert torch.equal(back["model.layers.2.mlp.gate.e_score_correction_bias"], bias)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "gpt2"])
def test_norms_have_their_epsilons(tmp_path, kind):
    """Those of DeepSeek's latents have one of their own."""
    model = theirs(kind, **{"norm_eps" if kind.startswith("lfm2") else "rms_norm_eps": 1e-3})
    model.save_pretrained(tmp_path)
    converted = ours(tmp_path)
    rules = architecture_of(model.config.to_dict()).stacked(None, converted.config)
    sources = {rule.target: rule.sources[0].removesuffix(".weight") for rule in rules}
    norms = [(name, m) for name, m in converted.named_modules() if isinstance(m, Norm)]
    for name, norm in norms:
        their = model.get_submodule(sources[f"{name}.weight"])
        assert norm.eps == getattr(their, "variance_epsilon", getattr(their, "eps", None)), name
    assert len(norms) >= 5


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "kind",
    [
        "dbrx",
        "llama4_text",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
        "mistral4",
        "gpt_oss",
        "hy_v3",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ernie4_5_moe",
        "olmo3",
        "mellum",
        "flex_olmo",
        "exaone4",
        "exaone_moe",
        "smollm3",
        "granitemoe_swa",
        "flint",
        "afmoe",
        "glm4",
        "hunyuan_v1_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "lfm2_moe",
    ],
)
def test_gradients_are_theirs(tmp_path, kind):
    """Of a loss of next tokens: also those of weights that the routing scales."""
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    converted = ours(tmp_path).train()
    tokens_BS = torch.randint(0, 77, (3, 20), generator=torch.Generator().manual_seed(1))
    labels_BS = tokens_BS[:, 1:].contiguous()
    converted(tokens_BS[:, :-1], labels_BS=labels_BS).losses["lm loss"].backward()
    model(tokens_BS[:, :-1], shift_labels=labels_BS, labels=labels_BS).loss.backward()
    learned = (item for item in model.named_parameters() if item[1].requires_grad)
    theirs_grads = {name: parameter.grad for name, parameter in learned}
    found = architecture_of(model.config.to_dict())
    rules = [r for r in found.stacked(None, converted.config) if "balancing_bias" not in r.target]
    mine = {name: parameter.grad for name, parameter in converted.named_parameters()}
    # Those of an embedding in front of states are up to 3, and in fp32 theirs are as far from them.
    atol = 2e-5 if converted.config.delta is not None else 1e-6
    still = {name: torch.zeros_like(gradient) for name, gradient in theirs_grads.items()}
    built, moved = (  # of norms around one the one is no part of a gradient
        Translation(source, rules, mine, shared=found.shared) for source in (theirs_grads, still)
    )
    for name, gradient in built.items():
        want = gradient - moved[name]
        torch.testing.assert_close(mine[name], want, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize(("tokens", "multiple", "rows"), [(80, 1, 81), (80, 32, 96), (70, 1, 77)])
def test_a_vocabulary_grows_to_its_tokenizer(tmp_path, kind, tokens, multiple, rows):
    """What it knew is as it was; a new token is what tokens are in the mean."""
    model = theirs(kind, tie_word_embeddings=kind == "llama")
    model.save_pretrained(tmp_path / "hf")
    how = {"tokenizer": f"null:{tokens}", "divisible_by": multiple}
    said = []
    import_model(tmp_path / "hf", tmp_path / "run", **how, say=said.append)
    assert any(line.startswith("vocabulary: 77 rows") for line in said) == (rows > 77)
    logits, before = logits_of(load_trained(tmp_path / "run").model), logits_of(model)
    assert logits.shape[-1] == rows
    torch.testing.assert_close(logits[..., :77], before, rtol=1e-4, atol=1e-5)
    mean = before.mean(-1, keepdim=True).expand(*before.shape[:-1], rows - 77)
    torch.testing.assert_close(logits[..., 77:], mean, rtol=1e-4, atol=1e-5)
    export_model(tmp_path / "run", tmp_path / "back", say=said.append)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    torch.testing.assert_close(logits_of(back.eval()), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("kind", "also", "windows"),
    [
        ("mistral", {"sliding_window": 5}, (4, None)),
        ("mistral", {"sliding_window": 1}, (0, None)),
        ("mistral", {"sliding_window": None}, None),
        ("mixtral", {"sliding_window": 7}, (6, None)),
        ("mixtral", {"sliding_window": 7, "use_sliding_window": False}, (6, None)),  # Qwen's alone
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
         (4, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 9}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
         (4, [0, 1])),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": [NEAR, FULL]},
         (4, 2)),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}, (4, None)),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5,
                       "layer_types": [NEAR, NEAR]}, (4, None)),
        ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 5}, None),
        ("gpt_oss", {"layer_types": [NEAR] * 3}, (4, None)),
        ("gpt_oss", {"layer_types": [NEAR, NEAR, FULL], "sliding_window": 3}, (2, 3)),
        ("gpt_oss", {"layer_types": [FULL] * 3}, None),
        ("smollm3", {"use_sliding_window": False, "sliding_window": 5}, None),
        ("exaone_moe", {}, (4, 3)),
        ("afmoe", {"layer_types": [NEAR, NEAR, NEAR, FULL]}, (4, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_windows_are_theirs(tmp_path, kind, also, windows):
    """There and back, of 19 tokens, with as many positions as they have."""
    model, said = theirs(kind, **also), []
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=said.append)
    trained = load_trained(tmp_path / "run")
    assert (trained.config.positions, trained.config.windows) == (24, windows)
    assert not any("has a window" in line for line in said)
    torch.testing.assert_close(logits_of(trained.model), logits_of(model), rtol=1e-4, atol=1e-5)
    whole = theirs(kind, **also | {"sliding_window": 24})
    assert ((logits_of(whole) - logits_of(model)).abs().max() > 1e-3) == (windows is not None)
    export_model(tmp_path / "run", tmp_path / "back", say=said.append)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    torch.testing.assert_close(logits_of(back), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "also", "positions"),
    [
        ("llama", {"sliding_window": 19}, 19),  # whose class passes over it
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 19, "layer_types": None}, 19),
    ],
    ids=str,
)
def test_a_window_that_no_flag_describes_bounds_the_texts(tmp_path, kind, also, positions):
    """Of 19 tokens one of 19 leaves none out, and one of 18 does."""
    model, said = theirs(kind, **also), []
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | also))
    config, weights = read_model(tmp_path / "hf", say=said.append)
    assert (config.positions, config.windows) == (positions, None)
    assert len(said) == 1
    mine = GPT(transformer_config(config, 77)).eval()
    mine.load_state_dict(weights)
    torch.testing.assert_close(logits_of(mine), logits_of(model), rtol=1e-4, atol=1e-5)
    if kind != "llama":
        narrow = theirs(kind, **also | {"sliding_window": 18})
        assert (logits_of(narrow)[:, :18] - logits_of(mine)[:, :18]).abs().max() < 1e-4
        assert (logits_of(narrow)[:, 18] - logits_of(mine)[:, 18]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_other_factors_of_longer_texts_bound_the_texts(tmp_path, kind):
    """Of one token more all tokens turn otherwise."""
    trained_on = {"original_max_position_embeddings": 19}
    rope = LONG | {"long_factor": [9.0] * 4} | trained_on
    model, said = theirs(kind, rope_parameters=rope, sliding_window=24, **trained_on), []
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=said.append)
    trained = load_trained(tmp_path / "run")
    assert trained.config.positions == 19
    assert trained.config.windows is None
    assert [line for line in said if "for those of 19 tokens" in line]
    torch.testing.assert_close(logits_of(trained.model), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draws", [False, True])
def test_experts_one_after_the_other_are_chosen_as_theirs(draws):
    """By the same draws, but for the last, of which they throw one away; 0.3333 is a third."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    config = MoEConfig(hidden_size=6, ffn_hidden_size=4, num_experts=6, top_k=2)
    router = SparseMixerRouter(config, tolerance=0.3).train(draws)
    with torch.no_grad():
        router.weight.copy_(torch.eye(6))  # tokens are their own logits
    found = []
    for route in (
        lambda x: router(x)[:2],
        lambda x: sparsemixer(x, jitter_eps=0.3, training=draws),
    ):
        x_TD = torch.randn(99, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.manual_seed(2)
        weights_TK, ids_TK = route(x_TD)
        weights_TK.mul(torch.arange(2) + 1).sum().backward()
        found.append((weights_TK, ids_TK.long(), x_TD.grad))
    (weights_TK, *mine), (want_TK, *want) = found
    alike = slice(1 if draws else 2)
    torch.testing.assert_close(weights_TK[:, alike], want_TK[:, alike], rtol=2e-4, atol=0)
    torch.testing.assert_close(mine, want)


@pytest.mark.parametrize(
    ("also", "positions"),
    [
        ({}, 19),
        ({"floor_scale": 15}, 14),
        ({"attn_temperature_tuning": False}, 19),
        ({"no_rope_layers": [1] * 4, "floor_scale": 3}, 19),
        ({"layer_types": [FULL] * 4, "floor_scale": 21}, 20),
        ({"no_rope_layers": [0] * 4, "attn_scale": 0.0}, 24),
    ],
    ids=str,
)
def test_chunks_and_queries_that_grow_bound_the_texts(tmp_path, also, positions):
    """Theirs of one token more are others: that is where they begin."""
    model, said = theirs("llama4_text", **also), []
    model.save_pretrained(tmp_path)
    config, weights = read_model(tmp_path, say=said.append)
    assert config.positions == positions
    assert len(said) == (positions < 24)
    mine = GPT(transformer_config(config, 77)).eval()
    mine.load_state_dict(weights)
    tokens_BS = torch.randint(0, 77, (2, positions + 1))
    with torch.no_grad():
        far = (mine.logits(tokens_BS) - model(tokens_BS).logits).abs()
    assert far[:, :positions].max() < 1e-4
    assert (far[:, positions:].max() > 1e-3) == (positions < 24)


@pytest.mark.parametrize("kind", ["gpt_oss", "mistral4"])
def test_rotations_of_null_are_those_of_the_class(tmp_path, kind):
    """Which are slowed."""
    model = theirs(kind, rope_parameters=None)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": None}))
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beside", [False, True])
def test_queries_that_grow_bound_the_texts(tmp_path, beside):
    """They are longer from the 18th token on; what stands beside the rotations' settings counts."""
    early = {"original_max_position_embeddings": 17}
    model, said = theirs("mistral4", rope_parameters={**MISTRAL4, **early}), []
    model.save_pretrained(tmp_path)
    if beside:
        file = tmp_path / "config.json"
        about = json.loads(file.read_text()) | {"rope_parameters": MISTRAL4, **early}
        file.write_text(json.dumps(about))
    config, weights = read_model(tmp_path, say=said.append)
    assert config.positions == 17
    assert len(said) == 1
    assert "taken for texts of 17 tokens" in said[0]
    mine = GPT(transformer_config(config, 77)).eval()
    mine.load_state_dict(weights)
    apart = (logits_of(model) - logits_of(mine)).abs().amax((0, 2))
    assert apart[:17].max() < 1e-4
    assert apart[17] > 1e-4


CHOSEN = {
    "deepseek_v32": {"index_topk": 18}, "glm_moe_dsa": {"index_topk": 18},
    "minimax_m3_vl_text": {
        "index_block_size": 6, "index_topk_blocks": 3, "index_n_heads": 2, "index_head_dim": 16,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CHOSEN)
def test_attention_to_chosen_tokens_bounds_the_texts(tmp_path, kind):
    """Of 19 tokens 18 that are chosen leave some out."""
    model, said = theirs(kind, **CHOSEN[kind]), []
    model.save_pretrained(tmp_path)
    config, weights = read_model(tmp_path, say=said.append)
    assert config.positions == 18
    assert [word in line for line, word in zip(said, ("chooses", "indexer"), strict=True)]
    mine = GPT(transformer_config(config, 77)).eval()
    mine.load_state_dict(weights)
    apart = (logits_of(model) - logits_of(mine)).abs().amax((0, 2))
    assert apart[:18].max() < 1e-4
    assert apart[18] > 1e-4


def test_a_folder_that_another_writes_is_refused(tmp_path):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    model = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(70)}, "merges": []}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps({"model": model}))
    with locked(tmp_path / "run"):
        with pytest.raises(ValueError, match="is writing it"):
            import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
        assert not (tmp_path / "run" / "tokenizer").exists()  # of which the other has its own
    import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    with pytest.raises(ValueError, match="hf holds a model of Hugging Face's"):
        import_model(tmp_path / "hf", tmp_path / "hf", say=lambda line: None)
    named = load_trained(tmp_path / "run").config.tokenizer
    assert named == str(tmp_path / "run" / "tokenizer" / "tokenizer.json")


def test_a_model_that_is_refused_leaves_nothing(tmp_path):
    model = theirs("gpt2")
    model.transformer.ln_f.bias.data[1] = float("nan")
    model.save_pretrained(tmp_path / "hf")
    words = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(70)}, "merges": []}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps({"model": words}))
    with pytest.raises(ValueError, match=r"Expected numbers in stack\.norm\.bias, got NaN"):
        import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_cannot_be_copied_leaves_no_run(tmp_path, monkeypatch):
    def full(source, target):
        Path(target).touch()
        raise OSError(28, "No space left on device", str(target))

    theirs("gpt2").save_pretrained(tmp_path / "hf")
    words = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(70)}, "merges": []}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps({"model": words}))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    assert find_checkpoint(tmp_path / "run") is None
    import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    assert load_trained(tmp_path / "run").tokenizer.vocab_size == 70


def test_weights_too_large_for_fp16_are_refused(tmp_path):
    model = theirs("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = 1e5
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    with pytest.raises(ValueError, match=r"larger ones in model\.layers\.1\.mlp\.up_proj\.weight"):
        export_model(tmp_path / "run", tmp_path / "back", dtype=torch.float16)
    assert not (tmp_path / "back").exists()


def test_the_command_line(tmp_path, capsys):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    assert main(["convert", str(tmp_path / "hf"), run]) == 2
    assert "Expected a tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    # What no tokenizer would mend is said before.
    shutil.copytree(tmp_path / "hf", tmp_path / "bloom")
    about = json.loads((tmp_path / "bloom" / "config.json").read_text())
    (tmp_path / "bloom" / "config.json").write_text(json.dumps({**about, "model_type": "bloom"}))
    assert main(["convert", str(tmp_path / "bloom"), run]) == 2
    assert "got 'bloom'" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "null:76"]) == 0
    assert main(["convert", run, back, "--dtype", "bf16"]) == 0
    assert "no files of its tokenizer, null:76, are in it" in capsys.readouterr().out
    assert TensorFolder(tmp_path / "back")["transformer.wte.weight"].dtype == torch.bfloat16
    for source, *flag in (
        (run, "--tokenizer", "null:76"),
        (run, "--make-vocab-size-divisible-by", "8"),
        (str(tmp_path / "hf"), "--dtype", "bf16"),
    ):
        assert main(["convert", source, str(tmp_path / "other"), *flag]) == 2
        assert f"Expected no {flag[0]}: {source} is a" in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
    rows = ["--make-vocab-size-divisible-by", "0", "--tokenizer", "null:76"]
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "other"), *rows]) == 2
    assert f"Expected {rows[0]} of at least 1, got 0" in capsys.readouterr().err
    assert main(["convert", run, back]) == 2
    assert "Expected an empty or new folder" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "null:76"]) == 2
    assert "holds a run" in capsys.readouterr().err
    for source in (str(tmp_path / "hf"), run):
        assert main(["convert", source, str(tmp_path / "iter_0000099")]) == 2
        assert "the name of a checkpoint. Give another" in capsys.readouterr().err
        assert not (tmp_path / "iter_0000099").exists()
    assert main(["convert", str(tmp_path / "nothing"), back]) == 2
    assert "or a run folder with a checkpoint, got" in capsys.readouterr().err


def test_a_folder_that_fills_meanwhile_is_nobodys_to_replace(tmp_path, monkeypatch):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    back = tmp_path / "back"

    def write(folder, weights):
        write_tensors(folder, weights)
        back.mkdir()
        (back / "mine").touch()

    monkeypatch.setattr("mb_train.convert.hugging_face.write.write_tensors", write)
    with pytest.raises(ValueError, match="empty or new folder"):
        export_model(tmp_path / "run", back, say=lambda line: None)
    assert [path.name for path in back.iterdir()] == ["mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "back"}


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_sigterm_leaves_nothing_half_written(tmp_path, monkeypatch, way):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    source, also = tmp_path / "hf", ["--tokenizer", "null:76"]
    if way == "out":
        import_model(source, tmp_path / "run", tokenizer="null:76", say=lambda line: None)
        source, also = tmp_path / "run", []
    before = {path.name for path in tmp_path.iterdir()}
    found = []

    def finite(weights):
        found.extend(path for path in tmp_path.rglob("*") if path.is_file())
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)

    for module in ("new_run", "hugging_face.write"):
        monkeypatch.setattr(f"mb_train.convert.{module}.all_finite", finite)
    assert main(["convert", str(source), str(tmp_path / "new"), *also]) == 130
    assert any(path.relative_to(tmp_path).parts[0] not in before for path in found)
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_what_a_state_is_continued_with_is_theirs(tmp_path, kind):
    """From a cache, on both sides."""
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    prompt = torch.randint(0, 77, (9,), generator=torch.Generator().manual_seed(4)).tolist()
    want = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    how = {"vocab_size": 77, "context": 24, "ends": []}
    with torch.no_grad():
        steps = continue_tokens(ours(tmp_path), [prompt], Sampling(temperature=0), **how)
        found = [next(steps)[0].token for _ in range(12)]
    assert found == want[0, len(prompt) :].tolist()
    assert len(set(found)) > 3  # they say something


def test_a_norm_around_one_is_rounded_without_the_one(tmp_path):
    """To 16 bits: of 1.01 they would leave 0.0078."""
    model = theirs("qwen3_next").bfloat16()
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", dtype=torch.bfloat16, say=lambda line: None)
    first, second = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert all(torch.equal(first[name], second[name]) for name in first)
