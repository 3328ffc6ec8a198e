"""GPT-OSS from its published form to a run and back: MXFP4, training, generation."""

import json

import mb_data
import numpy as np
import pytest
import torch
from mb_train.cli import main
from mb_train.convert import export_model, import_model, read_model
from mb_train.convert.hugging_face.mxfp4 import PACKED, unpacked
from mb_train.convert.hugging_face.safetensors_files import TensorFolder, write_tensors
from mb_train.loading import load_trained
from their_models import logits_of, ours, theirs, transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# What the published config.json has beside the class's own names.
PUBLISHED = {
    "experts_per_token": 2, "initial_context_length": 4096, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    },
    "router_aux_loss_coef": 0.9, "output_router_logits": False,
}  # fmt: skip


def packed(rows, columns, generator):
    """Random numbers of MXFP4 for 4 experts."""

    def draw(high, *shape):
        return torch.randint(high, shape, dtype=torch.uint8, generator=generator)

    return draw(256, 4, rows, columns // 32, 16), 120 + draw(6, 4, rows, columns // 32)


def published(folder):
    """A model with experts in MXFP4, and the same as transformers would hold it in fp32."""
    model, generator = theirs("gpt_oss"), torch.Generator().manual_seed(2)
    model.save_pretrained(folder)
    tensors = {n: t.bfloat16() for n, t in TensorFolder(folder).items()}
    (folder / "model.safetensors").unlink()
    with torch.no_grad():
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            _, columns, rows = tensors.pop(name).shape
            blocks, scales = packed(rows, columns, generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).copy_(exact)
        for name, parameter in model.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])
    write_tensors(folder, tensors, shard_bytes=40_000)
    about = json.loads((folder / "config.json").read_text())
    del about["rope_parameters"], about["layer_types"]
    (folder / "config.json").write_text(json.dumps(about | PUBLISHED))
    return model


def test_every_byte_is_unpacked_as_transformers_does():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16).repeat(2, 4, 4, 1)
    scales = torch.arange(1, 255, dtype=torch.uint8)[:, None].repeat(1, 2)
    scales = torch.cat([scales.flatten(), torch.full((4,), 127, dtype=torch.uint8)])
    scales = scales.view(2, 16, 16)
    found = unpacked(blocks, scales)
    for dtype in (torch.float32, torch.bfloat16):  # nothing is rounded
        exact = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(found, exact.mT.float())
    assert found.unique().numel() > 1000
    with pytest.raises(ValueError, match=r"blocks, 16\], got \[2, 16, 16\] and \[2, 16, 15, 16\]"):
        unpacked(blocks[:, :, :15], scales)
    with pytest.raises(ValueError, match=r"in uint8, got torch\.uint8 and torch\.int32"):
        unpacked(blocks, scales.int())


def test_published_files_are_read(tmp_path):
    model = published(tmp_path)
    converted = ours(tmp_path)
    torch.testing.assert_close(logits_of(converted), logits_of(model), rtol=1e-4, atol=1e-4)
    config, _ = read_model(tmp_path)
    assert (config.windows, config.moe_loss_weight, config.num_layers) == ((4, 2), 0.0, 3)
    assert config.rope_scaling == ("yarn", 32.0, 4096, 32.0, 1.0, 1.0, 0.0, False)


def test_every_tensor_of_theirs_is_used_once(tmp_path):
    published(tmp_path)
    tensors = dict(TensorFolder(tmp_path, packed=PACKED))
    for shard in tmp_path.glob("*.safetensors*"):
        shard.unlink()
    name = "model.layers.1.mlp.experts.down_proj"
    for left_out in (f"{name}_scales", f"{name}_bias", "model.layers.2.self_attn.sinks"):
        write_tensors(tmp_path, {n: t for n, t in tensors.items() if n != left_out})
        with pytest.raises(ValueError, match=f"missing from the source: {left_out}"):
            read_model(tmp_path)
    write_tensors(tmp_path, tensors | {name: torch.ones(2)})
    with pytest.raises(ValueError, match=f"that nothing uses: {name}"):
        read_model(tmp_path)
    bytes_ = torch.ones(64, dtype=torch.uint8)
    write_tensors(tmp_path, tensors | {"model.norm.weight": bytes_})
    with pytest.raises(ValueError, match=r"norm\.weight .* to be in fp32, .* got torch.uint8"):
        read_model(tmp_path)
    write_tensors(tmp_path, tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, :, None]})
    with pytest.raises(ValueError, match="Expected MXFP4 scales"):
        read_model(tmp_path)
    infinite = torch.full_like(tensors[f"{name}_scales"], 255)
    write_tensors(tmp_path, tensors | {f"{name}_scales": infinite})
    with pytest.raises(ValueError, match=r"numbers in stack\.blocks\.1\.mlp\.experts\.w2, got"):
        import_model(tmp_path, tmp_path / "run", tokenizer="null:76", say=lambda line: None)


