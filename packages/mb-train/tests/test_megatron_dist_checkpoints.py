"""Checkpoints of Megatron Core's format torch_dist, written by torch's saver as its ranks would."""

import importlib
import io
import itertools
import os
import pickle
import shutil
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_pickle import Attack
from mb_train.cli import main
from mb_train.convert import is_megatron, read_megatron
from mb_train.folder.run_folder import checkpoint_in
from mb_train.loading import load_trained
from megatron_core_models import (
    ALIKE,
    ALIKE_ARGS,
    BIASED,
    BIASED_ARGS,
    FURTHER,
    HIDDEN,
    HYBRID,
    LATENT,
    LLAMA,
    MIXTURE,
    MIXTURE_ARGS,
    OF_ONE,
    OF_ONE_ARGS,
    OURS,
    SIGMOID,
    STATES,
    VOCAB,
    check_read,
    our_model,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch_dist_files import OPTIMIZERS, write


@pytest.mark.parametrize(
    ("fields", "args", "how"),
    [
        ({}, {}, {"stacked": True, "tp": 2, "pp": 2}),
        ({}, {}, {"kind": "local"}),
        (LLAMA, LLAMA, {"stacked": True, "kind": "local", "tp": 2, "dtype": torch.bfloat16}),
        (LLAMA, LLAMA, {"apart": True, "stacked": True, "tp": 2, "pp": 4}),
        (LATENT, LATENT, {"stacked": True, "tp": 2, "pp": 2}),
        (
            LATENT | {"q_lora_rank": 16},
            LATENT | {"q_lora_rank": 16},
            {"kind": "local", "tp": 2, "core": "0.19"},
        ),
        (ALIKE, ALIKE_ARGS, {"stacked": True, "tp": 2, "pp": 2, "ep": 2, "core": "0.19"}),
        (ALIKE, ALIKE_ARGS, {"stacked": True, "ep": 4, "experts": "numbered", "kind": "local"}),
        (
            ALIKE | OURS,
            ALIKE_ARGS | SIGMOID,
            {"stacked": True, "tp": 2, "ep": 2, "experts": "two"},
        ),
        (LLAMA | MIXTURE, LLAMA | MIXTURE_ARGS, {"tp": 2, "ep": 2, "experts": "two"}),
        (
            LLAMA | MIXTURE | FURTHER | {"moe_loss_weight": 0.05},
            LLAMA | MIXTURE_ARGS | FURTHER,
            {"tp": 2, "ep": 2},
        ),
        (LLAMA | MIXTURE, LLAMA | MIXTURE_ARGS, {"tp": 2, "ep": 2, "experts": "numbered"}),
        (LLAMA | MIXTURE, LLAMA | MIXTURE_ARGS, {"apart": True, "tp": 2, "ep": 2, "pp": 2}),
        (LLAMA | STATES, LLAMA | STATES, {"tp": 2, "pp": 2, "dtype": torch.bfloat16}),
        (
            ALIKE | STATES | {"linear_attention_freq": None},
            ALIKE_ARGS | STATES | {"linear_attention_freq": None},
            {"stacked": True, "tp": 2, "pp": 2, "ep": 2},
        ),
        (
            HYBRID | MIXTURE | OF_ONE,
            HYBRID | MIXTURE_ARGS | OF_ONE_ARGS,
            {"tp": 2, "pp": 2, "ep": 2, "experts": "numbered"},
        ),
        (BIASED, BIASED_ARGS, {"tp": 2, "ep": 2, "pp": 4, "core": "0.19"}),
        (BIASED, BIASED_ARGS, {"apart": True, "experts": "numbered"}),
    ],
)  # fmt: skip
def test_what_ranks_wrote_is_read(tmp_path, fields, args, how):
    model = our_model(**fields)
    folder = write(tmp_path / "checkpoints", model, **args, **how)
    check_read(folder, model, how.get("dtype", torch.float32))


def test_shards_lie_in_several_files(tmp_path):
    write(tmp_path / "checkpoints", our_model(), tp=2, pp=2)
    files = {file.name for file in tmp_path.rglob("*.distcp")}
    assert files == {f"__{rank}_{thread}.distcp" for rank in range(4) for thread in range(2)}


def test_the_command_makes_a_run(tmp_path):
    model = our_model(**LLAMA, **MIXTURE)
    args = LLAMA | MIXTURE_ARGS | {"expert_tensor_parallel_size": 2}  # ranks are joined already
    folder = write(tmp_path / "checkpoints", model, ep=2, pp=2, experts="numbered", **args)
    words = [str(folder / "iter_0000050"), str(tmp_path / "run"), "--tokenizer", "null:90"]
    assert main(["convert", *words]) == 0
    tokens_BS = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        read = load_trained(tmp_path / "run").model.logits(tokens_BS)
        torch.testing.assert_close(read, model.logits(tokens_BS))


@pytest.mark.parametrize("core", ["0.18", "0.19"])
def test_load_says_what_it_is(tmp_path, core):
    folder = write(tmp_path / "checkpoints", our_model(), core=core)
    for path in (folder, folder / "iter_0000050"):
        with pytest.raises(ValueError, match="one of Megatron's: the convert command makes a run"):
            checkpoint_in(path)


def test_tensors_are_read_one_at_a_time(tmp_path, monkeypatch):
    """Of the one tensor that holds a weight of all layers, a shard is read once, and alone."""
    folder = write(
        tmp_path / "checkpoints", our_model(**ALIKE), stacked=True, tp=2, ep=2, **ALIKE_ARGS
    )
    loaded, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda f, **kw: loaded.append(load(f, **kw)) or loaded[-1])
    dict(read_megatron(folder)[1])
    shards = [tensor for tensor in loaded if isinstance(tensor, torch.Tensor)]
    metadata = pickle.loads((folder / "iter_0000050" / ".metadata").read_bytes())
    entries = metadata.state_dict_metadata.items()
    chunks = [
        chunk
        for name, entry in entries
        if hasattr(entry, "chunks") and not name.startswith(OPTIMIZERS)
        for chunk in entry.chunks
    ]
    assert len(shards) == len(chunks)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_torch_read_and_wrote_again(tmp_path, monkeypatch):
    """Its reader finds the same tensors, and of whole ones a shard holds all layers.

    So it is read once, not for every layer.
    """
    model = our_model(**ALIKE)
    folder = write(tmp_path / "checkpoints", model, stacked=True, tp=2, ep=2, **ALIKE_ARGS)
    path, again = folder / "iter_0000050", tmp_path / "again"
    entries = pickle.loads((path / ".metadata").read_bytes()).state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    dcp.save(tensors, checkpoint_id=again, no_dist=True)
    for name in ("metadata.json", "common.pt"):
        shutil.copyfile(path / name, again / name)
    loaded, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda f, **kw: loaded.append(load(f, **kw)) or loaded[-1])
    weights = dict(read_megatron(again)[1])
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    read = [tensor for tensor in loaded if isinstance(tensor, torch.Tensor)]
    assert len(read) == sum(not name.startswith(OPTIMIZERS) for name in tensors)


