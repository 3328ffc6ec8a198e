"""Activations in the host's memory: all models are trained alike, and the plan counts what goes."""

import dataclasses
import gc
import json
import re
import types

import pytest
import torch
from mb_parallel import ParallelDims
from mb_parallel.offload import Offload
from mb_parallel.recompute import apply_recompute
from mb_train.assembly import assemble
from mb_train.assembly.offloading import keep_on_host, layers_on_host, offload_of
from mb_train.cli import main
from mb_train.flags.command_line import parse, resolve
from mb_train.models.transformer import Block
from mb_train.plan.kept import away_by_layer, kept_by_layer
from mb_train.plan.sizing import sizes
from mb_train.plan.words import describe, memory_warning
from test_sizing import KINDS, batch_of, config_and_model, config_of

CPU = torch.device("cpu")
DENSE = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
SIZES = {
    "lr": "1e-2", "train-iters": "3", "log-interval": "1", "eval-iters": "1", "num-layers": "3",
    "hidden-size": "32", "num-attention-heads": "4", "seq-length": "32", "micro-batch-size": "2",
    "global-batch-size": "4", "device": "cpu", "num-workers": "0", "min-offloaded-tensor-size": "1",
}  # fmt: skip
RUN = [word for name, value in SIZES.items() for word in (f"--{name}", value)] + ["--mock-data"]


def blocks_of(model):
    return [module for module in model.modules() if isinstance(module, Block)]


def gradients(model, config):
    model.zero_grad()
    torch.manual_seed(3)
    tokens, rest = batch_of(config)
    output = model(tokens, **rest)
    loss = sum(output.losses.values())
    (loss if output.aux_loss is None else loss + output.aux_loss).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def offloaded(config, model):
    """An offload of all that the run names, on a CPU."""
    blocks = blocks_of(model)
    offload = Offload(CPU, least_numbers=1)
    if config.recompute_granularity == "full":
        first = config.recompute_num_layers if config.recompute_method == "block" else len(blocks)
        apply_recompute(blocks[:first], "full")
    keep_on_host(blocks, config, offload)
    return offload


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_model_stay_as_they_are(kind):
    config, _, model = config_and_model(KINDS[kind])
    want = gradients(model, config)
    ways = [{"cpu_offloading_num_layers": 3}, {"cpu_offloading_num_layers": 1}]
    if config.recompute_granularity == "full":
        ways.append({"offload_modules": ["layer_input"]})
    else:
        experts = ["moe_act"] if config.moe_num_experts is not None else []
        ways.append({"offload_modules": DENSE + experts})
    for way in ways:
        torch.manual_seed(0)
        other = config_and_model(KINDS[kind])[2]
        other.load_state_dict(model.state_dict())
        offload = offloaded(dataclasses.replace(config, **way), other)
        got = gradients(other, config)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), way
        assert offload.sent > 0


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, {"cpu_offloading_num_layers": 2})
        for kind in ("dense", "modern", "gated-experts", "latent", "recompute", "states")
    ]
    + [("modern", {"offload_modules": [name]}) for name in DENSE if "norm" not in name]
    # An RMS norm is made of its parts on a CPU, which keep more.
    + [("dense", {"offload_modules": [name]}) for name in ("attn_norm", "mlp_norm")]
    + [("gated-experts", {"offload_modules": [name]}) for name in ("moe_act", "expert_fc1")]
    + [("recompute-of-one", {"offload_modules": ["layer_input"]})],
    ids=str,
)
def test_the_plan_counts_what_goes(kind, way):
    config, work, model = config_and_model(KINDS[kind])
    config = dataclasses.replace(config, **way)
    offload = offloaded(config, model)
    gradients(model, config)
    layers = kept_by_layer(work, config, ParallelDims(), 4, pairs=True)
    counted = 4 * config.micro_batch_size * sum(away_by_layer(config, layers))
    assert offload.sent == pytest.approx(counted, rel=0.2)


