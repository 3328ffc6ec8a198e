"""Hugging Face models in and out: equal logits in fp32, every tensor accounted for."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
from mb_data import load_tokenizer
from mb_data.tokenizer.readable_bpe import byte_to_letter
from mb_layers import dMoE
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.convert import architectures, export_model, import_model, read_model
from mb_train.convert.safetensors_files import TensorFolder, write_tensors
from mb_train.folder.lock import locked
from mb_train.inference.generate import Generator, Sampling
from mb_train.loading import load_trained
from mb_train.models.gpt import GPT
from mb_train.models.rotary import rotary_tables
from mb_train.tasks.architecture import transformer_config

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
safetensors = pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 77, "max_position_embeddings": 24,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# Class, and its settings beside those of SIZES, by model type.
ALL = {
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 24, "n_inner": 80}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", EXPERTS),
    "qwen2_moe": (
        "Qwen2Moe",
        {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16},
    ),
}


# Speeds for all three cases: 8192 tokens are many turns, a few, and less than one.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 2e5, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def theirs(kind, **also):
    """A random model of theirs, no norm or bias of it one or zero."""
    torch.manual_seed(0)
    name, settings = ALL[kind]
    sizes = {"vocab_size": 77} if kind == "gpt2" else SIZES
    config = getattr(transformers, f"{name}Config")(**sizes | settings | also)
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    model = getattr(transformers, name + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
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


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
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
        ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
        ("olmoe", {"norm_topk_prob": True, "rms_norm_eps": 1e-3}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
    ids=str,
)
def test_their_options(tmp_path, kind, also):
    model = theirs(kind, **also)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # in several files
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "linear", "factor": 4.0}], ids=str)
def test_far_positions_turn_as_theirs(tmp_path, rope):
    model = theirs("llama", rope_parameters={"rope_theta": 2e5, **rope}, head_dim=32)
    model.save_pretrained(tmp_path)
    positions_BS = torch.tensor([[0, 1, 77, 5000, 100_000]])
    want = model.model.rotary_emb(torch.ones(1), positions_BS)
    for got, table in zip(rotary_tables(ours(tmp_path).config, positions_BS), want, strict=True):
        torch.testing.assert_close(got[:, :, 0], table, rtol=0, atol=0.02)  # 1e5 in fp32: 0.008
        torch.testing.assert_close(got[:, :4, 0], table[:, :4], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
        *((kind, {}) for kind in ALL if kind not in ("gpt2", "mistral")),
        ("qwen2_moe", {"mlp_only_layers": [0]}),
        ("qwen3", {"rope_parameters": LLAMA3, "max_position_embeddings": 4096}),
        ("olmoe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 4.0}}),
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
    assert all(torch.equal(first[name], second[name]) for name in first)
    back = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    assert type(back) is type(model)
    torch.testing.assert_close(logits_of(back), logits_of(model), rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "run"]


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


def test_what_lies_beside_the_weights_is_kept(tmp_path, monkeypatch):
    """Templates, generation settings, special tokens; from pieces, and through a moved folder."""
    monkeypatch.chdir(tmp_path)
    hf = tmp_path / "hf"
    theirs("olmoe", pad_token_id=3, bos_token_id=None, eos_token_id=2).save_pretrained(
        hf, max_shard_size="20KB"
    )
    assert len(list(hf.glob("*.safetensors"))) > 2
    words = {chr(33 + i): i + 4 for i in range(70)} | {"<e>": 2, "<p>": 3}
    model = {"type": "BPE", "vocab": words, "merges": []}
    added = [{"id": words[w], "content": w, "special": True} for w in ("<e>", "<p>")]
    beside = {
        "tokenizer.json": json.dumps({"model": model, "added_tokens": added}),
        "tokenizer_config.json": json.dumps({"eos_token": "<e>", "pad_token": "<p>"}),
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": json.dumps({"temperature": 0.7, "eos_token_id": [2, 3]}),
    }
    for name, text in beside.items():
        (hf / name).write_text(text)
    import_model(hf, tmp_path / "run", say=lambda line: None)
    (tmp_path / "run").rename("moved")
    export_model(tmp_path / "moved", tmp_path / "back", say=lambda line: None)
    assert {name: (tmp_path / "back" / name).read_text() for name in beside} == beside
    before, after = (json.loads((d / "config.json").read_text()) for d in (hf, tmp_path / "back"))
    special = [f"{role}_token_id" for role in ("bos", "eos", "pad")]
    assert [before[name] for name in special] == [after[name] for name in special]


def test_texts_end_as_theirs(tmp_path):
    """A chat model's end of a turn is not the end of a document: it names both, and more."""
    theirs("llama").save_pretrained(tmp_path / "hf")
    words = {chr(33 + i): i + 4 for i in range(70)} | {"<e>": 2}
    model = {"type": "BPE", "vocab": words, "merges": []}
    added = [{"id": 2, "content": "<e>", "special": True}]
    (tmp_path / "hf" / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": added})
    )
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    about = tmp_path / "hf" / "generation_config.json"
    about.unlink()
    import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)

    def completed(run):
        generator = Generator(load_trained(tmp_path / run))
        steps = generator.stream(["Ab"], Sampling(temperature=0), max_new_tokens=6, likeliest=1)
        *_, (found,) = steps
        assert len(found.likelihoods) == len(found.tokens)
        return found

    endless = completed("run")
    assert (len(endless.tokens), endless.finish_reason) == (6, "length")
    end = endless.tokens[4]
    until = endless.tokens[: endless.tokens.index(end)]
    for name, ends in (("one", end), ("several", [3, end])):
        about.write_text(json.dumps({"eos_token_id": ends}))
        import_model(tmp_path / "hf", tmp_path / name, say=lambda line: None)
        found = completed(name)
        assert (found.tokens, found.finish_reason) == (until, "stop")
    kept = tmp_path / "several" / "tokenizer" / about.name
    for wrong, says in (
        ("[", "is damaged"),
        ("[1]", "is damaged"),
        ('{"eos_token_id": "<e>"}', "'<e>'"),
    ):
        kept.write_text(wrong)
        with pytest.raises(ValueError, match=says):
            completed("several")


