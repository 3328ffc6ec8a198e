"""Conversion holds a few tensors at a time, not the model: counted, in every direction."""

import json
import weakref
from collections import Counter

import pytest
import torch
from mb_layers.on_demand import OnDemand
from mb_train.cli import main
from mb_train.convert import export_model, import_megatron, import_model
from mb_train.convert.hugging_face.safetensors_files import TensorFolder
from mb_train.loading import load_trained
from megatron_core_models import ALIKE, ALIKE_ARGS, FURTHER, our_model
from their_models import logits_of, theirs
from torch_dist_files import write

LARGEST = 4 * 2 * 32 * 48 * 4  # bytes of w1 in fp32, of its four experts


class Live:
    """Bytes of tensors that were made on demand and are still held by somebody."""

    def __init__(self, monkeypatch):
        self.held, self.most, self.asked = {}, 0, Counter()
        get = OnDemand.__getitem__

        def counted(source, name):
            tensor = get(source, name)
            self.asked[type(source).__name__, name] += 1
            storage = tensor.untyped_storage()
            # A storage counts once, and for as long as any of its tensors is there.
            self.held[id(tensor)] = storage.data_ptr(), storage.nbytes()
            weakref.finalize(tensor, self.held.pop, id(tensor), None)
            self.most = max(self.most, sum(dict(self.held.values()).values()))
            return tensor

        monkeypatch.setattr(OnDemand, "__getitem__", counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_hugging_faces_models_few_tensors_are_held(tmp_path, monkeypatch, dtype):
    model = theirs("mixtral", num_hidden_layers=12).to(dtype)
    model.save_pretrained(tmp_path / "hf")
    live = Live(monkeypatch)
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    # The experts' own tensors, them together, and those in fp32.
    assert LARGEST <= live.most <= 3 * LARGEST
    assert {live.asked["TensorFolder", name] for name in TensorFolder(tmp_path / "hf")} == {1}
    live.most = 0
    export_model(tmp_path / "run", tmp_path / "back", dtype=dtype, say=lambda line: None)
    assert LARGEST <= live.most <= 2 * LARGEST
    first, second = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    trained = load_trained(tmp_path / "run").model
    assert sum(t.nbytes for t in trained.parameters()) > 15 * LARGEST
    if dtype == torch.float32:
        torch.testing.assert_close(logits_of(trained), logits_of(model), rtol=1e-4, atol=1e-5)


def test_of_megatrons_models_few_tensors_are_held(tmp_path, monkeypatch):
    model = our_model(**ALIKE, **FURTHER)
    folder = write(tmp_path / "checkpoints", model, tp=2, ep=2, **ALIKE_ARGS, **FURTHER)
    live = Live(monkeypatch)
    import_megatron(folder, tmp_path / "run", tokenizer="null:90", say=lambda line: None)
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    assert largest <= live.most <= 3 * largest
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) > 6 * largest
    trained = load_trained(tmp_path / "run", mtp_num_layers=None).model.state_dict()
    assert all(torch.equal(trained[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_what_fails_on_the_way_leaves_nothing(tmp_path, name):
    """With the first of the tensors and with the last, of a tokenizer that was copied before."""
    model = theirs("mixtral")
    model.get_parameter(name).data[3, 2] = float("inf")
    model.save_pretrained(tmp_path / "hf")
    ours = "embedding.tokens.weight" if name.startswith("model") else "head.weight"
    words = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(70)}, "merges": []}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps({"model": words}))
    with pytest.raises(ValueError, match=f"Expected numbers in {ours}, got NaN or infinity"):
        import_model(tmp_path / "hf", tmp_path / "run", say=lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_of_an_upcycled_model_few_tensors_are_held(tmp_path, monkeypatch):
    model = theirs("mistral", num_hidden_layers=12)
    model.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "dense", tokenizer="null:76", say=lambda line: None)
    live = Live(monkeypatch)
    experts = ["--moe-num-experts", "4"]
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "run"), *experts]) == 0
    trained = load_trained(tmp_path / "run").model
    largest = max(tensor.nbytes for tensor in trained.parameters())
    assert largest <= live.most <= 2 * largest
    assert sum(tensor.nbytes for tensor in trained.parameters()) > 15 * largest
    torch.testing.assert_close(logits_of(trained), logits_of(model), rtol=1e-4, atol=1e-5)
