"""Kernels compiled while a run is set up: of which layers, and what is said."""

from concurrent.futures import Future
from types import SimpleNamespace

import mb_layers
import pytest
import torch
from mb_train.compile_ahead import compile_ahead, outcome
from mb_train.config import TrainConfig
from mb_train.recipes import recipe

GPU = torch.device("cuda")


def begun(monkeypatch, device=GPU, ep_size=1, **fields):
    """What `warm_up` was called with; None if it was not."""
    found = []
    monkeypatch.setattr(
        mb_layers, "warm_up", lambda config, **given: found.append((config, given)) or Future()
    )
    config = TrainConfig(**recipe("dmoe-125m") | fields)
    mesh = SimpleNamespace(ep_size=ep_size)
    future = compile_ahead(config, mesh, device, torch.bfloat16)
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
    assert "21 compiled" in outcome(good)
    assert "not compiled ahead, RuntimeError: no such instruction" in outcome(bad)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more", [[], ["--moe-router-score-function", "sigmoid"], ["--moe-recompute"]], ids=str
)
def test_the_first_step_compiles_no_kernel_of_the_experts(tmp_path, monkeypatch, more):
    from mb_train import run
    from mb_train.cli import main
    from triton import knobs

    compiled, ahead = [], []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **given: compiled.append(given["fn"].module)
    )

    def waited(compiling):
        ahead.append(outcome(compiling))
        compiled.clear()
        return ahead[0]

    monkeypatch.setattr(run, "outcome", waited)
    words = ["--recipe", "quickstart", "--hidden-size", "208", "--num-attention-heads", "4"]
    words += ["--train-iters", "1", "--eval-iters", "0", "--save", str(tmp_path)]
    assert main([*words, *more]) == 0
    assert "not compiled ahead" not in ahead[0]
    assert not [module for module in compiled if "expert_mlp" in module or "routing" in module]
