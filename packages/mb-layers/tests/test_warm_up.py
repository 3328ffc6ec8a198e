"""What a layer tells `mb_kernels.warm_up` of itself."""

from concurrent.futures import Future

import mb_kernels
import pytest
import torch
from mb_layers import MoEConfig, warm_up

SPARSE = {"mlp_impl": "sparse", "hidden_size": 128, "ffn_hidden_size": 128}


def told(monkeypatch, ranks=1, **fields):
    """The arguments of `mb_kernels.warm_up`; None if it is not called."""
    found = []
    monkeypatch.setattr(mb_kernels, "warm_up", lambda **given: found.append(given) or Future())
    sizes = {"hidden_size": 40, "ffn_hidden_size": 100, "num_experts": 4, "top_k": 2}
    future = warm_up(MoEConfig(**sizes | fields), tokens=64, ranks=ranks, device="cpu")
    assert bool(found) or future.result() == 0
    return found[0] if found else None


def test_a_layer_is_described_as_it_will_call(monkeypatch):
    expected = {
        "tokens": 64, "hidden_size": 40, "ffn_hidden_size": 100, "num_experts": 4, "top_k": 2,
        "activation": "swiglu", "dtype": torch.bfloat16, "bias_dtype": None,
        "score_function": "softmax", "renormalize": False, "recompute": False, "fp8": False,
        "ranks": 1, "device": "cpu",
    }  # fmt: skip
    assert told(monkeypatch, activation="swiglu") == expected
    assert told(monkeypatch, renormalize=True)["renormalize"]
    other = {"score_function": "sigmoid", "mlp_bias": True, "recompute": True}
    found = told(monkeypatch, **other)
    assert found["bias_dtype"] == torch.float32
    assert (found["score_function"], found["recompute"]) == ("sigmoid", True)
    assert told(monkeypatch, fp8=True)["fp8"]
    assert told(monkeypatch, ranks=2)["ranks"] == 2
    assert told(monkeypatch, ranks=8) is None  # which share the width of an expert


@pytest.mark.parametrize("fields", [SPARSE, {"saved_activation_bits": 8}], ids=str)
def test_experts_that_do_not_run_as_one_op(monkeypatch, fields):
    assert told(monkeypatch, **fields) is None


def test_what_no_layer_can_have_is_refused():
    sizes = {"tokens": 64, "hidden_size": 32, "ffn_hidden_size": 32, "num_experts": 4, "top_k": 2}
    with pytest.raises(
        ValueError, match=r"score_function: expected softmax or sigmoid; got 'tanh'"
    ):
        mb_kernels.warm_up(**sizes, score_function="tanh", device="cpu")
    with pytest.raises(ValueError, match=r"top_k: expected at least 1, .*got 0"):
        mb_kernels.warm_up(**sizes | {"top_k": 0}, device="cpu")
    for fields in ({}, SPARSE):
        config = MoEConfig(**{"hidden_size": 32, "ffn_hidden_size": 32, "num_experts": 4} | fields)
        with pytest.raises(ValueError, match="expected tokens to be an integer >= 1, got 0"):
            warm_up(config, tokens=0)
    with pytest.raises(ValueError, match=r"ranks: expected to divide 4 experts; got 0"):
        warm_up(MoEConfig(**{n: sizes[n] for n in sizes if n != "tokens"}), tokens=64, ranks=0)
    with pytest.raises(ValueError, match=r"expected a MoEConfig, got a dict"):
        warm_up({"hidden_size": 32}, tokens=64)
