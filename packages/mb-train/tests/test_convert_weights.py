"""Weights of Hugging Face's models in their files: every tensor used once, damage named."""

import json
import re
import sys

import pytest
import torch
from mb_train.convert import read_model
from mb_train.convert.hugging_face.safetensors_files import TensorFolder, write_tensors
from their_models import ALL, DEEP, logits_of, ours, theirs

# With experts, whose names do not say so.
OTHERS = (
    "mixtral", "deepseek_v2", "deepseek_v3", "dots1", "solar_open", "hy_v3", "minimax_m2",
)  # fmt: skip
safetensors = pytest.importorskip("safetensors")


def test_every_tensor_is_used_once(tmp_path):
    theirs("olmoe").save_pretrained(tmp_path)
    weights = dict(TensorFolder(tmp_path))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    write_tensors(tmp_path, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(ValueError, match=f"missing from the source: {name}"):
        read_model(tmp_path)
    write_tensors(tmp_path, {n: t for n, t in weights.items() if "experts" not in n})
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj\.weight and 18 more$"):
        read_model(tmp_path)
    name = "model.embed_tokens.weight"
    write_tensors(tmp_path, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(ValueError, match=f"missing from the source: {name}"):
        read_model(tmp_path)
    write_tensors(tmp_path, weights | {"model.layers.1.wings": torch.ones(2)})
    with pytest.raises(ValueError, match=r"that nothing uses: model\.layers\.1\.wings"):
        read_model(tmp_path)
    write_tensors(tmp_path, weights | {"model.norm.weight": torch.ones(47)})
    with pytest.raises(ValueError, match=r"Expected stack.norm.weight .* to be \[48\], got \[47\]"):
        read_model(tmp_path)


def test_no_tensor_is_read_twice(tmp_path):
    files = {"1.safetensors": {"a": torch.ones(1)}, "2.safetensors": {"a": torch.zeros(1)}}
    for name, tensors in files.items():
        write_tensors(tmp_path, tensors)
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"2\.safetensors holds a, which .*1\.safetensors holds"):
        TensorFolder(tmp_path)
    write_tensors(tmp_path, {"a": torch.full((1,), 2.0)})  # alone, as transformers reads it
    assert TensorFolder(tmp_path)["a"] == 2
    write_tensors(tmp_path, {"a": torch.ones(1), "base.a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"holds base\.a, which .*model\.safetensors holds as a"):
        TensorFolder(tmp_path, prefix="base.")


@pytest.mark.parametrize(
    "index",
    ["[]", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}', DEEP],
    ids=lambda index: index[:40],
)
def test_a_damaged_index_is_one_line(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index\.json (is damaged|points outside)"):
        TensorFolder(tmp_path)


def test_a_download_that_is_not_whole_is_one_line(tmp_path):
    index = json.dumps({"weight_map": {"a": "1.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"1\.safetensors, found none\. Is it downloaded"):
        TensorFolder(tmp_path)
    (tmp_path / "1.bin").touch()
    with pytest.raises(ValueError, match="Pickled weights"):
        TensorFolder(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "1.safetensors").write_text(pointer)
    with pytest.raises(ValueError, match="git lfs pull"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("size", ["num_hidden_layers", "num_local_experts"])
def test_more_layers_or_experts_than_tensors_are_refused_at_once(tmp_path, size):
    theirs("mixtral").save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, size: 10**12}))
    with pytest.raises(ValueError, match=r"and 1,000,000,000,000 layers or experts in"):
        read_model(tmp_path)
    for large in (10**12, 10**19):
        (tmp_path / "config.json").write_text(json.dumps({**about, "hidden_size": large}))
        with pytest.raises(ValueError, match=r"has a size that it should not have|fit 64 bits"):
            read_model(tmp_path)


def test_tensors_of_other_sizes_are_one_line(tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": 5, "num_key_value_heads": 5})
    )
    with pytest.raises(ValueError, match=r"tensors of other sizes than .*config\.json: "):
        read_model(tmp_path)


def test_an_adapter_beside_the_weights_is_not_left_out(tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"without an adapter, got adapter_config\.json in"):
        read_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_weights_that_are_no_plain_numbers_are_refused(tmp_path, dtype):
    theirs("llama").save_pretrained(tmp_path)
    name, tensors = "model.layers.0.self_attn.q_proj.weight", dict(TensorFolder(tmp_path))
    write_tensors(tmp_path, {**tensors, name: tensors[name].to(dtype)})
    with pytest.raises(ValueError, match=rf"q_proj\.weight in .* in fp32, .* got {dtype}"):
        read_model(tmp_path)


def test_to_ask_for_a_name_reads_no_tensor(tmp_path):
    write_tensors(tmp_path, {"norm": torch.ones(2)})
    tensors = TensorFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "norm" in tensors
    assert "head" not in tensors


def test_keys_and_values_of_other_widths_are_refused(tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    rows = {"k": 8, "v": 24}  # together as many as they should be
    wrong = {f"model.layers.1.self_attn.{p}_proj.weight": torch.ones(rows[p], 48) for p in rows}
    write_tensors(tmp_path, {**TensorFolder(tmp_path), **wrong})
    with pytest.raises(ValueError, match=r"tensors of other sizes than .*config\.json: "):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3_moe"])
def test_a_tied_weight_may_have_either_name(tmp_path, kind):
    """safetensors' save_model keeps the first by alphabet, which is the head's."""
    model = theirs(kind, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    names = set(TensorFolder(tmp_path))
    assert "lm_head.weight" in names
    assert not any(name.endswith(("embed_tokens.weight", "wte.weight")) for name in names)
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-5, atol=1e-5)


def test_masks_stored_as_weights_and_a_tied_head(tmp_path):
    """Files of GPT-2 as they are on the hub: no prefix, masks, sometimes the head."""
    model = theirs("gpt2")
    model.save_pretrained(tmp_path)
    weights = dict(TensorFolder(tmp_path, prefix="transformer."))
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24) for layer in (0, 1)}
    write_tensors(tmp_path, weights | masks | {"lm_head.weight": weights["wte.weight"].clone()})
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)
    head = {"lm_head.weight": weights["wte.weight"] + torch.randn(77, 48)}
    write_tensors(tmp_path, weights | head)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again.lm_head.weight, head["lm_head.weight"])
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(again), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_model_without_a_head_has_no_prefix(tmp_path, kind):
    model = theirs(kind, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert "norm.weight" in TensorFolder(tmp_path)
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)
    weights = dict(TensorFolder(tmp_path))
    write_tensors(tmp_path, weights | {"model.norm.weight": torch.zeros(48)})
    with pytest.raises(ValueError, match=r"holds (model\.)?norm\.weight, which is .* once more"):
        read_model(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in ALL if "moe" in kind or kind in OTHERS])
def test_experts_of_a_layer_in_one_tensor(tmp_path, kind):
    model = theirs(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    block = "(mlp|block_sparse_moe|feed_forward)"
    stacked = re.compile(rf"model\.layers\.1\.{block}\.experts\.gate_up_proj")
    assert any(map(stacked.fullmatch, TensorFolder(tmp_path)))
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


def test_layers_behind_the_last_are_left_out_with_a_word(tmp_path):
    """As many as config.json says, and no more of them; of a model whose modules are not ours."""
    model = theirs("hy_v3")
    model.save_pretrained(tmp_path)
    weights = dict(TensorFolder(tmp_path))
    behind = {
        f"model.layers.{layer}.{part}.weight": torch.ones(2)
        for layer in (3, 4)
        for part in ("eh_proj", "self_attn.q_proj")
    }
    write_tensors(tmp_path, weights | behind)
    with pytest.raises(ValueError, match=r"that nothing uses: model\.layers\.4\.eh_proj.weight"):
        read_model(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "num_nextn_predict_layers": 2}))
    said = []
    read_model(tmp_path, say=said.append)
    assert [line.split(",")[0] for line in said] == [f"model.layers.{n}: left out" for n in (3, 4)]
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "guessing"),
    [
        ("ernie4_5_moe", ("model.mtp_block.0.self_attn.q_proj", "model.mtp_linear_proj.0")),
        ("exaone_moe", ("mtp.layers.0.self_attn.q_proj", "mtp.fc")),
    ],
)
def test_what_guesses_without_a_layers_number_is_left_out_with_a_word(tmp_path, kind, guessing):
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    more = {f"{name}.weight": torch.ones(2) for name in guessing}
    write_tensors(tmp_path, {**TensorFolder(tmp_path), **more})
    said = []
    read_model(tmp_path, say=said.append)
    assert len(said) == 1
    assert "mtp" in said[0]
    assert "left out" in said[0]
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


def test_files_are_those_of_the_library(tmp_path):
    """Byte for byte, whatever the order in which tensors come."""
    dtypes = (
        torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.int16,
        torch.float64, torch.bool, torch.float16, torch.float8_e8m0fnu, torch.int32,
    )  # fmt: skip
    several = {
        f"{place} \N{GREEK SMALL LETTER ALPHA}.{n}": torch.arange(6).view(3, 2).mT[:n].to(dtype)
        for place, dtype in enumerate(dtypes)
        for n in (2, 0, 1)
    } | {"scalar": torch.tensor(3.5)}
    for tensors in (several, {"a": torch.ones(1)}, {}):
        write_tensors(tmp_path, tensors)
        rows = {name: tensor.contiguous() for name, tensor in tensors.items()}
        want = safetensors.torch.save(rows, metadata={"format": "pt"})
        assert (tmp_path / "model.safetensors").read_bytes() == want


@pytest.mark.skipif(sys.platform == "win32", reason="there every file has the same mode")
def test_weights_are_as_readable_as_other_files(tmp_path):
    write_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, shard_bytes=8)
    (tmp_path / "beside").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
