"""Checkpoints of Megatron's fork, of any number of ranks, read without running their pickles."""

import argparse
import os
import pickle
import shutil
import sys
import types
import zipfile

import pytest
import torch
from hostile_pickle import Attack
from mb_train.config import TrainConfig
from mb_train.convert import import_megatron, is_megatron, read_megatron
from mb_train.convert.megatron import safe_pickle
from mb_train.loading import load_trained
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

LAYERS, HIDDEN, HEADS, VOCAB, EXPERTS = 4, 32, 4, 96, 4


def our_model(experts, glu=False):
    config = TrainConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=48,
        seq_length=16, micro_batch_size=1, train_iters=1, lr=1.0, moe_num_experts=experts, glu=glu,
        moe_output_bias=experts is not None, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(transformer_config(config, VOCAB)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def their_share(state, tensor, data, stage, *, tp, dp, pp, old):
    """What one rank of Megatron would hold of our weights."""

    def rows(t):
        return t.chunk(tp)[tensor].clone()

    def columns(t):
        return t.chunk(tp, dim=1)[tensor].clone()

    embedding = {
        "word_embeddings": {"weight": rows(state["embedding.tokens.weight"])},
        "position_embeddings": {"weight": state["embedding.positions.weight"]},
    }
    layers = {}
    for local in range(LAYERS // pp):
        ours = f"stack.blocks.{stage * LAYERS // pp + local}."
        attention = "attention" if old else "self_attention"
        cuts = {
            "norm_1": ("input_layernorm", None, None),
            "norm_2": ("post_attention_layernorm", None, None),
            "attention.qkv": (f"{attention}.query_key_value", rows, rows),
            "attention.out": (f"{attention}.dense", columns, None),
            "mlp.up": ("mlp.dense_h_to_4h", rows, rows),
            "mlp.down": ("mlp.dense_4h_to_h", columns, None),
        }
        for our, (their, weight, bias) in cuts.items():
            for kind, cut in (("weight", weight), ("bias", bias)):
                if f"{ours}{our}.{kind}" in state:
                    t = state[f"{ours}{our}.{kind}"]
                    layers[f"layers.{local}.{their}.{kind}"] = cut(t) if cut else t
        if f"{ours}mlp.router.weight" in state:
            moe = f"layers.{local}.mlp.moe."
            layers[f"{moe}router.layer.weight"] = state[f"{ours}mlp.router.weight"]
            layers[f"{moe}experts.bias"] = state[f"{ours}mlp.bias"]
            # Experts first: ranks beyond their number have a further part of the same ones.
            among = min(dp, EXPERTS)
            part, mine = divmod(data, among)
            w1 = state[f"{ours}mlp.experts.w1"].chunk(among)[mine]  # [E, F, D] as [E F, D]
            w2 = state[f"{ours}mlp.experts.w2"].chunk(among)[mine].transpose(1, 2)
            gated = w1.shape[1] > w2.shape[1]  # then w1 and v1, one above the other
            parts = {"w2": w2, **dict(zip(("w1", "v1"), w1.chunk(1 + gated, dim=1), strict=False))}
            for name, w in parts.items():
                layers[f"{moe}experts.mlp.{name}"] = (
                    w.chunk(dp // among, dim=1)[part].flatten(0, 1).clone()
                )
    model = {"language_model": {"transformer" if old else "encoder": layers}}
    if stage == 0:
        model["language_model"]["embedding"] = embedding
    if stage == pp - 1:
        layers |= {f"final_layernorm.{k}": state[f"stack.norm.{k}"] for k in ("weight", "bias")}
        if pp > 1:
            model["word_embeddings_for_head"] = embedding["word_embeddings"]
    return model


def write(folder, model, *, tp=1, dp=1, pp=1, old=False, distributed=False, **also):
    """A checkpoint as the fork's `save_checkpoint` leaves it."""
    moe = model.config.moe is not None
    args = argparse.Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=8,
        ffn_hidden_size=48, max_position_embeddings=16, layernorm_epsilon=1e-5,
        padded_vocab_size=VOCAB, attention_dropout=0.0, hidden_dropout=0.0, bias_gelu_fusion=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
        virtual_pipeline_model_parallel_size=None, moe_num_experts=EXPERTS if moe else None,
        moe_top_k=1, moe_capacity_factor=0, moe_loss_weight=0.1, moe_jitter_eps=None,
        moe_expert_model_parallelism=dp > 1, params_dtype=torch.float16, kind=_enum(),
        **also,
    )  # fmt: skip
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("50")
    state = model.state_dict()
    for t in range(tp):
        for d in range(dp):
            for p in range(pp):
                name = f"mp_rank_{t:02d}" + f"_{d:03d}" * (dp > 1) + f"_{p:03d}" * (pp > 1)
                path = folder / "iter_0000050" / name
                path.mkdir(parents=True)
                content = {
                    "args": args, "checkpoint_version": 3.0, "iteration": 50,
                    "model": their_share(state, t, d, p, tp=tp, dp=dp, pp=pp, old=old),
                    "rng_state": [{"random": (3, (1, 2), None), "torch": torch.get_rng_state()}],
                    "optimizer": {"exp": _enum()},
                }  # fmt: skip
                torch.save(content, path / f"model_{'' if distributed else 'optim_'}rng.pt")
    return folder


def _enum():
    """An object of a class that is gone when it is read."""
    if "megatron_enums_of_long_ago" in sys.modules:
        return sys.modules["megatron_enums_of_long_ago"].Kind()
    module = types.ModuleType("megatron_enums_of_long_ago")
    module.Kind = type("Kind", (), {"__module__": module.__name__, "__qualname__": "Kind"})
    sys.modules[module.__name__] = module
    return module.Kind()


@pytest.mark.parametrize(
    ("experts", "ranks"),
    [
        (None, {}),
        (None, {"tp": 2, "pp": 2}),
        (None, {"pp": 4, "old": True}),
        (EXPERTS, {}),
        (EXPERTS, {"dp": 2}),
        (EXPERTS, {"dp": 8, "tp": 2}),
        (EXPERTS, {"dp": 8, "glu": True}),
        (EXPERTS, {"dp": 2, "pp": 2, "tp": 2, "distributed": True}),
    ],
    ids=str,
)
def test_ranks_are_joined(tmp_path, experts, ranks):
    model = our_model(experts, glu=ranks.get("glu", False))
    folder = write(tmp_path / "checkpoints", model, **ranks)
    del sys.modules["megatron_enums_of_long_ago"]
    assert is_megatron(folder)
    assert is_megatron(folder / "iter_0000050")
    config, weights = read_megatron(folder)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert transformer_config(config, VOCAB) == model.config


LATER_ARGUMENTS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "kv_channels", "bias_gelu_fusion",
    "virtual_pipeline_model_parallel_size",
)  # fmt: skip


@pytest.mark.parametrize(("version", "tp"), [(None, 1), (0, 2), (1.0, 2), (2.0, 2)])
def test_rows_of_older_versions_become_todays(tmp_path, version, tp):
    model = our_model(None)
    folder = write(tmp_path / "checkpoints", model, tp=tp)

    def aged(_, content):
        args = content["args"]
        args.model_parallel_size = args.tensor_model_parallel_size
        for name in LATER_ARGUMENTS:
            delattr(args, name)
        del content["checkpoint_version"]
        content |= {} if version is None else {"checkpoint_version": version}
        layers = content["model"]["language_model"]["encoder"]
        for name in [name for name in layers if ".query_key_value." in name]:
            rows = layers[name].unflatten(0, (HEADS // tp, 3, 8))
            if version is None or version < 2:
                rows = rows.movedim(1, 2 if version else 0)  # 1: [np, hn, 3], 0: [3, np, hn]
            layers[name] = rows.flatten(0, 2).clone()

    change_each(folder, aged)
    config, weights = read_megatron(folder)
    assert transformer_config(config, VOCAB) == model.config
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())
    change_each(folder, lambda _, content: setattr(content["args"], "openai_gelu", False))
    assert read_megatron(folder)[0].activation == "gelu"
    change_each(folder, lambda _, content: content.update(checkpoint_version=1.5))
    with pytest.raises(ValueError, match=r"of checkpoint version 2 or later, got 1\.5"):
        read_megatron(folder)


def test_the_command_makes_a_run(tmp_path, capsys):
    from mb_train.cli import main

    model = our_model(EXPERTS)
    folder = write(tmp_path / "checkpoints", model, dp=2)
    words = ["convert", str(folder), str(tmp_path / "run")]
    assert main(words) == 2  # GPT-2's tokenizer is not that of a model with 96 rows
    assert "of at most 96 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    words += ["--tokenizer", "null:90"]
    assert main([*words, "--make-vocab-size-divisible-by", "8"]) == 2
    assert "is a Megatron checkpoint, on which it has no effect" in capsys.readouterr().err
    assert main(words) == 0
    tokens_BS = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        ours, theirs = (
            load_trained(tmp_path / "run").model.logits(tokens_BS),
            model.logits(tokens_BS),
        )
    torch.testing.assert_close(ours, theirs)


def test_a_tokenizer_that_is_not_there_is_asked_for(tmp_path):
    model = our_model(None)
    folder = write(tmp_path / "checkpoints", model, tokenizer_type="SentencePieceTokenizer")
    with pytest.raises(ValueError, match=r"Expected --tokenizer, .* a SentencePieceTokenizer"):
        read_megatron(folder)
    assert read_megatron(folder, tokenizer="null:90")[0].tokenizer == "null:90"
    # But not for what cannot be read.
    kind = {"tokenizer_type": "Llama2Tokenizer", "position_embedding_type": "alibi"}
    with pytest.raises(ValueError, match="with learned positions, got alibi"):
        read_megatron(write(tmp_path / "other", model, **kind))


def test_a_missing_rank_is_named(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(None), tp=2)
    shutil.copytree(folder / "iter_0000050" / "mp_rank_01", folder / "iter_0000050" / "mp_rank_old")
    assert read_megatron(folder)  # a copy that somebody keeps is not one of the ranks
    beyond = folder / "iter_0000050" / "mp_rank_9999999999"
    shutil.copytree(folder / "iter_0000050" / "mp_rank_01", beyond)
    with pytest.raises(ValueError, match=r"rank \(9999999999, 0, 0\) is there too"):
        read_megatron(folder)
    shutil.rmtree(beyond)
    (folder / "iter_0000050" / "mp_rank_01" / "model_optim_rng.pt").unlink()
    with pytest.raises(ValueError, match=r"rank \(1, 0, 0\) is missing"):
        read_megatron(folder)


@pytest.mark.parametrize("name", [None, b"", b"60", "²".encode(), b"\xff\xfe", b"."])
def test_a_latest_iteration_that_is_not_there(tmp_path, name):
    folder = write(tmp_path / "checkpoints", our_model(None))
    latest = folder / "latest_checkpointed_iteration.txt"
    latest.unlink() if name is None else latest.write_bytes(name)
    with pytest.raises(ValueError, match=r"to name a checkpoint, got .* mp_rank_\* are in"):
        read_megatron(folder)


def test_tensors_are_accounted_for(tmp_path):
    model = our_model(None)
    folder = write(tmp_path / "checkpoints", model)
    wings = {"layers.1.wings.weight": torch.ones(2)}
    change_first(folder, lambda c: c["model"]["language_model"]["encoder"].update(wings))
    with pytest.raises(ValueError, match=r"that nothing uses: layers\.1\.wings\.weight"):
        read_megatron(folder)


def change_first(folder, change):
    """Change the content of the first rank's file."""
    file = min(folder.glob("iter_0000050/mp_rank_*/model_optim_rng.pt"))
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("kv_channels", ..., "arguments in .* lack kv_channels"),
        ("hidden_size", 64, r"to be \[96, 64\], got \[96, 32\]"),
        ("padded_vocab_size", 3, r"to be \[3, 32\], got \[96, 32\]"),
        (
            "hidden_dropout",
            None,
            "arguments in .*: Expected --hidden-dropout to be float, got None",
        ),
        ("hidden_size", None, "arguments in .*: Expected a whole model.*missing --hidden-size"),
        ("virtual_pipeline_model_parallel_size", 2, "lacks 'model0'"),
        ("virtual_pipeline_model_parallel_size", 10**30, "lacks 'model0'"),
        ("tensor_model_parallel_size", 10**12, r"rank \(1, 0, 0\) is missing"),
        ("tensor_model_parallel_size", None, "Expected numbers of tensor, .* ranks"),
        ("pipeline_model_parallel_size", 0, "Expected numbers of tensor, .* ranks"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, name, value, says):
    folder = write(tmp_path / "checkpoints", our_model(None))
    arguments = {name: value} if value is not ... else {}
    change_first(folder, lambda c: (delattr(c["args"], name), c["args"].__dict__.update(arguments)))
    with pytest.raises(ValueError, match=says):
        read_megatron(folder)


def test_arguments_of_an_older_version_without_heads(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(None))
    wrong = {"num_attention_heads": 0, "model_parallel_size": 1}
    change_first(
        folder, lambda c: (delattr(c["args"], "kv_channels"), c["args"].__dict__.update(wrong))
    )
    with pytest.raises(ValueError, match="has a value that it should not have: integer division"):
        read_megatron(folder)


@pytest.mark.parametrize("container", ["encoder", "transformer"])
def test_two_tensors_of_one_name_are_one_too_many(tmp_path, container):
    folder = write(tmp_path / "checkpoints", our_model(None))
    (file,) = folder.glob("iter_0000050/*/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    more = content["model"]["language_model"].setdefault(container, {})
    more["layers.1.attention.dense.weight"] = torch.zeros(HIDDEN, HIDDEN)
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"one tensor layers\.1\.self_attention\.dense\.weight"):
        read_megatron(folder)


def test_tensor_ranks_have_the_same_tensors(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(None), tp=2)
    name = "layers.2.input_layernorm.bias"
    change_first(folder, lambda c: c["model"]["language_model"]["encoder"].pop(name))
    with pytest.raises(ValueError, match=f"ranks 0 and 1 .* but {name} is of one of them alone"):
        read_megatron(folder)


def change_each(folder, change):
    """Change the content of every rank's file, by the name of its folder."""
    for file in folder.glob("iter_0000050/*/model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        change(file.parent.name, content)
        torch.save(content, file)


def test_experts_with_a_capacity(tmp_path):
    """They are stored [E, D, F] and [E, F, D], and of more ranks than experts each has features."""
    model = our_model(EXPERTS)
    folder = write(tmp_path / "checkpoints", model, dp=8)

    def capped(_, content):
        content["args"].moe_capacity_factor = 2
        layers = content["model"]["language_model"]["encoder"]
        for name in [name for name in layers if name.endswith((".w1", ".w2"))]:
            w_EFD = layers[name].unflatten(0, (1, -1))
            layers[name] = w_EFD.transpose(1, 2).contiguous() if name.endswith("w1") else w_EFD

    change_each(folder, capped)
    config, weights = read_megatron(folder)
    assert config.moe_capacity_factor == 2
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_a_stage_of_the_embedding_alone(tmp_path):
    """--standalone-embedding-stage: the first rank has no layer, the others share them."""
    model = our_model(None)
    folder = write(tmp_path / "checkpoints", model, pp=2)
    change_each(folder, lambda _, c: setattr(c["args"], "pipeline_model_parallel_size", 3))
    first, second, third = (folder / "iter_0000050" / f"mp_rank_00_00{i}" for i in range(3))
    second.rename(third)
    shutil.copytree(first, second)

    def apart(name, content):
        parts = content["model"]["language_model"]
        if name == first.name:
            parts["encoder"] = {}
        elif name == second.name:
            del parts["embedding"]

    change_each(folder, apart)
    weights = read_megatron(folder)[1]
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def test_ranks_of_two_checkpoints_are_told_apart(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(None), tp=2)
    change_first(folder, lambda c: c.update(iteration=40))
    with pytest.raises(ValueError, match=r"by mp_rank_00 .*\(2, 1, 1, 40\), by mp_rank_01 .*50"):
        read_megatron(folder)
    other = write(tmp_path / "other", our_model(None), pp=2)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    change_first(folder, lambda c: c.update(iteration=50))
    with pytest.raises(ValueError, match=r"\(2, 1, 1, 50\), by mp_rank_00_000 \(1, 1, 2, 50\)"):
        read_megatron(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # Under sequence parallelism each has experts of its own: the first's are not the model.
        ("tp", "layers.2.mlp.moe.experts.mlp.w2"),
        # Experts of another model would join as well as those of this one.
        ("dp", "layers.1.self_attention.dense.weight"),
        ("dp", "layers.2.mlp.moe.router.layer.weight"),
    ],
)
def test_what_all_ranks_hold_is_one(tmp_path, kind, name):
    folder = write(tmp_path / "checkpoints", our_model(EXPERTS), **{kind: 2})

    def scaled(by):
        change_first(folder, lambda c: c["model"]["language_model"]["encoder"][name].mul_(by))

    scaled(1.01)
    assert read_megatron(folder)
    scaled(1.2)
    of = {"tp": "tensor", "dp": "data"}[kind]
    with pytest.raises(ValueError, match=f"{of} ranks 0 and 1 in .* the same {name}, got others"):
        read_megatron(folder)


def test_settings_that_megablocks_takes_from_the_arguments(tmp_path):
    also = {"moe_normalize_expert_weights": 2, "mlp_type": "glu"}
    folder = write(tmp_path / "glu", our_model(EXPERTS, glu=True), **also)
    change_first(folder, lambda c: setattr(c["args"], "moe_top_k", 2))
    config, _ = read_megatron(folder)
    assert (config.moe_renormalize, config.moe_renormalize_p) == (True, 2.0)
    change_first(folder, lambda c: setattr(c["args"], "moe_normalize_expert_weights", 3))
    with pytest.raises(ValueError, match="Expected --moe-renormalize-p to be"):
        read_megatron(folder)


def test_weights_that_are_no_numbers_are_named(tmp_path):
    model = our_model(None)
    model.get_parameter("stack.blocks.1.norm_2.bias").data[3] = float("nan")
    folder = write(tmp_path / "checkpoints", model)
    with pytest.raises(ValueError, match=r"numbers in stack\.blocks\.1\.norm_2\.bias, got NaN"):
        import_megatron(folder, tmp_path / "run", tokenizer="null:90")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("glu", True), ("moe_use_megatron_switch", True), ("squared_relu", True),
        ("apply_layernorm_1p", True), ("position_embedding_type", "rope"),
        ("use_rotary_position_embeddings", True), ("num_experts", 4),
        ("group_query_attention", True), ("uniform_expert_assignment", True),
    ],
)  # fmt: skip
def test_what_we_have_not_is_refused(tmp_path, name, value):
    folder = write(tmp_path / "checkpoints", our_model(None), **{name: value})
    with pytest.raises(ValueError, match="Expected a model with"):
        read_megatron(folder)


