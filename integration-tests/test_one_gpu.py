"""The packages together on one GPU: text to a model that writes, layers, checkpoints, HF models.

    pytest -m gpu integration-tests

What can only be seen across packages; each package's own kernels have tests of their own.
"""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import mb_data
import pytest
import tiny_run
import torch
from mb_kernels.runtime.plan import assume, plan_for
from mb_kernels.targets import current_target
from mb_layers import MoE, MoEConfig, dMoE
from mb_train.cli import main
from mb_train.convert import export_model, import_model
from mb_train.folder.run_folder import find_checkpoint
from mb_train.loading import load_trained
from torch import nn

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Largest error of a tensor over its largest entry; an H100 had 1e-6 in fp32.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    return float((got - expected).abs().max() / expected.abs().max())


def test_text_becomes_a_model_that_writes(tmp_path, capsys):
    """The way of a newcomer, on this GPU: mb-data, mb-train, a stop, a start, generate, export."""
    corpus = mb_data.write_sample_corpus(tmp_path / "corpus.jsonl", max_bytes=300_000)
    mb_data.preprocess(corpus, tmp_path / "corpus", append_eod=True, workers=1)
    words = ["--recipe", "quickstart", "--data-path", str(tmp_path / "corpus_text_document")]
    words += ["--train-iters", "40", "--lr-decay-iters", "40", "--device", DEVICE]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*words, "--save", str(whole)]) == 0
    assert main([*words, "--save", str(parts), "--exit-interval", "25"]) == 0
    assert main(["--load", str(parts), "--device", DEVICE]) == 0
    expected = tiny_run.losses(whole)
    assert expected[-1] < expected[0] - 3
    assert tiny_run.losses(parts) == pytest.approx(expected, rel=1e-2)
    capsys.readouterr()
    greedy = ["--prompt", "def ", "--max-new-tokens", "8", "--temperature", "0"]
    assert main(["generate", str(parts), *greedy, "--device", DEVICE]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_a_run_moves_between_the_gpu_and_the_cpu(tokens, tmp_path):
    """In fp32: two steps here, three there, three here, as if all had been there."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    same = "--no-bf16 --attention-dropout 0 --hidden-dropout 0"  # devices draw other numbers
    assert main(tiny_run.flags(tokens, whole, f"{same} --device {DEVICE}")) == 0
    begin = f"{same} --device {DEVICE} --exit-interval 2"
    assert main(tiny_run.flags(tokens, parts, begin)) == 0
    for device, more in (("cpu", ["--exit-interval", "5"]), (DEVICE, [])):
        assert main(["--load", str(parts), "--device", device, *more]) == 0
    assert find_checkpoint(parts) == parts / "iter_0000008"
    assert tiny_run.losses(parts) == pytest.approx(tiny_run.losses(whole), rel=1e-5)


def test_offloaded_moments_train_as_others_and_are_saved(tokens, tmp_path, capsys):
    """To the bit, one half or all of them, saved beside the training, and after it goes on."""
    same = f"--attention-dropout 0 --hidden-dropout 0 --device {DEVICE} --save-interval 2"
    assert main(tiny_run.flags(tokens, tmp_path / "here", same)) == 0
    offload = f"{same} --optimizer-cpu-offload --async-save"
    for share in ("0.5", "1"):
        run = tmp_path / f"share {share}"
        flags = tiny_run.flags(tokens, run, f"{offload} --optimizer-offload-fraction {share}")
        assert main([*flags, "--exit-interval", "5"]) == 0
        assert "exp_avg on the host" in capsys.readouterr().out
        assert main(["--load", str(run), "--device", DEVICE]) == 0
        assert "exp_avg on the host" in capsys.readouterr().out
        assert tiny_run.losses(run) == tiny_run.losses(tmp_path / "here")
        weights, expected = (
            load_trained(one, "cpu", torch.float32).model.state_dict()
            for one in (run, tmp_path / "here")
        )
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_products_in_8_bits_train_as_on_the_cpu(tokens, tmp_path):
    """As they are, compiled, and in graphs; a GPU that has no such products is refused at once."""
    same = "--attention-dropout 0 --hidden-dropout 0 --moe-shared-expert-intermediate-size 48"
    # Each device draws first weights of its own.
    assert main(tiny_run.flags(tokens, tmp_path / "first", f"{same} --bf16 --device cpu")) == 0
    fp8 = f"{same} --fp8-format e4m3 --load {tmp_path / 'first'} --finetune"
    here = tiny_run.flags(tokens, tmp_path / "here", f"{fp8} --device {DEVICE}")
    if current_target().float8 is None:
        assert main(here) == 2
        return
    assert main(here) == 0
    for name, more in (
        ("compiled", f"{fp8} --compile --device {DEVICE}"),
        ("graphs", f"{fp8} --cuda-graph --device {DEVICE}"),
        ("there", f"{fp8} --bf16 --device cpu"),
    ):
        gpus = partial(plan_for, current_target(), units=1, hopper=False)
        with assume(gpus) if name == "there" else nullcontext():  # its format of 8-bit floats
            assert main(tiny_run.flags(tokens, tmp_path / name, more)) == 0
        found = tiny_run.losses(tmp_path / name)
        assert found == pytest.approx(tiny_run.losses(tmp_path / "here"), rel=5e-3), name


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity_factor": 8.0}, {"mlp_impl": "sparse"}, {"recompute": True}],
    ids=["dropless", "capacity", "sparse", "recompute"],
)
def test_equal_experts_are_one_dense_mlp(options: dict, dtype: torch.dtype) -> None:
    """Wherever a token goes it meets the same weights, so the layer is a plain MLP."""
    hidden, ffn, experts = 128, 256, 4
    config = MoEConfig(
        hidden_size=hidden, ffn_hidden_size=ffn, num_experts=experts, top_k=2, renormalize=True,
        activation="gelu_tanh", load_balancing_loss_weight=0.0, **options,
    )  # fmt: skip
    layer = (MoE if "capacity_factor" in options else dMoE)(config, device=DEVICE, dtype=dtype)
    w1, w2 = torch.randn(ffn, hidden) / 12, torch.randn(hidden, ffn) / 16
    with torch.no_grad():
        layer.experts.w1.copy_(w1.expand(experts, ffn, hidden))
        layer.experts.w2.copy_(w2.expand(experts, hidden, ffn))
    dense = nn.Sequential(
        nn.Linear(hidden, ffn, bias=False), nn.GELU("tanh"), nn.Linear(ffn, hidden, bias=False)
    ).double()
    x, dy = torch.randn(3, 67, hidden), torch.randn(3, 67, hidden)
    with torch.no_grad():
        dense[0].weight.copy_(layer.experts.w1[0])
        dense[2].weight.copy_(w2.to(dtype))
    rounded = x.to(dtype)
    inputs = [rounded.clone().to(DEVICE).requires_grad_(), rounded.double().requires_grad_()]
    outputs = [layer(inputs[0]).y, dense(inputs[1])]
    outputs[0].backward(dy.to(DEVICE, dtype))
    outputs[1].backward(dy.to(dtype).double())
    pairs = {
        "y": outputs,
        "dx": [i.grad for i in inputs],
        "dw1": [layer.experts.w1.grad.float().sum(0), dense[0].weight.grad],
    }
    for name, (got, expected) in pairs.items():
        assert worst(got, expected) < BOUND[dtype], name


def hugging_face(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, intermediate_size=48, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(
        **sizes, intermediate_size=48, moe_intermediate_size=32, num_experts=6, head_dim=16,
        norm_topk_prob=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_hugging_face_model_computes_the_same_on_our_kernels(kind: str) -> None:
    import mb_layers.transformers as mb

    theirs = hugging_face(kind).to(DEVICE)
    ours = copy.deepcopy(theirs)
    assert len(mb.use(ours)) == 2
    tokens_BS = torch.randint(0, 96, (3, 19), device=DEVICE)
    results = []
    for model in (ours, theirs):
        out = model(tokens_BS, labels=tokens_BS)
        out.loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters()} | {"logits": out.logits})
    for name, expected in results[1].items():
        assert worst(results[0][name], expected) < BOUND[torch.float32], name


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_hugging_face_model_becomes_a_run_and_again_one_of_theirs(tmp_path: Path, kind: str):
    transformers = pytest.importorskip("transformers")
    theirs = hugging_face(kind).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "run", tokenizer="null:95", say=lambda line: None)
    run = load_trained(tmp_path / "run", DEVICE, torch.float32)
    tokens_BS = torch.randint(0, 96, (3, 19))
    with torch.no_grad():
        expected = theirs.to(DEVICE)(tokens_BS.to(DEVICE)).logits
        assert worst(run.model.logits(tokens_BS.to(DEVICE)), expected) < BOUND[torch.float32]
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(
        back.state_dict().values(), theirs.cpu().state_dict().values(), strict=True
    ))  # fmt: skip
