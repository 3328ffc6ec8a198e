"""`--profile`: of which kind a kernel is, and how its time adds up with that of others."""

import gzip
import json
from pathlib import Path

import mb_kernels
import mb_train.train.profiling as profiling
import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.config.recipes import recipe
from mb_train.logs.run_log import read_log
from mb_train.train.profiling import Profiler, device_spans, kind_of, rooms_of_kernels, summarize


def kernel(name, begin, end, group=None):
    args = {} if group is None else {"Process Group Description": group}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": args}


@pytest.mark.parametrize(
    ("name", "group", "kind"),
    [
        ("push_kernel", None, "expert exchange"),
        ("wait_kernel", None, "expert exchange"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "mesh_ep", "expert exchange"),
        ("ncclDevKernel_AllGather_RING_LL(...)", "mesh_ep_width", "expert exchange"),
        ("ncclDevKernel_AllGather_RING_LL(...)", "mesh_dp_shard", "data-parallel communication"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", "mesh_edp_shard", "data-parallel communication"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", None, "data-parallel communication"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "mesh_tp", "tensor-parallel communication"),
        ("ncclDevKernel_SendRecv(...)", "mesh_pp", "pipeline communication"),
        ("up_fwd_kernel", None, "experts"),
        ("scatter_kernel", None, "routing and permutation"),
        ("row_gradients_kernel", None, "loss"),
        ("adamw_kernel", None, "optimizer"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", None, "matrix products"),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x128x64", None, "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", None, "attention"),
        ("triton_red_fused_native_layer_norm_3", None, "norms, activations, the rest"),
    ],
)
def test_the_kind_of_a_kernel(name, group, kind):
    rooms = {
        "push_kernel": "exchange", "wait_kernel": "exchange", "up_fwd_kernel": "expert_mlp",
        "scatter_kernel": "routing", "row_gradients_kernel": "linear_cross_entropy",
        "adamw_kernel": "adamw",
    }  # fmt: skip
    assert kind_of(kernel(name, 0, 1, group), rooms) == kind


def test_the_rooms_are_those_of_mb_kernels():
    pytest.importorskip("triton")
    from mb_kernels.exchange import kernels  # noqa: F401  # a room counts once it is imported

    assert {name: room for name, room in rooms_of_kernels().items() if name == "push_kernel"} == {
        "push_kernel": "exchange"
    }
    folder = Path(mb_kernels.__path__[0])
    of_kernels = [path for path in folder.rglob("*.py") if "@triton.jit" in path.read_text()]
    rooms = {path.relative_to(folder).parts[0] for path in of_kernels} - {"language", "targets"}
    assert rooms - profiling._ROOMS.keys() == {"elementwise"}
    assert all((folder / room / "__init__.py").is_file() for room in profiling._ROOMS)


def test_time_is_that_of_a_kind_and_that_of_it_alone():
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99999},
        kernel("gemm", 1000, 5000),
        kernel("ncclDevKernel_AllGather", 4000, 7000, "mesh_dp_shard"),
        kernel("ncclDevKernel_ReduceScatter", 6000, 8000, "mesh_dp_shard"),
        kernel("gemm", 10000, 11000),
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 10500, "dur": 1500},
    ]
    found = summarize(device_spans(events, {}), steps=2)
    assert (found.step_ms, found.idle_ms) == (5.5, 1.0)
    shares = {kind: (s.busy, s.alone, s.calls) for kind, s in found.kinds.items()}
    assert shares == {
        "matrix products": (2.5, 1.75, 1.0),
        "data-parallel communication": (2.0, 1.5, 1.0),
        "copies": (0.75, 0.5, 0.5),
    }
    assert found.kernels["gemm"] == (2.5, 1.0)
    text = found.lines()
    assert "5.50 ms a step, of which the GPU is idle for 1.00" in text
    assert "data-parallel communication          2.00   36.4%      1.50   27.3%       1" in text
    assert "2.50 ms      1 x gemm" in text
    nothing = summarize([], steps=2)
    assert (nothing.step_ms, nothing.kinds) == (0.0, {})
    assert "0.00 ms a step" in nothing.lines()


