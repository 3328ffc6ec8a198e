"""config.json of Hugging Face's models: every setting read, or refused by name."""

import json
import math
import re

import pytest
from mb_train.config import TrainConfig
from mb_train.convert import read_model
from mb_train.convert.hugging_face import architectures
from their_models import DEEP, LLAMA3, LONG, YARN, theirs, transformers

ROUGH = {**YARN, "truncate": False}


class Asked(dict):
    """A configuration that remembers which of its settings were looked at."""

    def __init__(self, config):
        super().__init__(config)
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


# Settings of theirs that say nothing about what a model computes when it is run.
SILENT = re.compile(
    r"_?[a-z_]*(dropout|pdrop|_token_id|name_or_path|label|labels|initializer_[a-z]+)|summary_.*|"
    r"architectures|chunk_size_feed_forward|dtype|id2label|label2id|model_type|output_[a-z_]+|"
    r"is_encoder_decoder|problem_type|return_dict|transformers_version|use_cache|vocab_size|router_[a-z_]+|"
    r"reorder_and_upcast_attn|pretraining_tp|is_decoder|max_window_layers|layer_types|num_nextn_predict_layers|"
    r"enable_moe_fp32_combine|original_max_position_embeddings|(mamba_)?chunk_size|"
    r"input_jitter_noise|rotary_dim|"  # MiniMax-M3's class passes over it, M2's reads it
    r"expand|time_step_(min|max|floor)|use_mamba_kernels|mamba_ssm_cache_dtype|num_logits_to_keep|"
    r"rescale_prenorm_residual|n_shared_experts|moe_shared_expert_overlap|"
    # of what is left out
    r"index_(n_heads|head_dim|local_blocks|block_size|topk_blocks)|indexer_types|mtp_[a-z_]+"
)


# Sizes for which the class has none, or one of which an odd number of channels would turn.
BESIDE = {
    "glm4_moe": {"num_attention_heads": 64}, "glm4v_moe_text": {"num_attention_heads": 64},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128},
    "exaone4": {"sliding_window_pattern": 33}, "lfm2_moe": {"layer_types": ["conv"] * 32},
    "qwen3_omni_moe_text": {"num_attention_heads": 32},
}  # fmt: skip


