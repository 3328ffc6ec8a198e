"""Hugging Face models in and out: equal logits in fp32, every tensor accounted for."""

import json
import os
import sys

import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.convert import architectures, export_model, import_model, read_model
from mb_train.convert.safetensors_files import TensorFolder, write_tensors
from mb_train.loading import load_trained
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

ALL = ["gpt2", "mixtral", "olmoe", "qwen3_moe"]
SIZES = {
    "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 77, "max_position_embeddings": 24,
    "num_experts_per_tok": 2,
}  # fmt: skip


def theirs(kind, **also):
    """A random model of theirs."""
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=48, n_layer=2, n_head=6, n_positions=24, vocab_size=77, n_inner=80, **also
            )
        ).eval()
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, **also)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "olmoe":
        config = transformers.OlmoeConfig(**SIZES, num_experts=4, **also)
        model = transformers.OlmoeForCausalLM(config)
    else:
        also = {"norm_topk_prob": True, "head_dim": 16} | also
        config = transformers.Qwen3MoeConfig(
            **SIZES, num_experts=4, moe_intermediate_size=16, **also
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # norms that are not all one
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def logits_of(model):
    tokens_BS = torch.randint(0, 77, (3, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(tokens_BS).logits if hasattr(model, "lm_head") else model.logits(tokens_BS)
    return out


def ours(folder):
    config, weights = read_model(folder)
    model = GPT(transformer_config(config, 77)).eval()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("kind", ALL)
def test_logits_are_theirs(tmp_path, kind):
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("mixtral", {"tie_word_embeddings": True, "rope_theta": 500.0}),
        ("mixtral", {"head_dim": 12}),
        ("olmoe", {"norm_topk_prob": True, "rms_norm_eps": 1e-3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
    ids=str,
)
def test_their_options(tmp_path, kind, also):
    model = theirs(kind, **also)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # in several files
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
        ("mixtral", {}),
        ("olmoe", {}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_there_and_back_again(tmp_path, kind, also):
    model = theirs(kind, **also)
    model.save_pretrained(tmp_path / "hf")
    said = []
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="gpt2", say=said.append)
    torch.testing.assert_close(
        logits_of(load_trained(tmp_path / "run").model), logits_of(model), rtol=1e-4, atol=1e-5
    )
    export_model(tmp_path / "run", tmp_path / "back", say=said.append)
    first, second = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    assert type(back) is type(model)
    torch.testing.assert_close(logits_of(back), logits_of(model), rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "run"]


def test_every_tensor_is_used_once(tmp_path):
    theirs("olmoe").save_pretrained(tmp_path)
    weights = dict(TensorFolder(tmp_path))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    write_tensors(tmp_path, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(ValueError, match=f"missing from the source: {name}"):
        read_model(tmp_path)
    write_tensors(tmp_path, weights | {"model.layers.1.wings": torch.ones(2)})
    with pytest.raises(ValueError, match=r"that nothing uses: model\.layers\.1\.wings"):
        read_model(tmp_path)
    write_tensors(tmp_path, weights | {"model.norm.weight": torch.ones(47)})
    with pytest.raises(ValueError, match=r"Expected stack.norm.weight .* to be \[48\], got \[47\]"):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", ALL[1:])
def test_what_a_file_leaves_out_is_as_they_have_it(tmp_path, kind):
    said = ("rope_parameters", "num_key_value_heads", "moe_intermediate_size", "use_sliding_window")
    config = theirs(kind).config.to_dict()
    left = {name: value for name, value in config.items() if name not in said}
    expected = type(theirs(kind).config)(**left)
    found = architectures.architecture_of(left).fields(left)
    groups = found["num_query_groups"] if found["group_query_attention"] else 6
    assert groups == expected.num_key_value_heads
    assert found["rotary_base"] == expected.rope_parameters["rope_theta"]
    width = getattr(expected, "moe_intermediate_size", expected.intermediate_size)
    assert found["moe_ffn_hidden_size"] == width


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "to hold a JSON object"),
        ({"model_type": "gpt2", "n_embd": 8}, "lacks 'vocab_size'"),
        ({"model_type": "gpt2", "vocab_size": 9, "n_embd": 8}, "lacks 'n_layer'"),
        ("{", "Cannot read"),
    ],
    ids=str,
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
        ("gpt2", {"model_type": "llama"}, "of type gpt2, bert, .*, got 'llama'"),
        ("mixtral", {"sliding_window": 8}, "no sliding_window"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act of"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv of"),
        ("olmoe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type of"),
        ("olmoe", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "type of"),
        ("mixtral", {"head_dim": None, "num_attention_heads": "many"}, "another type"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers of"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step of"),
    ],
    ids=str,
)
def test_what_we_have_not_is_refused_by_name(tmp_path, kind, change, says):
    model = theirs(kind)
    config = json.loads(model.config.to_json_string(use_diff=False)) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path)


def test_masks_stored_as_weights_and_a_tied_head(tmp_path):
    """Files of GPT-2 as they are on the hub: no prefix, masks, sometimes the head."""
    model = theirs("gpt2")
    model.save_pretrained(tmp_path)
    weights = dict(TensorFolder(tmp_path, prefix="transformer."))
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24) for layer in (0, 1)}
    write_tensors(tmp_path, weights | masks | {"lm_head.weight": weights["wte.weight"].clone()})
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)
    write_tensors(tmp_path, weights | {"lm_head.weight": weights["wte.weight"] + 1})
    with pytest.raises(ValueError, match="differs from the embedding"):
        read_model(tmp_path)


def run_config(**fields):
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8}
    return TrainConfig(**sizes, micro_batch_size=1, train_iters=1, lr=1.0, **fields)


@pytest.mark.parametrize(
    ("fields", "lacks"),
    [
        ({"moe_num_experts": 4}, "position_embedding_type"),
        ({"squared_relu": True}, "activation_name"),
        ({"position_embedding_type": "rope"}, "normalization"),
    ],
    ids=str,
)
def test_what_they_have_not_is_said(fields, lacks):
    with pytest.raises(ValueError, match=f"no architecture for this model.*{lacks}"):
        architectures.architecture_for(run_config(**fields))


@pytest.mark.skipif(sys.platform == "win32", reason="there every file has the same mode")
def test_weights_are_as_readable_as_other_files(tmp_path):
    write_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, shard_bytes=8)
    (tmp_path / "beside").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_dense_run_is_a_gpt2():
    assert architectures.architecture_for(run_config()).model_type == "gpt2"


def test_the_command_line(tmp_path, capsys):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    assert main(["convert", str(tmp_path / "hf"), run]) == 2
    assert "Expected a tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "gpt2"]) == 0
    assert main(["convert", run, back, "--dtype", "bf16"]) == 0
    assert TensorFolder(tmp_path / "back")["transformer.wte.weight"].dtype == torch.bfloat16
    assert main(["convert", run, back]) == 2
    assert "Expected an empty or new folder" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "gpt2"]) == 2
    assert "holds a run" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nothing"), back]) == 2
    assert "Expected a Hugging Face folder" in capsys.readouterr().err
