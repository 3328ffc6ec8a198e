"""Modules for further tokens in Hugging Face's files: DeepSeek's, Qwen's and Nemotron's.

Transformers passes over them, so the reference is its own layer of the same kind, in the formula.
"""

import json
from typing import NamedTuple

import mb_train.checkpoint.weights as weights_of_checkpoints
import pytest
import torch
import torch.nn.functional as F
from mb_train.cli import main
from mb_train.convert import export_model, import_model, read_model
from mb_train.convert.hugging_face.safetensors_files import TensorFolder, write_tensors
from mb_train.loading import load_trained
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config
from safetensors import safe_open
from their_models import logits_of, theirs, transformers

KINDS = {"deepseek_v3": 1, "glm4_moe": 2, "glm4_moe_lite": 1}
D, V = 48, 77


def published(folder, kind, modules):
    """A folder as their makers publish it; the model without modules, and the layers of these.

    The layers are the last of a deeper model.
    """
    deep = theirs(kind, num_hidden_layers=3 + modules)
    model = theirs(kind, num_hidden_layers=3)
    trunk = model.state_dict()
    model.load_state_dict({n: t for n, t in deep.state_dict().items() if n in trunk})
    model.save_pretrained(folder)
    deep.save_pretrained(folder / "deep")
    layers = dict(TensorFolder(folder / "deep"))
    weights = dict(TensorFolder(folder))
    weights |= {n: t for n, t in layers.items() if n.startswith("model.layers.")}
    for number in range(3, 3 + modules):
        for name, shape in {
            "enorm": (D,), "hnorm": (D,), "shared_head.norm": (D,), "eh_proj": (D, 2 * D),
        }.items():  # fmt: skip
            weights[f"model.layers.{number}.{name}.weight"] = 1 + 0.3 * torch.randn(shape)
        for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            weights[f"model.layers.{number}.{copy}.weight"] = weights[f"{name}.weight"].clone()
    write_tensors(folder, weights)
    change_config(folder, num_nextn_predict_layers=modules)
    return model, deep, weights


def change_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


class Module(NamedTuple):
    """Of a module for a further token: weights of its norms and of its map, and its layers."""

    enorm: torch.Tensor
    hnorm: torch.Tensor
    eh_proj: torch.Tensor
    norm: torch.Tensor
    layers: list[torch.nn.Module]


def numbered(deep, weights, modules):
    """The modules that are layers 3 and on of a model, as DeepSeek's."""
    return [
        Module(
            *(
                weights[f"model.layers.{number}.{name}.weight"]
                for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            ),
            [deep.model.layers[number]],
        )
        for number in range(3, 3 + modules)
    ]


def their_losses(model, modules, text_BS, rotary=None):
    """Means of the cross entropy of the next token, and of those further on, by the formula."""
    tokens_BS, eps = text_BS[:, :-1], getattr(model.config, "rms_norm_eps", 1e-5)
    x_BSD = model.model(tokens_BS).last_hidden_state
    scores = [model.lm_head(x_BSD)]
    S = tokens_BS.shape[1]
    positions = torch.arange(S)[None]
    how = {"attention_mask": None, "position_ids": positions}

    def norm(x_BSD, weight_D):
        return F.rms_norm(x_BSD, (D,), weight_D, eps)

    for k, module in enumerate(modules, 1):
        further_BS = F.pad(text_BS[:, k:], (0, k - 1))[:, :S]
        e_BSD = norm(model.get_input_embeddings()(further_BS), module.enorm)
        z_BSD = torch.cat([e_BSD, norm(x_BSD, module.hnorm)], dim=2) @ module.eh_proj.T
        if rotary is not None:
            how["position_embeddings"] = rotary(z_BSD, positions)
        for layer in module.layers:
            z_BSD = layer(z_BSD, **how)
        x_BSD = norm(z_BSD, module.norm)
        scores.append(model.lm_head(x_BSD))
    return cross_entropies(scores, text_BS)


