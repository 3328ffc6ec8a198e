"""Kernels compiled while a run is set up: of which layers, and what is said."""

from concurrent.futures import Future
from types import SimpleNamespace

import mb_kernels
import mb_layers
import pytest
import torch
from mb_kernels.runtime.recording import record
from mb_parallel import ParallelDims
from mb_train.assembly.assemble import assemble
from mb_train.assembly.compile_ahead import compile_experts, compile_step, outcome
from mb_train.assembly.optimizer import build_optimizer
from mb_train.config import TrainConfig
from mb_train.config.recipes import recipe
from mb_train.data.tokenizers import load_tokenizer
from mb_train.tasks.make import make_task

GPU = torch.device("cuda")


def begun(monkeypatch, device=GPU, ep_size=1, **fields):
    """What `warm_up` was called with; None if it was not."""
    found = []
    monkeypatch.setattr(
        mb_layers, "warm_up", lambda config, **given: found.append((config, given)) or Future()
    )
    config = TrainConfig(**recipe("dmoe-125m") | fields)
    mesh = SimpleNamespace(ep_size=ep_size, cp_size=1)
    future = compile_experts(config, mesh, device, torch.bfloat16)
    assert (future is None) == (not found)
    return found[0] if found else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_of_experts_is_compiled_as_it_will_be_called(monkeypatch, ranks):
    fields = {"micro_batch_size": 4, "moe_top_k": 2, "swiglu": True}
    experts, given = begun(monkeypatch, ep_size=ranks, **fields)
    assert (experts.num_experts, experts.top_k, experts.activation) == (64, 2, "swiglu")
    assert given == {"tokens": 4 * 1024, "dtype": torch.bfloat16, "ranks": ranks, "device": GPU}


@pytest.mark.parametrize("fields", [{"moe_num_experts": None}, {"device": torch.device("cpu")}])
def test_other_layers_are_left_to_their_first_call(monkeypatch, fields):
    assert begun(monkeypatch, **fields) is None


def test_a_kernel_that_does_not_compile_ends_no_set_up():
    good, bad = Future(), Future()
    good.set_result(21)
    bad.set_exception(RuntimeError("no such instruction"))
    assert " kernels of the step: 21 compiled" in outcome("the step", good)
    assert "not compiled ahead, RuntimeError: no such instruction" in outcome("the step", bad)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more", [[], ["--moe-router-score-function", "sigmoid"], ["--moe-recompute"]], ids=str
)
def test_the_first_step_compiles_no_kernel(tmp_path, monkeypatch, more):
    from mb_train.cli import main
    from mb_train.train import run
    from triton import knobs

    compiled, ahead = [], []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **given: compiled.append(given["fn"].module)
    )

    def waited(what, compiling):
        ahead.append(outcome(what, compiling))
        compiled.clear()
        return ahead[-1]

    monkeypatch.setattr(run, "outcome", waited)
    words = ["--recipe", "quickstart", "--hidden-size", "208", "--num-attention-heads", "4"]
    words += ["--train-iters", "1", "--eval-iters", "0", "--save", str(tmp_path)]
    assert main([*words, *more]) == 0
    assert len(ahead) == 2
    assert not [line for line in ahead if "not compiled ahead" in line]
    assert not [module for module in compiled if module.startswith("mb_kernels")]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_head_norm_and_optimizer_are_compiled_as_a_step_will_call_them(monkeypatch, micro_batches):
    config = TrainConfig(**recipe("quickstart") | {"device": "cpu", "bf16": True})
    mesh = ParallelDims().build("cpu")
    task = make_task(config, load_tokenizer(config), vocab_size=512, mesh=mesh)
    model = assemble(task, config, mesh, torch.device("cpu"), torch.bfloat16)
    optimizer = build_optimizer(model, config)
    tl = pytest.importorskip("triton.language")
    listed = []

    def compile_ahead(rehearse, *, device):
        with record() as launches:
            rehearse()
        listed.extend(launches)

    monkeypatch.setattr(mb_kernels, "compile_ahead", compile_ahead)
    sizes = {"vocab_size": 512, "micro_batches": micro_batches}
    compile_step(config, mesh, model, optimizer, GPU, torch.bfloat16, **sizes)
    kernels = {launch.kernel.fn.__name__ for launch in listed}
    added = {"accumulate_grad_kernel"} if micro_batches > 1 else set()
    own = {"adamw_kernel", "sum_of_squares_kernel", "linear_cross_entropy_kernel"}
    assert kernels == own | added
    (head,) = (launch for launch in listed if launch.args[0].shape[-1] == 512)
    assert (head.args[0].dtype, head.args[4]) == (torch.bfloat16, 512)
    halves = [launch for launch in listed if launch.constants.get("GRAD") == tl.bfloat16]
    assert bool(halves) == (micro_batches == 1)
    assert not optimizer.state