@pytest.mark.parametrize("digits", [100, 5000])
def test_a_name_that_is_too_long_names_nothing(tmp_path, digits):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7" * digits)
    assert not is_megatron(tmp_path)
    with pytest.raises(ValueError, match="to name a checkpoint"):
        read_megatron(tmp_path)


def change_metadata(folder, change):
    file = folder / "iter_0000050" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_tensors_are_accounted_for(tmp_path):
    wings = {"decoder.layers.1.wings": torch.ones(2)}
    folder = write(tmp_path / "one", our_model(), tp=2, more=wings)
    with pytest.raises(ValueError, match=r"nothing uses: layers\.1\.wings"):
        read_megatron(folder)
    folder = write(tmp_path / "two", our_model())
    missing = "decoder.layers.0.self_attention.linear_qkv.bias"
    change_metadata(folder, lambda m: m.state_dict_metadata.pop(missing))
    with pytest.raises(ValueError, match=r"missing.*: layers\.0\.self_attention\.linear_qkv\.bias"):
        read_megatron(folder)
    twice = {"module.decoder.final_layernorm.bias": torch.ones(HIDDEN)}
    folder = write(tmp_path / "three", our_model(), more=twice)
    with pytest.raises(ValueError, match=r"one tensor final_layernorm\.bias .*, got .* and "):
        read_megatron(folder)
    head = {"output_layer.weight": torch.ones(VOCAB, HIDDEN)}
    folder = write(tmp_path / "four", our_model(), more=head)  # of a model whose head is tied
    with pytest.raises(ValueError, match=r"nothing uses: output_layer\.weight"):
        read_megatron(folder)