def cross_entropies(scores, text_BS):
    S = text_BS.shape[1] - 1
    return [
        F.cross_entropy(s[:, : S - k].flatten(0, 1), text_BS[:, k + 1 :].flatten())
        for k, s in enumerate(scores)
    ]


def our_losses(model, text_BS, modules):
    B, S = text_BS.shape[0], text_BS.shape[1] - 1
    batch = {"labels_BS": text_BS[:, 1:], "weights_BS": torch.full((B, S), 1 / (B * S))}
    for k in range(1, modules + 1):
        weights_BS = torch.full((B, S), 1 / (B * (S - k)))
        weights_BS[:, S - k :] = 0
        batch |= {
            f"labels_{k}_BS": F.pad(text_BS[:, k + 1 :], (0, k)),
            f"weights_{k}_BS": weights_BS,
        }
    return model(text_BS[:, :-1], **batch)


def read_in(folder, **how):
    config, weights = read_model(folder, say=lambda line: None, **how)
    model = GPT(transformer_config(config, V))
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_modules_compute_what_they_were_published_for(tmp_path, kind):
    """Losses, and gradients of what all of them share."""
    modules = KINDS[kind]
    model, deep, weights = published(tmp_path, kind, modules)
    text_BS = torch.randint(0, V, (3, 20), generator=torch.Generator().manual_seed(2))
    converted = read_in(tmp_path).train()
    assert len(converted.mtp) == modules
    got = our_losses(converted, text_BS, modules)
    further, rotary = numbered(deep.train(), weights, modules), deep.model.rotary_emb
    wanted = their_losses(model.train(), further, text_BS, rotary)
    torch.testing.assert_close(list(got.losses.values()), wanted, rtol=1e-4, atol=1e-5)
    total = sum(got.losses.values())
    grads = torch.autograd.grad(total, [converted.embedding.tokens.weight, converted.head.weight])
    scaled = wanted[0] + 0.1 * sum(wanted[1:]) / modules
    shared = [model.model.embed_tokens.weight, model.lm_head.weight]
    torch.testing.assert_close(
        list(grads), list(torch.autograd.grad(scaled, shared)), rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        logits_of(converted.eval()), logits_of(model.eval()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_there_and_back(tmp_path, kind):
    modules = KINDS[kind]
    model, _, weights = published(tmp_path / "hf", kind, modules)
    run, back, bare = (str(tmp_path / name) for name in ("run", "back", "bare"))
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "null:76"]) == 0
    assert main(["convert", run, back]) == 0
    written = TensorFolder(tmp_path / "back")
    assert set(written) == set(weights)
    for name in written:
        torch.testing.assert_close(written[name], weights[name], rtol=0, atol=0)
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert about["num_nextn_predict_layers"] == modules
    assert main(["convert", run, bare, "--mtp-num-layers", "0"]) == 0
    assert not any(name.startswith("model.layers.3.") for name in TensorFolder(tmp_path / "bare"))
    # What does not train does without.
    trained = load_trained(run)
    assert not trained.model.mtp
    torch.testing.assert_close(logits_of(trained.model), logits_of(model), rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_trained_further_they_are_theirs_again(tmp_path, kind):
    modules = KINDS[kind]
    published(tmp_path / "hf", kind, modules)
    run, more, back = (str(tmp_path / name) for name in ("run", "more", "back"))
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "null:76"]) == 0
    words = """--finetune --mock-data --seq-length 24 --micro-batch-size 4 --lr 1e-2 --train-iters 2
        --eval-iters 0 --lr-decay-style constant --device cpu"""
    assert main([*words.split(), "--load", run, "--save", more]) == 0
    assert main(["convert", more, back]) == 0
    before, weights = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert before.keys() == weights.keys()
    assert not any(torch.equal(before[name], weights[name]) for name in before)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).train()
    change_config(tmp_path / "back", num_hidden_layers=3 + modules, num_nextn_predict_layers=0)
    deep = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).train()
    text_BS = torch.randint(0, V, (3, 20), generator=torch.Generator().manual_seed(2))
    mine = load_trained(more, mtp_num_layers=None).model.train()
    got = list(our_losses(mine, text_BS, modules).losses.values())
    further = numbered(deep, weights, modules)
    want = their_losses(model, further, text_BS, deep.model.rotary_emb)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_modules_are_left_out_if_asked_for(tmp_path, capsys):
    published(tmp_path / "hf", "glm4_moe", 2)
    words = ["convert", str(tmp_path / "hf"), "--tokenizer", "null:76", "--mtp-num-layers"]
    for kept in (1, 0):
        run = tmp_path / f"run{kept}"
        assert main([*words, str(kept), str(run)]) == 0
        assert load_trained(run, mtp_num_layers=None).config.mtp_num_layers == kept
    said = capsys.readouterr().out
    assert said.count("model.layers.3: read as a module of --mtp-num-layers") == 1
    assert said.count("model.layers.4: left out, it guesses tokens beyond the next, it was") == 2
    assert main([*words, "3", str(tmp_path / "run3")]) == 2
    assert "--mtp-num-layers of 0 to 2" in capsys.readouterr().err
    assert (
        main(["convert", str(tmp_path / "run1"), str(tmp_path / "x"), "--mtp-num-layers", "2"]) == 2
    )
    assert "--mtp-num-layers of 0 to 1" in capsys.readouterr().err


