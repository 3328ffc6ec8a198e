"""Hugging Face's BERT, MegatronBert and T5 in and out: equal outputs in fp32, all accounted for."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from mb_train.config import TrainConfig
from mb_train.convert import export_model, import_model, read_model
from mb_train.convert.from_bert import begin_from_bert
from mb_train.convert.hugging_face.architectures import architecture_for
from mb_train.convert.hugging_face.safetensors_files import TensorFolder
from mb_train.loading import load_trained
from mb_train.models.classifier import Classifier
from mb_train.models.segments import Segments
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.make import whole_model

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

BERT = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 80,
    "max_position_embeddings": 24,
}  # fmt: skip
T5 = {
    "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
}  # fmt: skip
KINDS = {
    "bert": ("Bert", "ForPreTraining", BERT),
    "megatron": ("MegatronBert", "ForPreTraining", BERT),
    "t5 1.0": ("T5", "ForConditionalGeneration", T5),
    "t5 1.1": ("T5", "ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "t5 1.1 in full": (
        "T5",
        "ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
    ),
    "t5 unscaled": ("T5", "ForConditionalGeneration", T5 | {"tie_word_embeddings": False}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


# What a run says that begins from a BERT of theirs.
FINETUNED = {
    "num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 80,
    "max_position_embeddings": 24, "seq_length": 24, "post_layernorm": True,
    "activation": "gelu", "layernorm_epsilon": 1e-12, "micro_batch_size": 2, "train_iters": 1,
    "lr": 1.0,
}  # fmt: skip


def theirs(kind, vocab_size=77):
    """A random model of theirs, no parameter of it zero or one."""
    torch.manual_seed(0)
    name, head, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=vocab_size)
    model = getattr(transformers, name + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def outputs_of_theirs(model, x, types, valid, y):
    if hasattr(model, "decoder"):
        return [model(x, attention_mask=valid, decoder_input_ids=y).logits]
    out = model(x, token_type_ids=types, attention_mask=valid)
    return [out.prediction_logits[valid.bool()], out.seq_relationship_logits]


@torch.no_grad()
def outputs_of_ours(model, x, types, valid, y):
    ends = torch.nn.functional.pad(valid.sum(1, keepdim=True), (0, 1), value=x.shape[1])
    if hasattr(model, "decoder"):
        read = Segments(ends, x.shape[1])
        memory, _ = model.encode(x, read, valid)
        own = Segments(torch.full_like(ends, y.shape[1]), y.shape[1])
        hidden, _ = model.decode(y, own, torch.ones_like(y), memory, read)
        return [model.logits(hidden)]
    hidden, _ = model.encode(x, types, ends, valid)
    places = torch.arange(x.shape[1]).expand_as(x)
    scores = model.logits(hidden, places)[valid.bool()]
    return [scores, model.order(hidden, torch.zeros(len(x), 1).long())[:, 0]]


def inputs(length):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randint(77, (3, length), generator=g), torch.randint(77, (3, 9), generator=g)
    valid = (torch.arange(length) < torch.tensor([[length], [7], [1]])).long()
    return x, torch.randint(2, (3, length), generator=g), valid, y


def ours(folder):
    config, weights = read_model(folder)
    model = whole_model(config, vocab_size=77).eval()
    model.load_state_dict(weights)
    return model


@kinds
def test_outputs_are_theirs(tmp_path, kind):
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    batch = inputs(150 if "t5" in kind else 19)  # farther apart than any bucket of one distance
    for got, want in zip(
        outputs_of_ours(ours(tmp_path), *batch), outputs_of_theirs(model, *batch), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("kind", ["bert", "t5 1.1"])
def test_there_and_back(tmp_path, kind):
    """Through a run folder, to tensors and settings that transformers reads as the same model."""
    vocabulary = tmp_path / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(70))]
    vocabulary.write_text("\n".join(words) + "\n")
    model = theirs(kind)
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run", tokenizer=str(vocabulary))
    export_model(tmp_path / "run", tmp_path / "back")
    back = type(model).from_pretrained(tmp_path / "back").eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    for got, want in zip(
        outputs_of_theirs(back, *inputs(19)), outputs_of_theirs(model, *inputs(19)), strict=True
    ):
        assert torch.equal(got, want)


def test_there_and_back_with_a_t5s_own_tokenizer(tmp_path):
    """Which has no token to begin with: the decoder begins with padding."""
    tokenizers = pytest.importorskip("tokenizers")
    model = theirs("t5 1.1")
    model.save_pretrained(tmp_path / "theirs")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁w{i}", -3.0) for i in range(64))]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2)),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(10)],
    ).save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "back")
    back = transformers.T5Config.from_pretrained(tmp_path / "back")
    said = (back.pad_token_id, back.eos_token_id, back.decoder_start_token_id)
    assert said == (0, 1, 0)


@pytest.mark.parametrize("cased", [True, False])
def test_a_list_of_words_is_a_tokenizer(tmp_path, cased):
    """As the first BERTs have it: beside it, or not, whether it is cased."""
    folder = tmp_path / "theirs"
    theirs("bert").save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Hello", "hello"]
    words += [f"w{i}" for i in range(68)]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    if cased:
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    import_model(folder, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "back")
    for run in ("run", "again"):
        tokenizer = load_trained(tmp_path / run, kinds=("bert",)).tokenizer
        assert tokenizer.encode("Hello") == [5 if cased else 6]
        if run == "run":
            import_model(tmp_path / "back", tmp_path / "again")


def test_a_retriever_begins_from_theirs(tmp_path):
    """Its vocabulary padded; another epsilon than the run's is refused."""
    model = theirs("bert")
    model.save_pretrained(tmp_path)
    config = TrainConfig(**FINETUNED, model="ict")
    ict = whole_model(config, vocab_size=128).eval()
    begin_from_bert(ict, str(tmp_path))
    x, _, valid, _ = inputs(19)
    with torch.no_grad():
        got, _ = ict.query(x, valid)
        want = model.bert(x, attention_mask=valid).last_hidden_state[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    other = whole_model(replace(config, layernorm_epsilon=1e-5), vocab_size=128)
    with pytest.raises(ValueError, match=r"norm_eps 1e-05 in .* \(--bert-load\), got .*1e-12"):
        begin_from_bert(other, str(tmp_path))


@pytest.mark.parametrize("pooler", [True, False], ids=["pooler", "no pooler"])
@pytest.mark.parametrize("kind", ["bert", "megatron"])
def test_a_classifier_begins_from_a_model_without_heads(tmp_path, kind, pooler):
    """A bare BertModel writes names without `bert.`; all of them are accounted for."""
    model = theirs(kind).bert
    if not pooler:
        model.pooler = None
    model.save_pretrained(tmp_path)
    config = TrainConfig(**FINETUNED | {"post_layernorm": kind == "bert"}, model="bert")
    classifier = Classifier(transformer_config(config, 128), classes=2).eval()
    fresh = classifier.bert.pooler.dense.weight.clone()
    begin_from_bert(classifier, str(tmp_path))
    x, types, valid, _ = inputs(19)
    ends = torch.nn.functional.pad(valid.sum(1, keepdim=True), (0, 1), value=x.shape[1])
    with torch.no_grad():
        want = model(x, token_type_ids=types, attention_mask=valid).last_hidden_state
        got, _ = classifier.bert.encode(x, types, ends, valid)
    torch.testing.assert_close(got[:, 0], want[:, 0], rtol=1e-4, atol=1e-5)
    kept = model.pooler.dense.weight if pooler else fresh
    torch.testing.assert_close(classifier.bert.pooler.dense.weight, kept, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"missing from the source: .*cls\.predictions\.bias"):
        read_model(tmp_path)  # to be a BERT it lacks its heads
    change_tensors(tmp_path, lambda state: state | {"extra.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"nothing uses: bert\.extra\.weight"):
        begin_from_bert(classifier, str(tmp_path))
    change_tensors(tmp_path, lambda state: {n: t for n, t in state.items() if "layer.1" not in n})
    with pytest.raises(ValueError, match=r"missing from the source: bert\.encoder\.layer\.1"):
        begin_from_bert(classifier, str(tmp_path))


@kinds
def test_a_tensor_too_many_or_too_few_is_refused(tmp_path, kind):
    model = theirs(kind)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for change, says in (({"extra.weight": torch.ones(1)}, "nothing uses"), ({}, "missing")):
        folder = tmp_path / says
        kept = dict(list(state.items())[:-1] if not change else state.items())
        if not change:
            kept = {
                n: t for n, t in state.items() if "layer_norm" not in n and "LayerNorm" not in n
            }
            kept = {n: t for n, t in kept.items() if ".ln." not in n}
        model.config.save_pretrained(folder)
        from safetensors.torch import save_file

        save_file({n: t.clone() for n, t in (kept | change).items()}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=says):
            read_model(folder)


def change_tensors(folder, change):
    from safetensors.torch import save_file

    save_file(change(dict(TensorFolder(folder))), folder / "model.safetensors", {"format": "pt"})


def test_old_names_and_copies(tmp_path):
    """As the first BERT is on the hub: norms' old names, and the embedding once more as a head.

    Its config.json names a class without the second head, whose tensors are there all the same.
    """
    model = theirs("bert")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words, head = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    change_tensors(tmp_path, lambda state: {
        re.sub("LayerNorm.(weight|bias)", lambda found: old[found[0]], name): tensor
        for name, tensor in (state | {head: state[words].clone()}).items()
    })  # fmt: skip
    batch = inputs(19)
    for got, want in zip(
        outputs_of_ours(ours(tmp_path), *batch), outputs_of_theirs(model, *batch), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    change_tensors(tmp_path, lambda state: state | {head: state[words] + 1})
    with pytest.raises(ValueError, match=rf"Expected {head} .* to be {words} once more"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("bert", "cls.predictions.decoder.weight"),
        ("t5 1.0", "decoder.embed_tokens.weight"),  # as safetensors' save_model
        ("t5 1.0", "lm_head.weight"),
    ],
)
def test_a_copy_may_be_all_that_there_is(tmp_path, kind, kept):
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    name = {"bert": "bert.embeddings.word_embeddings.weight"}.get(kind, "shared.weight")
    weight = TensorFolder(tmp_path)[name]
    others = {n: t for n, t in TensorFolder(tmp_path).items() if n != name}
    change_tensors(tmp_path, lambda _: others | {kept: weight})
    assert torch.equal(type(model).from_pretrained(tmp_path).get_input_embeddings().weight, weight)
    assert torch.equal(read_model(tmp_path)[1]["embedding.tokens.weight"], weight)


def test_a_head_of_its_own_in_a_file_that_says_tied(tmp_path):
    """As transformers writes T5 1.1."""
    theirs("t5 1.1").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    head = {"lm_head.weight": torch.randn(77, 48)}
    change_tensors(tmp_path, lambda state: state | head)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert torch.equal(model.lm_head.weight, head["lm_head.weight"])
    (got,), (want,) = (
        run(model, *inputs(19))
        for run, model in ((outputs_of_ours, ours(tmp_path)), (outputs_of_theirs, model))
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("bert", {"hidden_act": "relu"}), ("bert", {"is_decoder": True}),
     ("t5 1.0", {"relative_attention_num_buckets": 16})], ids=str,
)  # fmt: skip
def test_what_our_models_have_not_is_refused(tmp_path, kind, setting):
    theirs(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(ValueError, match=next(iter(setting))):
        read_model(tmp_path)


def test_a_model_that_theirs_cannot_say_is_refused(tmp_path):
    theirs("t5 1.0").save_pretrained(tmp_path)
    config, _ = read_model(tmp_path)
    assert architecture_for(config).model_type == "t5"
    with pytest.raises(ValueError, match="--position-embedding-type learned"):
        architecture_for(replace(config, position_embedding_type="learned"))