def test_a_pickle_runs_nothing(tmp_path):
    proof = tmp_path / "ran"
    path = tmp_path / "model_optim_rng.pt"
    for attack in (
        Attack(os.system, f"touch {proof}"),
        Attack(eval, f"open({str(proof)!r}, 'w')"),
        Attack(getattr, "text", "upper"),
        Attack(pickle.loads, pickle.dumps(Attack(os.mkdir, str(proof)))),
    ):
        torch.save({"args": attack, "x": torch.ones(3)}, path)
        content = safe_pickle.load(path)
        assert isinstance(content["args"], safe_pickle.Opaque)
        assert torch.equal(content["x"], torch.ones(3))
        assert not proof.exists()


@pytest.mark.parametrize(
    "named",
    [
        b"cargparse\nNamespace\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch.storage\nUntypedStorage\n",
    ],
)  # fmt: skip
def test_a_pickle_changes_nothing_that_others_use(tmp_path, named):
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"x": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    change = b"(N(S'changed'\nI1\ndt"  # state of slots, which is set by setattr
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            wrong = name.endswith("data.pkl")
            file.writestr(name, named + change + b"b." if wrong else content)
    with pytest.raises(ValueError, match="it changes a class or a function"):
        safe_pickle.load(path)
    assert not hasattr(argparse.Namespace, "changed")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "changed")
    assert not hasattr(torch.UntypedStorage, "changed")


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "spans", "no-pickle", "id", "bit"])
def test_other_files_are_refused(tmp_path, damage):
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"x": torch.ones(300)}, path)
    if damage == "no-pickle":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a/b", "c")
    elif damage == "id":  # a pickle that names a tensor None, at which torch has no words
        with zipfile.ZipFile(path) as file:
            parts = {name: file.read(name) for name in file.namelist()}
        with zipfile.ZipFile(path, "w") as file:
            for name, content in parts.items():
                file.writestr(name, b"\x80\x02NQ." if name.endswith("data.pkl") else content)
    else:
        content = path.read_bytes()
        disk = content.index(b"PK\x06\x07") + 4  # the number of the archive's last one
        spans = content[:disk] + b"\x01" + content[disk + 1 :]
        one = content.index(torch.ones(300).numpy().tobytes()) + 3  # the sign of the first
        bit = content[:one] + bytes([content[one] ^ 128]) + content[one + 1 :]
        damaged = {"text": b"hello", "empty": b"", "cut": content[:400], "spans": spans, "bit": bit}
        path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"Cannot read .*\.pt: \w"):
        safe_pickle.load(path)


def test_files_without_checksums_are_read(tmp_path):
    path = tmp_path / "model_optim_rng.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(safe_pickle.load(path)["x"], torch.ones(3))