def test_each_tensor_is_read_in_its_turn(tmp_path, monkeypatch):
    """Once, with its copies, which lie in the file behind it; what is left out never."""
    published(tmp_path / "hf", "glm4_moe", 2)
    run = tmp_path / "run"
    import_model(tmp_path / "hf", run, tokenizer="null:76", say=lambda line: None)
    read, fill = [], weights_of_checkpoints.fill

    def counted(path, tensors, *rest, **how):
        read.extend(tensors)
        fill(path, tensors, *rest, **how)

    monkeypatch.setattr(weights_of_checkpoints, "fill", counted)
    export_model(run, tmp_path / "back", mtp_num_layers=1, say=lambda line: None)
    kept = load_trained(run, mtp_num_layers=1).model.state_dict()
    assert sorted(read) == sorted(f"model.{name}" for name in kept)
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
        by_name = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(by_name[f"model.layers.3.{copy}.weight"], by_name[f"{name}.weight"])
    assert not any(name.startswith("model.layers.4.") for name in by_name)


def test_norms_that_no_file_with_modules_has_are_refused(tmp_path, capsys):
    line = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 "
        "--micro-batch-size 1 --train-iters 1 --eval-iters 0 --mock-data --tokenizer null:40 "
        "--device cpu --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm "
        "--qk-layernorm-over width --position-embedding-type rope --norm-placement output "
        "--untie-embeddings-and-output-weights --mtp-num-layers 1"
    )
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    assert main([*line.split(), "--save", run]) == 0
    capsys.readouterr()
    assert main(["convert", run, back]) == 2
    assert "nearest, Olmo2ForCausalLM, cannot say its --mtp-num-layers" in capsys.readouterr().err
    assert main(["convert", run, back, "--mtp-num-layers", "0"]) == 0
    assert read_model(tmp_path / "back")[0].mtp_num_layers == 0