LETTERS = {"<s>": 0, "</s>": 1, **{letter: 2 + i for i, letter in enumerate("\u2581abc")}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}  # fmt: skip


@pytest.mark.parametrize(
    "after",
    [None, TEMPLATE, {"type": "Sequence", "processors": [TEMPLATE]}],
    ids=["nothing", "template", "sequence"],
)
def test_texts_begin_as_theirs(tmp_path, after):
    """A Llama knows texts that begin with its token for that, and continues others badly."""
    theirs("llama").save_pretrained(tmp_path / "hf")
    spaces = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": i, "content": w, "special": True, **plain} for w, i in LETTERS.items() if i < 2
    ]
    files = {
        "tokenizer.json": {
            "model": {"type": "BPE", "vocab": LETTERS, "merges": []}, "added_tokens": special,
            "pre_tokenizer": spaces, "decoder": spaces, "post_processor": after,
        },
        "tokenizer_config.json": {
            "bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"
        },
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / "hf" / name).write_text(json.dumps(content))
    import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    named = str(tmp_path / "hf" / "tokenizer.json")
    import_model(tmp_path / "hf", tmp_path / "named", tokenizer=named, say=lambda line: None)
    begins = load_trained(tmp_path / "named").tokenizer.prepend_bos
    assert begins == load_trained(tmp_path / "run").tokenizer.prepend_bos == (after is not None)
    shutil.rmtree(tmp_path / "hf")
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    assert {name: json.loads((tmp_path / "back" / name).read_text()) for name in files} == files
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    generator = Generator(load_trained(tmp_path / "run"))
    for text in ("ab c", "a"):
        assert generator.tokens_of(text) == tokenizer(text)["input_ids"]
    assert generator.tokens_of("") == [0 if after else 1]


@pytest.mark.parametrize(
    ("kind", "also", "positions"),
    [
        ("mistral", {"sliding_window": 19}, 19),
        ("mistral", {"sliding_window": 24}, 24),
        ("mixtral", {"sliding_window": 19}, 19),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}, 19),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 5}, 24),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 19}, 19),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 19}, 19),
    ],
    ids=str,
)
def test_a_window_bounds_the_texts(tmp_path, kind, also, positions):
    """Of 19 tokens one of 19 leaves none out, and one of 18 does."""
    model, said = theirs(kind, **also), []
    model.save_pretrained(tmp_path / "hf")
    config, weights = read_model(tmp_path / "hf", say=said.append)
    assert config.positions == positions
    assert len(said) == (positions < 24)
    mine = GPT(transformer_config(config, 77)).eval()
    mine.load_state_dict(weights)
    torch.testing.assert_close(logits_of(mine), logits_of(model), rtol=1e-4, atol=1e-5)
    if positions == 19:
        narrow = theirs(kind, **also | {"sliding_window": 18})
        assert (logits_of(narrow)[:, :18] - logits_of(mine)[:, :18]).abs().max() < 1e-4
        assert (logits_of(narrow)[:, 18] - logits_of(mine)[:, 18]).abs().max() > 1e-4


