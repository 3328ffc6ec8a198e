"""A step's loss and gradients are those of one backward pass over the whole batch."""

import numpy as np
import pytest
import torch
from mb_train.flags.command_line import parse, resolve
from mb_train.logs.metrics import Accumulator
from mb_train.train.run import Run
from mb_train.train.step import train_step
from torch.nn import functional as F

FLAGS = (
    "--recipe dense-17m --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--ffn-hidden-size 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 --device cpu "
    "--hidden-dropout 0 --attention-dropout 0 --no-bf16 --clip-grad 0 --mock-data "
    "--tokenizer null:60 --num-workers 0 --save-interval 0"
)


@pytest.fixture
def run(tmp_path):
    config = resolve(parse([*FLAGS.split(), "--save", str(tmp_path / "run")]))
    run = Run(config, torch.device("cpu"), None)
    yield run
    run.close(together=True)


def test_a_step_trains_on_the_mean_over_the_tokens_that_count(run):
    """Of all micro-batches together, of which one has fewer of them; and on no multiple of it."""
    text_MBS = np.random.default_rng(0).integers(0, 60, (2, 1, 9))
    batches = [
        {name: torch.from_numpy(array) for name, array in run.task.collate([*text_BS]).items()}
        for text_BS in text_MBS
    ]
    batches[1]["weights_BS"][:, :5] = 0
    (part,) = run.model.parts
    tokens, labels, weights = (
        torch.cat([batch[name] for batch in batches])
        for name in ("tokens_BS", "labels_BS", "weights_BS")
    )
    terms = F.cross_entropy(part.logits(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    loss = (terms * weights.flatten()).sum() / weights.sum()
    grads = torch.autograd.grad(loss, list(part.parameters()))
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    done = train_step(run, iter(batches), Accumulator(run.mesh))
    torch.testing.assert_close(run.last_losses["lm loss"], loss.detach())
    torch.testing.assert_close(done.grad_norm, norm)


def test_each_micro_batch_of_each_step_draws_numbers_of_its_own(run):
    (part,), seeds = run.model.parts, []
    part.register_forward_pre_hook(lambda *_: seeds.append(torch.initial_seed()))
    text_MBS = np.random.default_rng(0).integers(0, 60, (2, 1, 9))
    arrays = [run.task.collate([*text_BS]) for text_BS in text_MBS]
    for _ in range(2):
        batches = [{name: torch.from_numpy(a) for name, a in batch.items()} for batch in arrays]
        train_step(run, iter(batches), Accumulator(run.mesh))
    assert len(set(seeds)) == len(seeds) == 4