def test_what_is_there_decides(tmp_path):
    """Of what config.json counts transformers writes none; half of it is no model."""
    _, _, weights = published(tmp_path, "glm4_moe", 2)
    write_tensors(
        tmp_path, {n: t for n, t in weights.items() if not n.startswith("model.layers.4")}
    )
    with pytest.raises(
        ValueError, match=r"Expected 2 modules .* got model\.layers\.3 alone.*--mtp-num"
    ):
        read_model(tmp_path)
    assert not read_in(tmp_path, mtp_num_layers=0).mtp
    trunk = {
        n: t for n, t in weights.items() if n[:15] not in ("model.layers.3.", "model.layers.4.")
    }
    write_tensors(tmp_path, trunk)
    assert not read_in(tmp_path).mtp
    with pytest.raises(ValueError, match=r"--mtp-num-layers of 0 to 0, .* got 1"):
        read_model(tmp_path, mtp_num_layers=1)
    write_tensors(
        tmp_path, {n: t for n, t in weights.items() if n != "model.layers.4.hnorm.weight"}
    )
    with pytest.raises(ValueError, match=r"missing .*model\.layers\.4\.hnorm\.weight"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_head_or_an_embedding_of_its_own(tmp_path, name):
    _, _, weights = published(tmp_path, "deepseek_v3", 1)
    weights[f"model.layers.3.{name}.weight"][5, 7] += 0.5
    write_tensors(tmp_path, weights)
    with pytest.raises(ValueError, match=rf"layers\.3\.{name}\.weight .* once more, got other"):
        read_model(tmp_path)
    assert not read_in(tmp_path, mtp_num_layers=0).mtp
    del weights[f"model.layers.3.{name}.weight"]  # as it may be, since it says nothing
    write_tensors(tmp_path, weights)
    assert len(read_in(tmp_path).mtp) == 1


# Of each kind: settings of the model, the layers of one module, and names of what is around them.
QWEN_PARTS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
              "norm": "norm"}  # fmt: skip
QWEN = ("layer_types", ["linear_attention", "full_attention"], ["full_attention"], QWEN_PARTS)
NEMOTRON = ("layers_block_type", ["mamba", "moe", "attention", "mlp"], ["attention", "moe"],
            {"enorm": "layers.0.enorm", "hnorm": "layers.0.hnorm", "eh_proj": "layers.0.eh_proj",
             "norm": "layers.1.final_layernorm"})  # fmt: skip
BESIDE = {"qwen3_next": QWEN, "qwen3_5_moe_text": QWEN, "nemotron_h": NEMOTRON}


def published_beside(folder, kind):
    """A folder with one module as `mtp.*`; the model without, a deeper one, the module's tensors.

    The module's layers are the deeper one's last.
    """
    types, of_model, of_module, parts = BESIDE[kind]
    count = kind != "nemotron_h"

    def of(layers):
        return theirs(
            kind, **{types: layers}, **({"num_hidden_layers": len(layers)} if count else {})
        )

    model, deep = of(of_model), of(of_model + of_module)
    trunk = model.state_dict()
    model.load_state_dict({n: t for n, t in deep.state_dict().items() if n in trunk})
    model.save_pretrained(folder)
    deep.save_pretrained(folder / "deep")
    module = {}
    for place in range(len(of_module)):
        behind = f"layers.{len(of_model) + place}."
        for name, tensor in TensorFolder(folder / "deep").items():
            if behind in name:
                module[f"mtp.layers.{place}.{name.partition(behind)[2]}"] = tensor
    for our, their in parts.items():
        shape = (D, 2 * D) if our == "eh_proj" else (D,)
        module[f"mtp.{their}.weight"] = 1 + 0.3 * torch.randn(shape)
    write_tensors(folder, {**TensorFolder(folder), **module})
    said = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    change_config(folder, **(said if kind == "nemotron_h" else {}))
    return model, deep, module


def beside(deep, module, kind):
    """The module that lies beside a model's layers, under names of its own."""
    _, of_model, of_module, parts = BESIDE[kind]
    around_one = kind != "nemotron_h"

    def weight(name):
        return module[f"mtp.{parts[name]}.weight"]

    enorm, hnorm, norm = (weight(name) + around_one for name in ("enorm", "hnorm", "norm"))
    layers = deep.model.layers[len(of_model) : len(of_model) + len(of_module)]
    return [Module(enorm, hnorm, weight("eh_proj"), norm, list(layers))]