@pytest.mark.parametrize("kind", architectures.ARCHITECTURES)
def test_every_setting_is_read_and_has_their_default(kind):
    """A file may leave out any setting of a class; none that it has is passed over."""
    found = architectures.ARCHITECTURES[kind]
    full = transformers.CONFIG_MAPPING[kind](**BESIDE.get(kind, {})).to_dict()
    expected = found.read(full)
    asked = Asked(found.settled(full))
    found.fields(asked)
    inside = (name for part in found.inside for name in full[part])
    names = {found.aliases.get(name, name) for name in (*full, *inside)}
    passed_over = names - {*found.inside} - asked.names
    passed_over = {name for name in passed_over if not SILENT.fullmatch(name)}
    assert passed_over == set()
    sizes = set()
    for name in full:
        try:
            assert found.read({n: v for n, v in full.items() if n != name}) == expected, name
        except KeyError:
            sizes.add(name)
    says_size = re.compile(r"(d|n|num|max|hidden|intermediate)_[a-z_]+|layer_types")
    assert all(says_size.fullmatch(name) for name in sizes)
    for alias, name in type(transformers.CONFIG_MAPPING[kind]()).attribute_map.items():
        renamed = {alias if n == name else n: value for n, value in full.items()}
        assert found.read(renamed) == expected, alias


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "expected an object, got list"),
        ({"model_type": "gpt2", "n_embd": 8}, "lacks 'vocab_size'"),
        ({"model_type": "gpt2", "vocab_size": 9, "n_embd": 8}, "lacks 'n_layer'"),
        ({"model_type": "gpt2", "vocab_size": -1}, "a vocab_size above 0, got -1"),
        ("{", "is damaged"),
        (DEEP, "is damaged"),
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_damaged_configuration_is_one_line(tmp_path, content, says):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("gpt2", {"activation_function": "tanh"}, "activation_function of"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx of"),
        ("gpt2", {"model_type": "falcon"}, "gpt2, bert, .*, kimi_k2, or .* qwen3_vl_moe, got 'fa"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act of"),
        ("mixtral", {"num_experts": 2}, "num_local_experts of .* got 2 and 4. Leave"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn of"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 3.0}}, "normalize_expert_wei"),
        ("dbrx", {"attn_config": {"rope_theta": 5e5}}, "to be alike, got 500000.0 and 300.0"),
        ("dbrx", {"attn_config": {"kv_n_heads": 3}}, "num_key_value_heads .* got 3 and 2"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings of"),
        ("dbrx", {"partial_rotary_factor": 0.5}, "partial_rotary_factor of"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok of"),
        ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise of"),
        ("phimoe", {"rope_parameters": {**YARN}}, "rope_type of"),
        ("llama", {"rope_parameters": {**LONG, "long_factor": [9.0]}}, "long_factor of"),
        (
            "llama",
            {"rope_parameters": {**LONG, "short_factor": [9.0], "long_factor": [9.0]}},
            "of the 4 pairs of a head's channels that turn, got 1",
        ),
        ("olmoe", {"rope_parameters": {"rope_type": "longrope"}}, "lacks 'short_factor'"),
        ("olmoe", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor of"),
        ("olmoe", {"rope_parameters": {**YARN, "truncate": None}}, "truncate of"),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 2}, "for each of 3 layers, got"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "got .'chunked_attention', "),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "GPT-OSS's in mxfp4"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act of"),
        ("gpt_oss", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("deepseek_v2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor of"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "got mxfp4"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.7}}, "mscale of"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 1}}, "mscale_all_dim of"),
        ("deepseek_v3", {"rope_parameters": LLAMA3}, "got --use-rope-scaling"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave of"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave of"),  # the same to their class
        ("deepseek_v3", {"attention_bias": True}, "attention_bias of"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim of"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads of"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method of"),
        ("glm4_moe", {"topk_group": 0}, "topk_group of"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1]}, "moe_topk of .* alike in all layers, got"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [9, 9]}, "moe_intermediate_size of"),
        ("minimax_m2", {"rope_parameters": {"partial_rotary_factor": 0.0}}, "turn, got 0"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method of"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func of"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob of"),
        ("olmoe", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type of"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ("llama", {"head_dim": 1}, "turn, got 1"),
        ("llama4_text", {"attention_bias": True}, "attention_bias of"),
        ("llama4_text", {"rope_parameters": {**YARN}}, "with use_qk_norm, which in its class"),
        (
            "llama4_text",
            {"rope_parameters": {**LONG, "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}},
            "with use_qk_norm, which in its class",
        ),
        ("llama4_text", {"no_rope_layers": [1, 1]}, "no_rope_layers of .* each of 4 layers"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "to be chunked_attention or"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor of"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor of"),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e6}}},
            "one rope for all layers of config.json, got one each for full_attention",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ("mixtral", {"head_dim": None, "num_attention_heads": "many"}, "should not have"),
        ("mixtral", {"num_attention_heads": 0, "head_dim": None}, "should not have"),
        ("llama", {"rope_parameters": [1]}, "should not have"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers of"),
        ("llama", {"attention_bias": True}, "attention_bias of"),
        ("llama", {"is_causal": False}, "is_causal of"),  # a model that embeds texts
        ("gpt2", {"is_causal": False}, "is_causal of"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size of"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "awq"}}, "got awq. .* in bf16"),
        ("qwen2", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config of"),
        ("mistral", {"sliding_window": "wide"}, "should not have"),
        ("glm4_moe", {"head_dim": math.inf}, "should not have: cannot convert float infinity"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step of"),
        ("glm4_moe", {"num_nextn_predict_layers": "many"}, "should not have"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "turn, got 3"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func of"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method of"),
        ("glm4_moe", {"moe_layer_freq": 2}, "moe_layer_freq of"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func of"),
        ("dots1", {"attention_bias": True}, "attention_bias of"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace of"),
        ("solar_open", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_fac"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm of"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types of"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "first of 3 layers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "wide"]}, "mlp_layer_types of"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace of"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave of"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias of"),
        ("hy_v3", {"route_norm": False}, "route_norm of"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list of"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func of"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm of"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size of"),
        ("minimax_m2", {"rotary_dim": 7, "rope_parameters": {}}, "turn, got 7"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "lacks 'short_factor'"),
        ("phi3", {"rope_parameters": LLAMA3}, "rope_type of"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor of"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias of"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias of"),
        ("ernie4_5", {"use_bias": True}, "use_bias of"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias of"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval of"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "moe_layer_end_index of"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min of"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "turn, got 3"),
        ("glm4", {"hidden_act": "gelu"}, "hidden_act of"),
        ("olmo2", {"attention_bias": True}, "attention_bias of"),
        ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}, "rope_type of"),
        ("olmo3", {"rope_parameters": YARN}, "for sliding_attention and for full_attention, got"),
        # Which their class passes over.
        ("olmo3", {"rope_parameters": {"full_attention": ROUGH}}, "truncate of"),
        ("olmo3", {"rope_scaling": ROUGH}, "truncate of"),
        ("olmo3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "type of .* 'default', got"),
        ("mellum", {"rope_parameters": {"full_attention": ROUGH}}, "truncate of"),
        ("flex_olmo", {"clip_qkv": 0.5}, "clip_qkv of"),
        (
            "exaone4",
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}},
            "one rope for all layers of config.json, got one each for full_attention",
        ),
        ("exaone4", {"attention_bias": True}, "attention_bias of"),
        (
            "exaone4",
            {"sliding_window": 5, "layer_types": None, "sliding_window_pattern": "LG"},
            "sliding_window of config.json, and layer_types with it, got 5 and None",
        ),
        ("exaone_moe", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types of"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func of"),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers of .* each of 4 layers"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers of .* each of 4 layers"),
        ("smollm3", {"no_rope_layers": 4}, "should not have"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias of"),
        ("smollm3", {"attention_bias": True}, "attention_bias of"),
        ("afmoe", {"attention_bias": True}, "attention_bias of"),
        ("afmoe", {"score_func": "softmax"}, "score_func of"),
        ("afmoe", {"route_norm": False}, "route_norm of"),
        ("afmoe", {"n_group": 2}, "n_group of"),
        ("afmoe", {"num_limited_groups": 2}, "num_limited_groups of"),
        ("granite", {"attention_bias": True}, "attention_bias of"),
        ("granite_swa", {"layer_rope_theta": [1e4, 1e3, 0, 1e4]}, "layer_rope_theta of"),
        ("flint", {"mlp_only_layers": [1]}, "mlp_only_layers of .* first layers, got .1."),
        ("granitemoe", {"hidden_act": "gelu"}, "hidden_act of"),
        ("granitemoehybrid", {"mamba_conv_bias": False}, "mamba_conv_bias of"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias of"),
        ("granitemoehybrid", {"time_step_limit": [1e-3, 0.1]}, "time_step_limit of .* no limit"),
        ("granitemoehybrid", {"layer_types": ["sliding_attention"] * 3}, "for each of 3 layers"),
        ("lfm2", {"conv_bias": True}, "conv_bias of"),
        ("lfm2_moe", {"layer_types": ["conv", "mamba", "conv"]}, "conv or full_attention for"),
        ("lfm2_moe", {"layer_types": None}, "lacks 'layer_types'"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act of"),
        ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type of .* 'conv'"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "-num-groups to divide .*, got 3 and 8"),
        ("afmoe", {"sliding_window": None}, "sliding_window of .* got None and"),
        ("afmoe", {"hidden_act": "gelu"}, "hidden_act of"),
    ],
    ids=str,
)
def test_what_we_have_not_is_refused_by_name(tmp_path, kind, change, says):
    model = theirs(kind)
    config = json.loads(model.config.to_json_string(use_diff=False)) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path)


LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False,
}  # fmt: skip
OLMOE = LLAMA | {"moe_num_experts": 4, "qk_layernorm": True, "qk_layernorm_over": "width"}
OLMO3 = LLAMA | {
    "norm_placement": "output", "qk_layernorm": True, "qk_layernorm_over": "width", "num_layers": 2,
    "window_size": 3, "window_attn_skip_freq": 2,
}  # fmt: skip
UNEVEN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "yarn_truncate": False}
LLAMA4 = LLAMA | {
    "moe_num_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 16, "moe_weights_on_input": True, "qk_l2_norm": True,
}  # fmt: skip
DBRX = LLAMA | {
    "moe_num_experts": 4, "clip_qkv": 3.0, "normalization": "LayerNorm-without-bias",
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
GLM4_MOE = LLAMA | {
    "moe_num_experts": 4, "moe_router_score_function": "sigmoid", "moe_renormalize": True,
    "moe_router_enable_expert_bias": True, "moe_ffn_hidden_size": 16,
}  # fmt: skip
AFMOE = GLM4_MOE | {
    "attention_output_gate": True, "norm_placement": "both", "qk_layernorm": True,
    "window_size": 3, "window_attn_skip_freq": 2, "no_rope_freq": 2, "num_layers": 4,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "moe_num_experts": 4, "moe_ffn_hidden_size": 16, "multi_latent_attention": True,
    "qk_layernorm": True, "qk_layernorm_epsilon": 1e-6,
}  # fmt: skip
GPT_OSS = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "swigluoai",
    "moe_num_experts": 4, "moe_ffn_hidden_size": 16, "moe_renormalize": True, "moe_top_k": 2,
    "moe_mlp_bias": True, "moe_router_bias": True, "softmax_type": "learnable",
}  # fmt: skip
QWEN2_MOE = LLAMA | {
    "moe_num_experts": 4,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}


def run_config(**fields):
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
    return TrainConfig(**sizes | fields, micro_batch_size=1, train_iters=1, lr=1.0)


@pytest.mark.parametrize(
    ("fields", "lacks"),
    [
        ({"moe_num_experts": 4}, "--position-embedding-type learned"),
        ({"squared_relu": True}, "--activation squared_relu"),
        ({"position_embedding_type": "rope"}, "--normalization LayerNorm"),
        ({**OLMOE, "kv_channels": 8}, "--kv-channels 8"),
        ({**DBRX, "moe_first_k_dense": 1, "num_layers": 2}, "DbrxFor.*its .*--moe-first-k-dense 1"),
        ({**DBRX, "untie_embeddings_and_output_weights": False}, "--untie-.* False"),
        ({**DBRX, "clip_qkv": None}, "DbrxForCausalLM, clips .*--clip-qkv., got none"),
        ({**LLAMA4, "moe_shared_expert_intermediate_size": 8}, "Llama4.*-intermediate-size 8"),
        ({**LLAMA4, "moe_renormalize": True}, "Llama4.*--moe-renormalize True"),
        ({**LLAMA, "head_bias": True}, "LlamaForCausalLM, cannot say its --head-bias True"),
        (
            {**LLAMA, "moe_num_experts": 4, "moe_router_type": "sparsemixer"},
            "PhimoeForCausalLM, cannot say its .*--moe-top-k 1",
        ),
        ({**LLAMA, "clip_qkv": 3.0}, "LlamaForCausalLM, cannot say its --clip-qkv 3.0"),
        ({**QWEN2_MOE, "moe_weights_on_input": True}, "--moe-weights-on-input True"),
        (
            {**QWEN2_MOE, "moe_shared_expert_weighted_sum": True},
            "--moe-shared-expert-weighted-sum True",
        ),
        (
            {**QWEN2_MOE, "moe_renormalize": True, "moe_renormalize_p": 2.0},
            "--moe-renormalize-p 2.0",
        ),
        (
            {**GLM4_MOE, "moe_router_score_function": "softmax", "qk_layernorm": True},
            "Ernie4_5_MoeForCausalLM, cannot say its --qk-layernorm True",
        ),
        (
            {**GLM4_MOE, "moe_router_enable_expert_bias": False},
            "--moe-router-enable-expert-bias False",
        ),
        (
            {**GLM4_MOE, "moe_shared_expert_intermediate_size": 24},
            "--moe-shared-expert-intermediate-size 24",
        ),
        (
            {**GLM4_MOE, **OLMOE, "moe_first_k_dense": 1, "num_layers": 2},
            "MiniMaxM2ForCausalLM, cannot say its .*--moe-first-k-dense 1",
        ),
        ({**DEEPSEEK, "qk_layernorm_epsilon": None}, "--qk-layernorm-epsilon 1e-05"),
        ({**DEEPSEEK, "qk_layernorm": False}, "--qk-layernorm False"),
        (
            {**DEEPSEEK, "moe_renormalize": True, "norm_placement": "both"},
            "Mistral4ForCausalLM, cannot say its --norm-placement both",
        ),
        ({**DEEPSEEK, "hidden_size": 30, "num_attention_heads": 4}, "--hidden-size to be a mult"),
        (
            {**DEEPSEEK, "rotary_scaling_factor": 4.0, "mscale": 0.5},
            "cannot say its --mscale 0.5",
        ),
        ({**LLAMA, "rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({**LLAMA, "softmax_type": "off-by-one"}, "--softmax-type off-by-one"),
        ({**LLAMA, "softmax_type": "learnable"}, "GptOssForCausalLM, has experts, got none"),
        (
            {**LLAMA, "window_size": 3, "window_attn_skip_freq": 2, "num_layers": 2},
            "MistralForCausalLM, cannot say its --window-attn-skip-freq 2",
        ),
        (
            {**LLAMA, "norm_placement": "kept"},
            "LlamaForCausalLM, cannot say its --norm-placement k",
        ),
        (
            {**OLMOE, "norm_placement": "output", "embedding_multiplier": 2.0},
            "FlexOlmoForCausalLM, cannot say its --embedding-multiplier 2.0.$",
        ),
        (OLMO3 | UNEVEN, "Olmo3ForCausalLM, cannot say its --yarn-truncate False"),
        (OLMO3 | UNEVEN | {"rotary_base_local": 50.0}, "Olmo3.* cannot say its --yarn-truncate Fa"),
        ({**OLMOE, "norm_placement": "output", "clip_qkv": 3.0}, "FlexOlmo.* its --clip-qkv 3.0.$"),
        (
            {**OLMOE, "qk_layernorm_over": "head", "softmax_type": "learnable"},
            "FlintForCausalLM, has an expert that all tokens visit .*, got none",
        ),
        ({**LLAMA, "norm_placement": "output"}, "Exaone4.*cannot say its --qk-layernorm False"),
        (
            {**LLAMA, "norm_placement": "output", "qk_layernorm": True, "num_layers": 2}
            | {"window_size": 3, "window_attn_skip_freq": 2},
            "Exaone4ForCausalLM, cannot say its --no-rope-freq None",
        ),
        (
            {**LLAMA, "no_rope_freq": 2, "num_layers": 2, "qk_layernorm": True},
            "ExaoneMoeForCausalLM, cannot say its --no-rope-freq 2",
        ),
        ({**LLAMA, "no_rope_freq": 1, "add_qkv_bias": True}, "SmolLM3.* its --add-qkv-bias True"),
        (
            {**OLMOE, "no_rope_freq": 1, "qk_layernorm_over": "head"},
            "ExaoneMoeForCausalLM, cannot say its .*--moe-router-score-function softmax",
        ),
        (
            {**AFMOE, "window_attn_skip_freq": 4},
            "AfmoeForCausalLM, cannot say its --no-rope-freq 2",
        ),
        ({**AFMOE, "no_rope_freq": None}, "AfmoeForCausalLM, cannot say its --no-rope-freq None"),
        (
            {**AFMOE, "window_size": None, "no_rope_freq": None},
            "AfmoeForCausalLM, cannot say its --no-rope-freq None",
        ),
        ({**AFMOE, "norm_placement": None}, "AfmoeFor.* cannot say its --norm-placement before"),
        ({**AFMOE, "add_qkv_bias": True}, "AfmoeForCausalLM, cannot say its --add-qkv-bias True"),
        ({**AFMOE, "moe_renormalize": False}, "Afmoe.* cannot say its --moe-renormalize False"),
        ({"attention_output_gate": True}, "AfmoeFor.* --position-embedding-type learned"),
        (
            {"model": "bert", "attention_output_gate": True},
            "cannot say its --attention-output-gate",
        ),
        (
            {**OLMOE, "norm_placement": "both"},
            "Glm4ForCausalLM, cannot say its .*--moe-num-experts",
        ),
        ({**GLM4_MOE, "norm_placement": "output"}, "FlexOlmoForCausalLM, cannot say its "),
        ({**DEEPSEEK, "norm_placement": "both"}, "DeepseekV2F.* its --norm-placement both"),
        ({**GLM4_MOE, "window_size": 3}, "Glm4MoeForCausalLM, cannot say its --window-size 3"),
        ({**GPT_OSS, "activation": "swiglu(alpha=1.702, offset=0.5)"}, "--activation swiglu"),
        ({**GPT_OSS, "softmax_type": "vanilla"}, "--moe-router-bias True, --moe-mlp-bias True"),
        ({**GPT_OSS, "moe_renormalize": False}, "--moe-renormalize False"),
        ({**GPT_OSS, "moe_first_k_dense": 1, "num_layers": 2}, "--moe-first-k-dense 1"),
        ({**QWEN2_MOE, "moe_layer_freq": 2, "num_layers": 2}, "--moe-layer-freq 2"),
        (
            {"model": "bert", "activation": "gelu", "moe_num_experts": 4},
            "its --moe-num-experts 4.$",
        ),
    ],
    ids=str,
)
def test_what_they_have_not_is_said(fields, lacks):
    with pytest.raises(ValueError, match=f"no architecture for this model.* {lacks}"):
        architectures.architecture_for(run_config(**fields))


def test_a_run_is_the_architecture_that_says_all_of_it():
    def kind(**fields):
        return architectures.architecture_for(run_config(**fields)).model_type

    assert kind() == "gpt2"
    assert kind(**LLAMA) == "llama"
    assert kind(**LLAMA, hidden_size=30, num_attention_heads=4, kv_channels=8) == "mistral"
    assert kind(**LLAMA, window_size=7) == "mistral"
    some = {"window_size": 7, "window_attn_skip_freq": 2, "num_layers": 2}
    for also in ({}, some, {"add_bias_linear": False}, {"window_size": 7}):
        assert kind(**GPT_OSS, untie_embeddings_and_output_weights=True, **also) == "gpt_oss"
    assert kind(**LLAMA, add_qkv_bias=True, **some) == "qwen2"
    assert kind(**LLAMA, add_qkv_bias=True) == "qwen2"
    assert kind(**LLAMA, qk_layernorm=True) == "qwen3"
    mixed = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "sparsemixer"}
    mixed |= {"position_embedding_type": "rope", "swiglu": True}
    assert kind(**mixed) == kind(**mixed, head_bias=True, add_bias_linear=False) == "phimoe"
    assert kind(**LLAMA4) == kind(**LLAMA4 | {"qk_l2_norm": False}) == "llama4_text"
    assert kind(**LLAMA4, num_layers=4, moe_layers=[0, 1, 1, 0], no_rope_freq=2) == "llama4_text"
    assert kind(**LLAMA, qk_l2_norm=True) == "llama4_text"
    assert kind(**DBRX) == kind(**DBRX, moe_renormalize=True, moe_renormalize_p=2.0) == "dbrx"
    trained = {"moe_capacity_factor": 1.0, "moe_jitter_eps": 0.1, "moe_z_loss_weight": 0.1}
    trained["moe_router_type"] = "sinkhorn"  # in training; its scores are the architecture's
    assert kind(**QWEN2_MOE, **trained) == "qwen2_moe"
    one = {"moe_shared_expert_intermediate_size": 16, "rotary_percent": 0.5, "moe_first_k_dense": 1}
    biased = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    assert kind(**DEEPSEEK) == "deepseek_v2"
    assert kind(**DEEPSEEK, **biased) == "deepseek_v3"
    assert kind(**DEEPSEEK, **biased, hidden_size=30, num_attention_heads=4) == "deepseek_v3"
    assert kind(**{**DEEPSEEK, "moe_num_experts": None}) == "deepseek_v3"
    softmax = {"moe_router_score_function": "softmax", "moe_first_k_dense": 1, "num_layers": 2}
    assert kind(**GLM4_MOE | softmax) == "ernie4_5_moe"
    assert kind(**GLM4_MOE | OLMOE, rotary_percent=0.5) == "minimax_m2"
    whole = {"window_attn_skip_freq": None, "no_rope_freq": None}
    assert kind(**AFMOE) == kind(**AFMOE | whole) == "afmoe"
    assert kind(**AFMOE | {"moe_num_experts": None}) == "afmoe"
    assert kind(**AFMOE | {"window_size": None, "no_rope_freq": 1}) == "afmoe"
    other = {"attention_output_gate": False, "norm_placement": None}
    assert kind(**AFMOE | other) == kind(**AFMOE | whole | other) == "exaone_moe"
    assert kind(**AFMOE | other | {"window_size": None, "no_rope_freq": 1}) == "exaone_moe"
    output = {"norm_placement": "output", "qk_layernorm": True}
    assert kind(**LLAMA, **some, **output, no_rope_freq=2) == "exaone4"
    assert kind(**LLAMA, no_rope_freq=2, num_layers=2) == "smollm3"
    assert kind(**LLAMA, **some, no_rope_freq=1) == "smollm3"
    assert kind(**LLAMA, no_rope_freq=2) == "llama"  # of one layer
    assert kind(**GLM4_MOE) == kind(**GLM4_MOE, **one, num_layers=2) == "glm4_moe"


def test_a_model_with_code_of_its_own_is_read_as_its_class():
    full = transformers.DeepseekV3Config().to_dict()
    found = architectures.architecture_of(full | {"model_type": "kimi_k2"})
    assert found is architectures.ARCHITECTURES["deepseek_v3"]


def test_noise_on_the_experts_too_is_said(tmp_path):
    said = []
    theirs("mixtral", router_jitter_noise=0.1).save_pretrained(tmp_path)
    config, _ = read_model(tmp_path, say=said.append)
    assert config.moe_jitter_eps == 0
    assert [line for line in said if "router_jitter_noise of 0.1 is left out" in line]
    theirs("phimoe", input_jitter_noise=0.2).save_pretrained(tmp_path)  # the other is no noise
    read_model(tmp_path, say=said.append)
    assert ["input_jitter_noise of 0.2 is left out" in line for line in said] == [False, True]


def test_a_dbrx_as_published_turns_by_the_base_among_its_attention(tmp_path):
    """transformers looks for it elsewhere."""
    model, said = theirs("dbrx"), []
    model.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    del about["rope_parameters"]
    about["ffn_config"] |= {"moe_jitter_eps": 0.01, "moe_loss_weight": 0.05}
    about["resid_pdrop"] = 0.2
    (tmp_path / "config.json").write_text(json.dumps(about))
    config, _ = read_model(tmp_path, say=said.append)
    assert (config.rotary_base, config.hidden_dropout) == (300.0, 0.2)
    assert config.moe_loss_weight == pytest.approx(3 * 0.05)
    assert [line for line in said if "router_jitter_noise of 0.01 is left out" in line]
    assert [line for line in said if "embd_pdrop of 0.0 is left out" in line]


def test_another_dropout_of_embeddings_is_said(tmp_path):
    said = []
    for dropout in (0.2, 0.3):
        theirs("gpt2", embd_pdrop=dropout, resid_pdrop=0.2).save_pretrained(tmp_path)
        assert read_model(tmp_path, say=said.append)[0].hidden_dropout == 0.2
    (line,) = said
    assert line.startswith("its embd_pdrop of 0.3 is left out")