def o200k(folder):
    """A tokenizer.json as the published one is made, with merges of a few bytes."""
    letters = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(256 - len(letters))]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")]
    vocab = {word: n for n, word in enumerate([*letters, *("".join(pair) for pair in merges)])}
    own = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>"]
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    begin, ends = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = f"{begin}{upper}*{lower}+{ends}|{begin}{upper}+{lower}*{ends}"
    rest = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pattern = {"Regex": f"{words}|{rest}"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [
            {"id": len(vocab) + n, "content": text, "special": True, **own}
            for n, text in enumerate(special)
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
                {**byte_level, "use_regex": False},
            ],
        },
        "post_processor": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocab, "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    about = {
        "bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return len(vocab) + len(special)


def test_it_is_trained_further_and_given_back(tmp_path, capsys):
    """By the commands: published files to a run, some steps, a text, and transformers' files."""
    model = published(tmp_path / "hf")
    tokens = o200k(tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    begun = load_trained(tmp_path / "run")
    assert begun.vocab_size == tokens > 77
    want = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "In the beginning, the Übermut's 12345 things…\n\n\tthe end "
    assert list(begun.tokenizer.encode(text)) == want.encode(text, add_special_tokens=False)
    assert begun.tokenizer.decode(want.encode(text, add_special_tokens=False)) == text
    torch.testing.assert_close(
        logits_of(begun.model)[..., :77], logits_of(model), rtol=1e-4, atol=1e-4
    )
    with mb_data.IndexedDatasetBuilder(tmp_path / "data", dtype=np.uint16) as builder:
        for _ in range(60):
            builder.add_document(np.array([*begun.tokenizer.encode(text), 262], dtype=np.uint16))
    words = """--finetune --seq-length 24 --micro-batch-size 4 --global-batch-size 4 --lr 1e-3
        --train-iters 4 --log-interval 2 --eval-iters 1 --eval-interval 4 --device cpu
        --reset-position-ids --reset-attention-mask --split 90,10,0"""
    paths = {"--load": "run", "--data-path": "data", "--save": "on"}
    words += "".join(f" {flag} {tmp_path / name}" for flag, name in paths.items())
    assert main(words.split()) == 0
    trained = load_trained(tmp_path / "on")
    sinks = [p for n, p in trained.model.named_parameters() if n.endswith("sinks")]
    before = [p for n, p in begun.model.named_parameters() if n.endswith("sinks")]
    assert all((a != b).all() for a, b in zip(sinks, before, strict=True))
    capsys.readouterr()
    said = ["--prompt", "In the", "--max-new-tokens", "12", "--temperature", "0", "--device", "cpu"]
    assert main(["generate", str(tmp_path / "on"), *said]) == 0
    written = capsys.readouterr().out
    assert main(["convert", str(tmp_path / "on"), str(tmp_path / "back")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    assert type(back) is type(model)
    torch.testing.assert_close(logits_of(back), logits_of(trained.model), rtol=1e-4, atol=1e-4)
    prompt = torch.tensor([want.encode("In the", add_special_tokens=False)])
    theirs_on = back.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=10**6)
    assert want.decode(theirs_on[0]) in written, (want.decode(theirs_on[0]), written)


def test_it_is_written_in_bf16(tmp_path):
    published(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", dtype=torch.bfloat16, say=lambda line: None)
    back = TensorFolder(tmp_path / "back")
    packed_ = TensorFolder(tmp_path / "hf", packed=PACKED)
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{name}"
        exact = convert_moe_packed_tensors(packed_[f"{name}_blocks"], packed_[f"{name}_scales"])
        assert torch.equal(back[name], exact)
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in about
    assert about["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
