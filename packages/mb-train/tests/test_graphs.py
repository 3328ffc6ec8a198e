"""`--cuda-graph`: what cannot be captured is refused; a graph trains as what it holds."""

import pytest
import torch
from mb_parallel.optimizer import (
    SGD,
    AdamW,
    GradScaler,
    clip_and_step,
    decay_groups,
    hold_working_copies,
)
from mb_parallel.random import seed_micro_batch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.execute import Sequential, Work
from mb_train.graphs import WARM_UP_STEPS, Graphed, check_capturable
from mb_train.tasks import GPTTask

SIZES = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 64,
    "micro_batch_size": 2, "train_iters": 1, "lr": 1e-3, "ffn_hidden_size": 96,
    "hidden_dropout": 0.1, "attention_dropout": 0.0,
}  # fmt: skip
MOE = {"moe_num_experts": 4, "moe_top_k": 2, "swiglu": True, "moe_jitter_eps": 0.01}
V = 128


@pytest.mark.parametrize(
    ("change", "device", "ranks", "says"),
    [
        ({}, "cpu", 1, "a GPU for --cuda-graph, got --device cpu"),
        ({}, "cuda", 2, "one process for --cuda-graph, got 2 ranks"),
        ({"model": "bert"}, "cuda", 1, "--model gpt for --cuda-graph, got bert"),
        ({"recompute_granularity": "full"}, "cuda", 1, "no recompute"),
        ({"reset_attention_mask": True}, "cuda", 1, "no --reset-attention-mask"),
        (MOE | {"moe_balance_over": "global_batch"}, "cuda", 1, "another --moe-balance-over"),
        (MOE | {"moe_mlp_impl": "sparse"}, "cuda", 1, "--moe-mlp-impl grouped"),
    ],
)
def test_what_cannot_be_one_graph_is_refused(change, device, ranks, says):
    config = TrainConfig(**SIZES | change, cuda_graph=True)
    with pytest.raises(ValueError, match=f"Expected {says}"):
        check_capturable(config, torch.device(device), ranks)
    check_capturable(TrainConfig(**SIZES | MOE), torch.device("cuda"), 1)


def test_the_command_says_so_before_it_writes(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["--recipe=quickstart", "--cuda-graph", "--device=cpu", "--save", str(folder)]
    assert main(words) == 2
    assert "Expected a GPU for --cuda-graph" in capsys.readouterr().err
    assert not (folder / "config.toml").exists()


def trained(kind, fields, *, dtype, compiled):
    """Losses, norms and weights of steps of two micro-batches, the second half of other sizes."""
    torch.manual_seed(3)
    config = TrainConfig(**SIZES | fields)
    with torch.device("cuda"):
        model = GPTTask(config, vocab_size=V, eod=0).build_model(compute_dtype=dtype)
    if compiled:
        for block in model.stack.blocks.values():
            block.compile()
    copies = hold_working_copies([model], dtype)
    optimizer = AdamW(decay_groups(model, 0.1), lr=1e-2, working_copies=copies)
    if config.optimizer == "sgd":  # it knows nothing of copies
        optimizer = SGD(decay_groups(model, 0.1), lr=1e-1)
    scaler = GradScaler(2.0**10, growth_interval=2) if dtype is torch.float16 else None
    more = (copies,) if kind is Graphed else ()
    executor, seen = kind(model, "tokens_BS", *more), []
    generator = torch.Generator().manual_seed(0)
    for step in range(WARM_UP_STEPS + 4):
        count = 2 if step % 2 else 3
        batches = []
        for _ in range(count):
            text = torch.randint(V, (2, 65), generator=generator).cuda()
            weights = torch.full((2, 64), 1 / (128 * count), device="cuda")
            batch = {"tokens_BS": text[:, :-1], "labels_BS": text[:, 1:], "weights_BS": weights}
            batches.append(batch)
        metrics = []
        scale = 1.0 if scaler is None else scaler.scale_on(torch.device("cuda"))
        losses = executor.step(
            Work(
                batches,
                scale,
                lambda index, step=step: seed_micro_batch(1, step=step, place=index),
                metrics.append,
            )
        )
        done = clip_and_step(optimizer, max_norm=1.0, scaler=scaler)
        optimizer.zero_grad(set_to_none=True)
        seen += [losses["lm loss"], done.grad_norm]
        seen += [m["tokens_per_expert"].float().std() for m in metrics if m]
    return torch.stack([value.double() for value in seen]), list(model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "fields", [{}, MOE, MOE | {"optimizer": "sgd"}], ids=["dense", "dmoe", "dmoe-sgd"]
)
def test_a_graph_trains_as_the_passes_it_holds(fields, dtype, compiled):
    expected, weights = trained(Sequential, fields, dtype=dtype, compiled=compiled)
    got, graphed = trained(Graphed, fields, dtype=dtype, compiled=compiled)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    for a, b in zip(graphed, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