def test_a_model_of_another_size(tmp_path):
    folder = write(tmp_path / "one", our_model(), stacked=True, num_layers=3)
    with pytest.raises(ValueError, match=r"of 3 layers, got \[4, "):
        read_megatron(folder)
    folder = write(tmp_path / "two", our_model(), hidden_size=2 * HIDDEN)
    with pytest.raises(ValueError, match=r"to be \[\d+, 64\], got \[\d+, 32\]"):
        read_megatron(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_weights_are_no_weights(tmp_path, dtype):
    norm = {"decoder.layers.9.x": torch.ones(HIDDEN).to(dtype)}
    folder = write(tmp_path / "checkpoints", our_model(), more=norm)
    with pytest.raises(ValueError, match=rf"layers\.9\.x to be in fp32, .* got {dtype}"):
        read_megatron(folder)


def test_a_gate_over_another_number_of_rows(tmp_path):
    more = {"decoder.layers.9.mlp.linear_fc1.weight": torch.ones(3, HIDDEN)}
    folder = write(tmp_path / "checkpoints", our_model(**LLAMA), more=more, **LLAMA)
    with pytest.raises(ValueError, match=r"a gate over as much in decoder\.layers\.9\..*\[3, 32\]"):
        read_megatron(folder)


def test_an_object_in_the_model_is_refused(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model())
    known, name = "rng_state/shard_0.0_1.1", "decoder.layers.0.wings/shard_0_4"

    def rename(metadata):
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(known)
        found = metadata.storage_data.pop(MetadataIndex(known))
        metadata.storage_data[MetadataIndex(name)] = found

    change_metadata(folder, rename)
    with pytest.raises(ValueError, match=r"got decoder\.layers\.0\.wings/shard_0_4, which is none"):
        read_megatron(folder)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("__1_0.distcp", None, r"Cannot read .*__1_0\.distcp"),
        ("__1_0.distcp", lambda b: b[:-50], r"bytes at .* in .*__1_0\.distcp.* to its end"),
        ("__1_0.distcp", lambda b: bytes(len(b)), r"__1_0\.distcp"),
        (".metadata", None, r"Cannot read .*\.metadata"),
        (".metadata", lambda b: b[: len(b) // 2], r"\.metadata is damaged"),
        (".metadata", lambda _: pickle.dumps({}), "is no checkpoint's metadata"),
        ("common.pt", None, r"Expected .*common\.pt, or common_state/shard_0_1 in \.metadata"),
        ("common.pt", lambda b: b[:-50], r"Cannot read .*common\.pt"),
        ("metadata.json", None, "torch_dcp and fsdp_dtensor"),
        ("metadata.json", lambda b: b.replace(b"torch_dist", b"zarr"), "got zarr, 1: run the"),
        ("metadata.json", lambda b: b"{", "torch_dcp and fsdp_dtensor"),
    ],
)
def test_damaged_and_missing_files_are_named(tmp_path, name, change, says):
    folder = write(tmp_path / "checkpoints", our_model(), tp=2)
    file = folder / "iter_0000050" / name
    content = file.read_bytes()
    file.unlink()
    if change is not None:
        file.write_bytes(change(content))
    for source in (folder, file.parent):
        assert is_megatron(source)
        with pytest.raises(ValueError, match=says):
            dict(read_megatron(source)[1])


def test_an_index_with_what_versions_of_megatron_and_torch_add(tmp_path, monkeypatch):
    """Plans and an index of Megatron's own classes, and properties where torch 2.2 had them."""
    older = importlib.import_module("torch.distributed._shard.sharded_tensor.metadata")
    theirs = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreSavePlan", SavePlan), ("MCoreMetadata", Metadata)):
        setattr(theirs, name, type(name, (base,), {"__module__": theirs.__name__}))
    model = our_model()
    folder = write(tmp_path / "checkpoints", model, stacked=True, tp=2)
    file = folder / "iter_0000050" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = older.TensorProperties(dtype=entry.properties.dtype)
    kept = getattr(metadata, "all_local_plans", [SavePlan([])])  # torch 2.11 keeps none
    plans = [theirs.MCoreSavePlan(plan.items) for plan in kept]
    written = theirs.MCoreMetadata(metadata.state_dict_metadata)
    written.storage_data, written.all_local_plans = metadata.storage_data, plans
    written.mcore_data = {"x": {"nd_reformulated_orig_global_shape": (4, 4)}}
    with monkeypatch.context() as there:
        parents = itertools.accumulate(theirs.__name__.split("."), "{}.{}".format)
        for name in parents:
            there.setitem(sys.modules, name, theirs)
        file.write_bytes(pickle.dumps(written))
    _, weights = read_megatron(folder)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 10**9}, "of common_state/shard_0_1; it has"),
        ({"offset": 9}, "Cannot read common_state/shard_0_1 in"),
        ({"relative_path": "__7_0.distcp"}, r"Cannot read .*__7_0\.distcp"),
    ],
)
def test_arguments_among_the_tensors_that_are_not_where_they_should(tmp_path, change, says):
    folder = write(tmp_path / "checkpoints", our_model(), core="0.19")
    index = MetadataIndex("common_state/shard_0_1")
    change_metadata(folder, lambda m: vars(m.storage_data[index]).update(change))
    with pytest.raises(ValueError, match=says):
        read_megatron(folder)