MADE = ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("tokenizer", "kept"),
    [
        ("mine-vocab.json:mine-merges.txt", [*MADE, "merges.txt", "vocab.json"]),
        ("mine.json", ["tokenizer.json"]),
        ("mine-words.txt", [*MADE, "vocab.txt"]),
    ],
)
def test_tokenizer_files_have_the_names_that_theirs_know(tmp_path, tokenizer, kept):
    letters = byte_to_letter().values()
    words = {letter: i for i, letter in enumerate(letters)} | {"<|endoftext|>": 256}
    bpe = {"model": {"type": "BPE", "vocab": words, "merges": []}, "added_tokens": []}
    bpe["added_tokens"] = [{"id": 256, "content": "<|endoftext|>", "special": True}]
    (tmp_path / "mine-vocab.json").write_text(json.dumps(words))
    (tmp_path / "mine-merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "mine.json").write_text(json.dumps(bpe))
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "mine-words.txt").write_text("\n".join([*marks, "hello"]) + "\n")
    for other in ("tokenizer.json", "vocab.txt", "spiece.model"):  # another's
        (tmp_path / other).write_text("{}")
    model = theirs("gpt2")
    model.save_pretrained(tmp_path / "hf")
    files = os.pathsep.join(str(tmp_path / name) for name in tokenizer.split(":"))
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer=files, say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    here = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert here == sorted([*kept, "config.json", "model.safetensors"])
    if MADE[1] in kept:
        found, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "back"), "hello, Été"
        assert found.encode(text, add_special_tokens=False) == load_tokenizer(files).encode(text)


def test_a_vocabulary_inside_mb_data_is_written(tmp_path, capsys):
    for kind in ("gpt2", "llama"):
        theirs(kind, vocab_size=50257).save_pretrained(tmp_path / kind)
        words = ["convert", f"{tmp_path / kind}", f"{tmp_path / kind}-run", "--tokenizer", "gpt2"]
        assert main(words) == 0
        assert main(["convert", words[2], f"{tmp_path / kind}-back"]) == 0
        assert "no files" not in capsys.readouterr().out
        tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tmp_path / kind}-back")
        text = " Été 12\n\n  x<|endoftext|>"
        expected = [*load_tokenizer("gpt2").encode(text.removesuffix("<|endoftext|>")), 50256]
        assert dict(tokenizer(text)) == {
            "input_ids": expected, "attention_mask": [1] * len(expected),
        }  # fmt: skip