@pytest.mark.parametrize("kind", BESIDE)
def test_modules_beside_the_model_compute_what_they_were_published_for(tmp_path, kind):
    model, deep, module = published_beside(tmp_path, kind)
    text_BS = torch.randint(0, V, (3, 20), generator=torch.Generator().manual_seed(2))
    said = []
    config, weights = read_model(tmp_path, say=said.append)
    assert any(line.startswith("mtp") and "read as a module of --mtp-num" in line for line in said)
    converted = GPT(transformer_config(config, V)).train()
    converted.load_state_dict(weights)
    got = our_losses(converted, text_BS, 1)
    further = beside(deep.train(), module, kind)
    rotary = None if kind == "nemotron_h" else deep.model.rotary_emb
    wanted = their_losses(model.train(), further, text_BS, rotary)
    torch.testing.assert_close(list(got.losses.values()), wanted, rtol=1e-4, atol=1e-5)
    without = read_in(tmp_path, mtp_num_layers=0)
    assert not without.mtp
    torch.testing.assert_close(
        logits_of(without.eval()), logits_of(model.eval()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
def test_modules_beside_the_model_there_and_back(tmp_path, kind):
    published_beside(tmp_path / "hf", kind)
    run, back, bare = (str(tmp_path / name) for name in ("run", "back", "bare"))
    assert main(["convert", str(tmp_path / "hf"), run, "--tokenizer", "null:76"]) == 0
    assert main(["convert", run, back]) == 0
    weights, written = TensorFolder(tmp_path / "hf"), TensorFolder(tmp_path / "back")
    assert set(written) == set(weights)
    for name in written:  # norms around one are read as the sum
        torch.testing.assert_close(written[name], weights[name], rtol=0, atol=3e-7)
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    assert about["num_nextn_predict_layers"] == 1
    transformers.AutoModelForCausalLM.from_pretrained(back)
    assert main(["convert", run, bare, "--mtp-num-layers", "0"]) == 0
    assert not any(name.startswith("mtp") for name in TensorFolder(tmp_path / "bare"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_next", {"num_nextn_predict_layers": 2}),  # which have one map in common
        ("nemotron_h", {"num_nextn_predict_layers": 0}),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    ],
    ids=str,
)
def test_modules_that_are_none_of_ours_are_left_out_with_a_word(tmp_path, kind, settings):
    _, _, module = published_beside(tmp_path, kind)
    change_config(tmp_path, **settings)
    if "layers_block_type" in settings:
        experts = theirs(kind, **settings)
        experts.save_pretrained(tmp_path / "dense")
        write_tensors(tmp_path, {**TensorFolder(tmp_path / "dense"), **module})
    said = []
    assert read_model(tmp_path, say=said.append)[0].mtp_num_layers == 0
    assert any("mtp." in line and "left out" in line for line in said)


def test_a_module_behind_a_layer_with_a_state_is_left_out(tmp_path):
    model = theirs("qwen3_next")
    model.save_pretrained(tmp_path)
    write_tensors(tmp_path, {**TensorFolder(tmp_path), "mtp.fc.weight": torch.ones(D, 2 * D)})
    said = []
    assert read_model(tmp_path, say=said.append)[0].mtp_num_layers == 0
    assert any("mtp.fc" in line and "left out" in line for line in said)


def test_a_module_with_an_embedding_of_its_own(tmp_path):
    model, _, _ = published_beside(tmp_path, "qwen3_5_moe_text")
    weights = dict(TensorFolder(tmp_path))
    mine = {"mtp.embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}
    write_tensors(tmp_path, weights | mine)
    assert len(read_in(tmp_path).mtp) == 1
    mine["mtp.embed_tokens.weight"][3, 5] += 1
    write_tensors(tmp_path, weights | mine)
    with pytest.raises(ValueError, match=r"mtp\.embed_tokens\.weight .* once more, got other"):
        read_model(tmp_path)
    assert not read_in(tmp_path, mtp_num_layers=0).mtp