def of_first_chunk(metadata):
    entry = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    index = MetadataIndex("decoder.final_layernorm.weight", entry.chunks[0].offsets)
    return entry, metadata.storage_data[index], index


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entry, info: setattr(info, "offset", 10**12), "bytes at 1,000,000,000,000"),
        (lambda entry, info: setattr(info, "offset", -1), "bytes at -1"),
        (lambda entry, info: setattr(info, "length", 8), "Expected 8 bytes"),
        (lambda entry, info: setattr(info, "relative_path", "../x.distcp"), "outside its folder"),
        (lambda entry, info: setattr(info, "relative_path", 3), "is damaged"),
        (lambda entry, info: setattr(info, "transform_descriptors", ["zstd"]), "went through"),
        (lambda entry, info: entry.chunks.clear(), "got 0 in 0 shards"),
        (lambda entry, info: entry.chunks.append(entry.chunks[0]), "got 64 in 2 shards"),
        (lambda entry, info: setattr(entry, "size", torch.Size([40])), "got 32 in 1 shards"),
        (lambda entry, info: setattr(entry, "size", torch.Size([30])), r"within \[30\]"),
        (lambda entry, info: setattr(entry, "size", torch.Size([32, 1])), r"within \[32, 1\]"),
        (lambda entry, info: setattr(entry, "size", "x"), "is damaged"),
        (lambda entry, info: setattr(entry, "chunks", None), "is damaged"),
        (lambda entry, info: setattr(entry.properties, "dtype", torch.float16), "of torch.float16"),
        (lambda entry, info: setattr(entry.properties, "dtype", "fp32"), "got fp32"),
    ],
)  # fmt: skip
def test_an_index_that_is_wrong(tmp_path, change, says):
    folder = write(tmp_path / "checkpoints", our_model())
    change_metadata(folder, lambda m: change(*of_first_chunk(m)[:2]))
    with pytest.raises(ValueError, match=says):
        dict(read_megatron(folder)[1])


def test_an_index_that_lacks_a_shard(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model())
    change_metadata(folder, lambda m: m.storage_data.pop(of_first_chunk(m)[2]))
    with pytest.raises(ValueError, match=r"where the shard .*final_layernorm\.weight"):
        read_megatron(folder)


def test_a_shard_that_is_there_twice_in_place_of_another(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model(), tp=2)

    def twice(metadata):
        chunks = metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks
        chunks[1] = chunks[0]

    change_metadata(folder, twice)
    with pytest.raises(ValueError, match=r"elements of embedding\.word_embeddings\.weight"):
        read_megatron(folder)


def test_a_checkpoint_without_arguments(tmp_path):
    folder = write(tmp_path / "checkpoints", our_model())
    torch.save({"iteration": 50}, folder / "iter_0000050" / "common.pt")  # as NeMo's
    with pytest.raises(ValueError, match=r"Megatron-LM's arguments in .*, found none"):
        read_megatron(folder)


@pytest.mark.parametrize(
    "where", [".metadata", "plans", "common.pt", "common_state", "shard", "old shard"]
)
def test_a_pickle_runs_nothing(tmp_path, where):
    proof = tmp_path / "ran"
    attack = Attack(os.mkdir, str(proof))
    core = "0.19" if where == "common_state" else "0.18"
    also = {"wings": attack} if where == "common_state" else {}
    folder = write(tmp_path / "checkpoints", our_model(), core=core, **also)
    path = folder / "iter_0000050"
    if where == ".metadata":
        (path / where).write_bytes(pickle.dumps(attack))
    elif where == "plans":
        change_metadata(folder, lambda m: setattr(m, "all_local_plans", [attack]))
    elif where == "common.pt":
        torch.save({"args": attack, "checkpoint_version": 3.0}, path / where)
    elif where != "common_state":
        stream = io.BytesIO()
        torch.save(attack, stream, _use_new_zipfile_serialization=where == "shard")
        (path / "__9_0.distcp").write_bytes(stream.getvalue() + bytes(1000))

        def point(metadata):
            info = of_first_chunk(metadata)[1]
            info.relative_path, info.offset = "__9_0.distcp", 0
            info.length = len(stream.getvalue())

        change_metadata(folder, point)
    says = {"shard": "may be meant to run code|Cannot read", "common.pt": "arguments in .* none"}
    if where == "common_state":  # one that nothing asks for, as of a class that is not installed
        read_megatron(folder)
    else:
        with pytest.raises(ValueError, match=says.get(where.split()[-1], "no part of the format")):
            dict(read_megatron(folder)[1])
    assert not proof.exists()


def test_folders_of_others_are_not_taken_for_it(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "metadata.json").write_text("[1]")
    assert not is_megatron(tmp_path)
    run = tmp_path / "run" / "iter_0000001"
    run.mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    for name in (".metadata", "run.json"):
        (run / name).write_text("x")
    assert not is_megatron(run.parent)
    assert not is_megatron(run)