class _Recorder:
    """Stands in for torch's profiler: always the same trace."""

    def __init__(self, activities, acc_events):
        self.calls = []

    def start(self):
        pass

    def stop(self):
        pass

    def export_chrome_trace(self, path):
        with open(path, "w") as file:
            json.dump({"traceEvents": [kernel("gemm", 0, 6000)]}, file)


def test_the_steps_asked_for_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "profile", _Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    asked = {"profile": True, "profile_step_start": 2, "profile_step_end": 5}
    config = TrainConfig(**recipe("quickstart") | asked)

    def steps_of(profiler, last):
        seen = []
        for step in range(last):
            if profiler.begins(step):
                profiler.start()
                seen.append(step)
            if profiler.ends(step + 1, stopping=step + 1 == last):
                found, kept = profiler.stop(step + 1, tmp_path / "trace.json.gz")
                seen += [step + 1, found.steps, found.step_ms, kept]
        return seen

    told = f" trace: {tmp_path / 'trace.json.gz'}"
    assert steps_of(Profiler(config, here=True), 9) == [2, 5, 3, 2.0, told]
    assert steps_of(Profiler(config, here=True), 4) == [2, 4, 2, 3.0, told]
    assert steps_of(Profiler(config, here=False), 9) == []
    assert steps_of(Profiler(TrainConfig(**recipe("quickstart")), here=True), 12) == []
    with gzip.open(tmp_path / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"][0]["name"] == "gemm"
    profiler = Profiler(config, here=True)
    profiler.start()
    _, kept = profiler.stop(3, tmp_path / "none" / "trace.json.gz")
    assert kept == " trace: not kept, No such file or directory"


@pytest.mark.parametrize(
    ("intervals", "recorded"),
    [(("--eval-interval", "3"), 2), (("--save-interval", "2"), 1), ((), 3)],
    ids=["evaluation", "checkpoint", "neither"],
)
def test_a_profile_is_of_steps_alone(tmp_path, monkeypatch, intervals, recorded):
    """An evaluation's kernels, or a checkpoint's, would count as those of the steps."""
    monkeypatch.setattr(profiling, "profile", _Recorder)
    monkeypatch.setattr("mb_train.train.run.check_profiled", lambda config, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    words = ["--recipe=quickstart", "--device=cpu", "--num-layers=1", "--hidden-size=16"]
    words += ["--ffn-hidden-size=16", "--seq-length=16", "--num-attention-heads=1"]
    words += ["--micro-batch-size=2", "--mock-data", "--tokenizer=null:50", "--train-iters=5"]
    words += ["--eval-iters=1", "--eval-interval=0", "--save-interval=0", *intervals]
    words += ["--profile", "--profile-step-start=1", "--profile-step-end=4"]
    assert main([*words, "--save", str(tmp_path)]) == 0
    (found,) = [event for event in read_log(tmp_path / "log.jsonl") if event["event"] == "profile"]
    assert found["steps"] == recorded


def test_what_cannot_be_profiled_is_refused(tmp_path, capsys):
    words = ["--recipe=quickstart", "--device=cpu", "--save", str(tmp_path / "run"), "--profile"]
    assert main(words) == 2
    assert "Expected a GPU for --profile, got --device cpu" in capsys.readouterr().err
    assert main([*words, "--profile-step-end", "10"]) == 2
    assert "Expected --profile-step-end above --profile-step-start" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.gpu
def test_a_run_says_what_its_steps_are_made_of(tmp_path):
    words = ["--recipe", "quickstart", "--train-iters", "8", "--eval-iters", "0", "--profile"]
    words += ["--profile-step-start", "4", "--profile-step-end", "6", "--save", str(tmp_path)]
    assert main(words) == 0
    (found,) = [event for event in read_log(tmp_path / "log.jsonl") if event["event"] == "profile"]
    assert (found["iteration"], found["steps"]) == (6, 2)
    assert {"experts", "optimizer", "loss", "routing and permutation"} <= found["kinds"].keys()
    assert (tmp_path / "trace_0000006.json.gz").is_file()