def losses(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["losses"] for line in lines if line["event"] in ("train", "validation")]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("more", [[], ["--moe-num-experts", "4", "--mtp-num-layers", "1"]], ids=str)
def test_a_run_has_its_offload_put_in(tmp_path, monkeypatch, capsys, more):
    """On a CPU nothing goes anywhere, and the run says so; a GPU's is put in by hand."""
    made = []

    def of(config, device):
        made.append(Offload(device, least_numbers=config.min_offloaded_tensor_size))
        return made[-1]

    words = [*RUN, *more, "--cpu-offloading-num-layers", "2", "--save"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert "--cpu-offloading-num-layers 2: no effect without a GPU" in capsys.readouterr().out
    monkeypatch.setattr(assemble, "offload_of", of)
    assert main([*words, str(tmp_path / "there")]) == 0
    assert "no effect without a GPU" not in capsys.readouterr().out
    assert losses(tmp_path / "plain") == losses(tmp_path / "there") != []
    (offload,) = made
    assert offload.sent > 0


def test_only_a_gpu_has_an_offload():
    assert offload_of(config_of(cpu_offloading_num_layers=1), CPU) is None
    assert offload_of(config_of(), torch.device("cuda")) is None


def test_which_layers_of_a_stage():
    def places(layers=3, **fields):
        return layers_on_host(config_of(**fields), layers)

    assert places(cpu_offloading_num_layers=2) == [0, 1]
    assert places(cpu_offloading_num_layers=2, layers=6) == [0, 3]
    assert places(cpu_offloading_num_layers=2, layers=1) == [0]
    assert places(offload_modules=["core_attn"]) == [0, 1, 2]
    again = {"recompute_granularity": "full", "offload_modules": ["layer_input"]}
    assert places(**again) == [0, 1, 2]
    assert places(**again, recompute_method="block", recompute_num_layers=2) == [0, 1]
    assert places() == []


def test_each_half_of_a_block_is_a_layer_in_modules_for_further_tokens_too():
    halves = {
        "hybrid_layer_pattern": "*-", "num_layers": 2, "position_embedding_type": "none",
        "mtp_num_layers": 2, "mtp_hybrid_override_pattern": "*-",
    }  # fmt: skip
    _, _, model = config_and_model(halves)
    layers = len(blocks_of(model))
    assert layers == 6
    assert config_of(**halves, cpu_offloading_num_layers=layers).offloads
    with pytest.raises(ValueError, match=f"of at most {layers}, the model's layers, got 7"):
        config_of(**halves, cpu_offloading_num_layers=layers + 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cpu_offloading_num_layers": 4}, "--cpu-offloading-num-layers of at most 3, .* got 4"),
        (
            {"cpu_offloading_num_layers": 1, "offload_modules": ["core_attn"]},
            "--cpu-offloading-num-layers or --offload-modules, got both, 1 and core_attn",
        ),
        ({"offload_modules": ["norms"]}, "--offload-modules to be one of attn_norm, .*'norms'"),
        ({"offload_modules": ["layer_input"]}, "alone with --recompute-granularity full.*none"),
        (
            {"offload_modules": ["core_attn"], "recompute_granularity": "full"},
            "alone with --recompute-granularity full.* got core_attn and full",
        ),
        (
            {"offload_modules": ["layer_input", "mlp_norm"], "recompute_granularity": "full"},
            "got layer_input mlp_norm and full",
        ),
        ({"offload_modules": ["moe_act"]}, "--moe-num-experts with --offload-modules moe_act"),
        ({"offload_modules": ["mlp_norm"], "compile": True}, "--no-compile with --offload-mod"),
        (
            {"offload_modules": ["mlp_norm"], "cuda_graph": True},
            "no --cuda-graph with --offload-modules mlp_norm, whose copies",
        ),
        (
            {"cpu_offloading_num_layers": 2, "cuda_graph": True},
            "no --cuda-graph with --cpu-offloading-num-layers 2, whose copies",
        ),
        ({"min_offloaded_tensor_size": 0}, "--min-offloaded-tensor-size above 0"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        config_of(**fields)


@pytest.mark.parametrize(
    ("typed", "fields"),
    [
        ("--cpu-offloading --cpu-offloading-num-layers 1 --cpu-offloading-activations "
         "--cpu-offloading-double-buffering --no-cpu-offloading-weights",
         {"cpu_offloading_num_layers": 1, "offload_modules": None}),
        ("--cpu-offloading-num-layers 0", {"cpu_offloading_num_layers": 0}),
        ("--fine-grained-activation-offloading --offload-modules core_attn attn_proj "
         "--activation-offload-fraction 1.0 --delta-offload-bytes-across-pp-ranks 0 "
         "--fine-grained-offloading-max-inflight-offloads 1",
         {"offload_modules": ["core_attn", "attn_proj"]}),
        ("--fine-grained-activation-offloading --offload-modules fused_group_mlp "
         "--num-experts 4", {"offload_modules": ["moe_act"]}),
        ("--offload-modules core_attn --offload-modules none", {"offload_modules": None}),
    ],
)  # fmt: skip
def test_flags_of_megatron_core_mean_what_they_mean_there(typed, fields):
    config = resolve(parse([*RUN, *typed.split()]))
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--cpu-offloading", "--cpu-offloading cannot .* say --cpu-offloading-num-layers as well"),
        ("--fine-grained-activation-offloading", "cannot .* say --offload-modules as well"),
        ("--activation-offload-fraction 0.5", "fraction 0.5 cannot .*: say --cpu-offloading-num"),
        ("--delta-offload-bytes-across-pp-ranks 8", "ranks 8 cannot .*: all stages offload alike"),
        ("--no-cpu-offloading-activations", "weights stay on the GPUs, and activations go as"),
        ("--cpu-offloading-weights", "weights stay on the GPUs, and activations go as"),
        ("--delay-offload-until-cuda-graph", "are not captured in CUDA graphs"),
        ("--swap-attention", "say --offload-modules core_attn"),
        ("--checkpoint-in-cpu", "say --cpu-offloading-num-layers beside --recompute-granularity"),
    ],
)
def test_what_cannot_be_said_exactly_is_refused(typed, said):
    with pytest.raises(ValueError, match=said):
        resolve(parse([*RUN, *typed.split()]))


def test_a_note_says_that_experts_are_one_module():
    words = "--num-experts 4 --offload-modules"
    (note,) = (n for n in parse([*words.split(), "expert_fc1"]).notes if "offload" in n)
    assert note == "--offload-modules: expert_fc1 and moe_act are one here, all that experts keep"
    assert not [n for n in parse([*words.split(), "expert_fc1", "moe_act"]).notes if "offl" in n]


def test_plan_moves_bytes_to_the_host_and_waits_for_a_slow_link(monkeypatch):
    base = {"bf16": True, "num_layers": 8, "seq_length": 1024, "hidden_size": 1024}
    none, all_8, half = (
        sizes(config_of(**base, cpu_offloading_num_layers=number), 64, 1, "H200")
        for number in (0, 8, 4)
    )
    each = none.activations - all_8.activations
    assert all_8.kept_on_host == pytest.approx(each * 8 / 6, rel=0.01)  # two are on the way
    assert none.activations - half.activations == pytest.approx(each * 3 / 6, rel=0.01)  # one is
    assert half.kept_on_host == pytest.approx(all_8.kept_on_host / 2, rel=0.01)
    assert none.kept_on_host == none.on_host == 0
    assert none.memory > half.memory > all_8.memory
    assert sizes(config_of(**base, cpu_offloading_num_layers=8), 64, 1, "CPU").kept_on_host == 0
    fast, slow = (
        [sizes(config_of(**base, cpu_offloading_num_layers=n), 64, 1, gpu).step_s for n in (0, 8)]
        for gpu in ("GH200", "H200")
    )
    # A small model's activations take longer over PCIe than its layers compute.
    link = all_8.kept_on_host / (0.8 * 64e9)
    assert 0 < slow[1] - slow[0] < 2 * link
    assert fast[1] - fast[0] < (slow[1] - slow[0]) / 4
    assert sizes(config_of(**base, cpu_offloading_num_layers=8), 64, 1, "A GPU").step_s is None


def test_plan_and_warnings_name_the_hosts_memory(monkeypatch):
    config = config_of(
        bf16=True, num_layers=8, cpu_offloading_num_layers=8, optimizer_cpu_offload=True,
        seq_length=4096,
    )  # fmt: skip
    found = sizes(config, 64, 1, "H200")
    (line,) = (
        said for said in describe(config, found, ranks=1, device="H200") if "host memory" in said
    )
    assert re.search(r"GiB per rank, pinned: optimizer \d.*, activations \d", line)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * found.memory, 0))
    monkeypatch.setattr("mb_train.plan.words.host_memory", lambda: found.on_host - 1)
    warning = memory_warning(config, 64, 1, types.SimpleNamespace(type="cuda"), "H200")
    assert "Lower --optimizer-offload-fraction or --cpu-offloading-num-layers or --micro" in warning


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("both", "way"),
    [
        ([], ["--cpu-offloading-num-layers", "8"]),
        (["--compile"], ["--cpu-offloading-num-layers", "4"]),
        (["--recompute-granularity", "selective"], ["--cpu-offloading-num-layers", "8"]),
        ([], ["--offload-modules", "core_attn", "attn_proj", "moe_act"]),
    ],
    ids=str,
)
def test_a_gpu_has_less_and_computes_the_same(tmp_path, both, way):
    """A run with experts in bf16, which is alike twice: so losses are compared to the bit."""
    larger = {
        "device": "cuda", "num-layers": "8", "hidden-size": "512", "seq-length": "2048",
        "micro-batch-size": "8", "global-batch-size": "16", "min-offloaded-tensor-size": "65536",
        "moe-num-experts": "8", "moe-top-k": "2",
    }  # fmt: skip
    words = [*RUN, *(word for name, value in larger.items() for word in (f"--{name}", value))]
    found = []
    for name, more in (("plain", []), ("there", way)):
        torch._dynamo.reset()
        gc.collect()  # or what a run before left goes meanwhile
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()  # by tests before
        folder = tmp_path / name
        more = ["--deterministic-mode", "--bf16", *both, *more, "--save", str(folder)]
        assert main([*words, *more]) == 0
        found.append((losses(folder), torch.cuda.max_memory_allocated() - held))
    (want, before), (got, after) = found
    assert got == want != []
    assert after < 0.9 * before