def test_a_full_disk_is_an_error_of_writing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"Cannot write .*model\.safetensors: No space left"):
        write_tensors(tmp_path, {"a": torch.ones(1)})


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_experts_of_a_layer_in_one_tensor(tmp_path, kind):
    model = theirs(kind)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in TensorFolder(tmp_path)
    torch.testing.assert_close(logits_of(ours(tmp_path)), logits_of(model), rtol=1e-4, atol=1e-5)


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
    tied = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(tied))
    write_tensors(tmp_path, {n: t for n, t in weights.items() if n != name})
    with pytest.raises(ValueError, match=f"missing from the source: {name}"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(config)
    write_tensors(tmp_path, weights | {"model.layers.1.wings": torch.ones(2)})
    with pytest.raises(ValueError, match=r"that nothing uses: model\.layers\.1\.wings"):
        read_model(tmp_path)
    write_tensors(tmp_path, weights | {"model.norm.weight": torch.ones(47)})
    with pytest.raises(ValueError, match=r"Expected stack.norm.weight .* to be \[48\], got \[47\]"):
        read_model(tmp_path)


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


DEEP = "[" * 10**5  # more than can be read


# Settings of theirs that say nothing about what a model computes when it is run.
SILENT = re.compile(
    r"_?[a-z_]*(dropout|pdrop|_token_id|name_or_path|label|labels|initializer_[a-z]+)|summary_.*|"
    r"architectures|chunk_size_feed_forward|dtype|id2label|label2id|model_type|output_[a-z_]+|"
    r"is_encoder_decoder|problem_type|return_dict|transformers_version|use_cache|vocab_size|router_[a-z_]+|"
    r"reorder_and_upcast_attn|pretraining_tp|is_decoder|max_window_layers|layer_types"
)


@pytest.mark.parametrize("kind", architectures.ARCHITECTURES)
def test_every_setting_is_read_and_has_their_default(kind):
    """A file may leave out any setting of a class; none that it has is passed over."""
    found = architectures.ARCHITECTURES[kind]
    full = transformers.CONFIG_MAPPING[kind]().to_dict()
    expected = found.read(full)
    asked = Asked(found.defaults | full)
    found.fields(asked)
    passed_over = {name for name in full.keys() - asked.names if not SILENT.fullmatch(name)}
    assert passed_over == set()
    sizes = set()
    for name in full:
        try:
            assert found.read({n: v for n, v in full.items() if n != name}) == expected, name
        except KeyError:
            sizes.add(name)
    says_size = re.compile(r"(d|n|num|max|hidden|intermediate)_[a-z_]+")
    assert all(says_size.fullmatch(name) for name in sizes)
    for alias, name in type(transformers.CONFIG_MAPPING[kind]()).attribute_map.items():
        renamed = {alias if n == name else n: value for n, value in full.items()}
        assert found.read(renamed) == expected, alias


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "to hold a JSON object"),
        ({"model_type": "gpt2", "n_embd": 8}, "lacks 'vocab_size'"),
        ({"model_type": "gpt2", "vocab_size": 9, "n_embd": 8}, "lacks 'n_layer'"),
        ({"model_type": "gpt2", "vocab_size": -1}, "a vocab_size above 0, got -1"),
        ("{", "Cannot read"),
        (DEEP, "Cannot read"),
    ],
    ids=lambda content: str(content)[:40],
)
def test_a_damaged_configuration_is_one_line(tmp_path, content, says):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path)


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
        with pytest.raises(ValueError, match="has a size that it should not have"):
            read_model(tmp_path)


@pytest.mark.parametrize("about", ["{", "[]", DEEP], ids=["cut", "list", "deep"])
def test_a_damaged_word_on_a_tokenizer_is_named(tmp_path, about):
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    (tmp_path / "tokenizer_config.json").write_text(about)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        import_model(tmp_path, tmp_path / "run", say=lambda line: None)


def test_noise_on_the_experts_too_is_said(tmp_path):
    said = []
    theirs("mixtral", router_jitter_noise=0.1).save_pretrained(tmp_path)
    config, _ = read_model(tmp_path, say=said.append)
    assert config.moe_jitter_eps == 0
    assert [line for line in said if "router_jitter_noise of 0.1 is left out" in line]


def test_another_dropout_of_embeddings_is_said(tmp_path):
    said = []
    for dropout in (0.2, 0.3):
        theirs("gpt2", embd_pdrop=dropout, resid_pdrop=0.2).save_pretrained(tmp_path)
        assert read_model(tmp_path, say=said.append)[0].hidden_dropout == 0.2
    (line,) = said
    assert line.startswith("its embd_pdrop of 0.3 is left out")


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


def test_weights_too_large_for_fp16_are_refused(tmp_path):
    model = theirs("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = 1e5
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    with pytest.raises(ValueError, match=r"larger ones in model\.layers\.1\.mlp\.up_proj\.weight"):
        export_model(tmp_path / "run", tmp_path / "back", dtype=torch.float16)
    assert not (tmp_path / "back").exists()


def test_no_tensor_is_read_twice(tmp_path):
    files = {"1.safetensors": {"a": torch.ones(1)}, "2.safetensors": {"a": torch.zeros(1)}}
    for name, tensors in files.items():
        write_tensors(tmp_path, tensors)
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"2\.safetensors holds a, which another file holds too"):
        TensorFolder(tmp_path)
    write_tensors(tmp_path, {"a": torch.full((1,), 2.0)})  # alone, as transformers reads it
    assert TensorFolder(tmp_path)["a"] == 2


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("gpt2", {"activation_function": "tanh"}, "activation_function of"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx of"),
        ("gpt2", {"model_type": "falcon"}, "of type gpt2, bert, .*, got 'falcon'"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act of"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv of"),
        ("olmoe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type of"),
        ("olmoe", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type of"),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor of"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "original_max_position_emb"),
        (
            "llama",
            {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
            "to be 8192, got 16",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor of"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ("mixtral", {"head_dim": None, "num_attention_heads": "many"}, "should not have"),
        ("mixtral", {"num_attention_heads": 0, "head_dim": None}, "should not have"),
        ("llama", {"rope_parameters": [1]}, "should not have"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers of"),
        ("llama", {"attention_bias": True}, "attention_bias of"),
        ("llama", {"is_causal": False}, "is_causal of"),  # a model that embeds texts
        ("gpt2", {"is_causal": False}, "is_causal of"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config of"),
        ("qwen2", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config of"),
        ("mistral", {"sliding_window": "wide"}, "should not have"),
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


def test_keys_and_values_of_other_widths_are_refused(tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    rows = {"k": 8, "v": 24}  # together as many as they should be
    wrong = {f"model.layers.1.self_attn.{p}_proj.weight": torch.ones(rows[p], 48) for p in rows}
    write_tensors(tmp_path, {**TensorFolder(tmp_path), **wrong})
    with pytest.raises(ValueError, match=r"tensors of other sizes than .*config\.json: "):
        read_model(tmp_path)


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


LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "add_bias_linear": False,
}  # fmt: skip
OLMOE = LLAMA | {"moe_num_experts": 4, "qk_layernorm": True, "qk_layernorm_over": "width"}
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
        ({**QWEN2_MOE, "moe_weights_on_input": True}, "--moe-weights-on-input True"),
        (
            {**QWEN2_MOE, "moe_shared_expert_weighted_sum": True},
            "--moe-shared-expert-weighted-sum True",
        ),
        (
            {**QWEN2_MOE, "moe_renormalize": True, "moe_renormalize_p": 2.0},
            "--moe-renormalize-p 2.0",
        ),
        ({**QWEN2_MOE, "moe_layer_freq": 2, "num_layers": 2}, "--moe-layer-freq 2"),
    ],
    ids=str,
)
def test_what_they_have_not_is_said(fields, lacks):
    with pytest.raises(ValueError, match=f"no architecture for this model.* {lacks}"):
        architectures.architecture_for(run_config(**fields))


@pytest.mark.skipif(sys.platform == "win32", reason="there every file has the same mode")
def test_weights_are_as_readable_as_other_files(tmp_path):
    write_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, shard_bytes=8)
    (tmp_path / "beside").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_run_is_the_architecture_that_says_all_of_it():
    def kind(**fields):
        return architectures.architecture_for(run_config(**fields)).model_type

    assert kind() == "gpt2"
    assert kind(**LLAMA) == "llama"
    assert kind(**LLAMA, hidden_size=30, num_attention_heads=4, kv_channels=8) == "mistral"
    assert kind(**LLAMA, add_qkv_bias=True) == "qwen2"
    assert kind(**LLAMA, qk_layernorm=True) == "qwen3"
    trained = {"moe_capacity_factor": 1.0, "moe_jitter_eps": 0.1, "moe_z_loss_weight": 0.1}
    assert kind(**QWEN2_MOE, **trained) == "qwen2_moe"


def test_the_command_line(tmp_path, capsys):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    assert main(["convert", str(tmp_path / "hf"), run]) == 2
    assert "Expected a tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
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
    assert main(["convert", str(tmp_path / "nothing"), back]) == 2
    assert "Expected a Hugging Face folder" in capsys.readouterr().err


def test_a_folder_that_fills_meanwhile_is_nobodys_to_replace(tmp_path, monkeypatch):
    theirs("gpt2").save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    back = tmp_path / "back"

    def write(folder, weights):
        write_tensors(folder, weights)
        back.mkdir()
        (back / "mine").touch()

    monkeypatch.setattr("mb_train.convert.hugging_face.write_tensors", write)
    with pytest.raises(ValueError, match="empty or new folder"):
        export_model(tmp_path / "run", back, say=lambda line: None)
    assert [path.name for path in back.iterdir()] == ["mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "back"}
