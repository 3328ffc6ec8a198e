"""The rates, loss scales and skipped steps that AMD's ROCm post logs of its fp16 MoE, step by step.

The loop's own step, scaler, schedule and log lines over 1100 steps (`test_schedule` has the rate at
the 2000th); gradients alone are made up, so that they overflow where the post's did: from 2^32 down
to 2^15.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from mb_parallel import ParallelDims
from mb_parallel.optimizer import WorkingCopies
from mb_train.assembly.optimizer import build_optimizer, build_scaler
from mb_train.checkpoint.read import Progress
from mb_train.config import TrainConfig
from mb_train.logs.metrics import Accumulator
from mb_train.logs.timers import Timers
from mb_train.schedule import BatchSizes, build_schedule
from mb_train.tasks import GPTTask
from mb_train.train.interval import report_interval
from mb_train.train.step import train_step
from torch import nn

CONFIG = TrainConfig(
    num_layers=1, hidden_size=16, num_attention_heads=1, seq_length=8, micro_batch_size=512,
    global_batch_size=512, train_iters=2000, lr=1.5e-4, min_lr=1e-5, lr_decay_style="cosine",
    lr_warmup_fraction=0.01, fp16=True, log_interval=100,
)  # fmt: skip


class Overflowing:
    """An executor whose gradients fit into fp16 up to a scale of 2^15, and of 2^17 later on."""

    def __init__(self, weight, run):
        self.weight, self.run = weight, run

    def step(self, work):
        loss_scale = work.loss_scale
        work.before(0)
        work.measured({})
        limit = 2.0**15 if self.run.progress.iteration < 100 else 2.0**17
        value = torch.where(loss_scale > limit, torch.inf, loss_scale)
        self.weight.grad = value.reshape(1, 1).clone()
        return {"lm loss": torch.tensor(5.0)}


@pytest.mark.slow
def test_the_posts_rates_and_scales():
    device, mesh = torch.device("cpu"), ParallelDims().build("cpu")
    part, said, task = nn.Linear(1, 1, bias=False), [], GPTTask(CONFIG, vocab_size=128, eod=0)
    steps, rates = [], []
    model = SimpleNamespace(
        parts=[part],
        train=lambda mode=True: None,
        copies=[],
        working_copies=WorkingCopies({}),
        steps_redone=0,
    )
    run = SimpleNamespace(
        config=CONFIG, device=device, mesh=mesh, progress=Progress(0, 0), skipped_samples=0,
        batch_sizes=BatchSizes(CONFIG, 512, step=512), schedule=build_schedule(CONFIG, 512),
        optimizer=build_optimizer(model, CONFIG), scaler=build_scaler(CONFIG),
        timers=Timers(device, level=0, option="minmax"), iterations=2000,
        vocab_size=128, last_losses={},
        task=SimpleNamespace(loss_weights={"lm loss": "weights"}, workload=task.workload),
        load_balance=SimpleNamespace(see=len, update=lambda step, _: steps.append(step)),
        say=said.append, sign_of_life=lambda doing: None,
        model=model, log=SimpleNamespace(write=lambda event, **values: None),
    )  # fmt: skip
    model.executor = Overflowing(part.weight, run)
    accumulator, stream = Accumulator(mesh), iter(lambda: {"weights": torch.ones(1)}, None)
    for step in range(1, 1101):
        done = train_step(run, stream, accumulator)
        rates.append(run.optimizer.param_groups[0]["lr"])
        if step % 100 == 0:
            stats = accumulator.collect(done.grad_norm)
            scale = run.scaler.state_dict()["scale"]
            report_interval(run, stats, seconds=1.0, samples=51_200, loss_scale=scale)
    assert steps == [*range(1, 1101)]
    # What the optimizer stepped with: the schedule does not count the 18 steps that were skipped.
    assert rates[199] == run.schedule.lr((199 - 18) * 512) != rates[200]
    fields = r"learning rate: (\S+) .*loss scale: (\S+) .*skipped iterations: +(\d+) "
    logged = {}
    for line in said:
        iteration = int(re.match(r" iteration +(\d+)/", line)[1])
        logged[iteration] = re.search(fields, line).groups()
    # As the post has them.
    assert logged[200] == ("1.477E-04", "32768.0", "0")
    assert logged[1100] == ("7.202E-05", "65536.0", "0")
    # 2^32 to 2^15 are 17 halvings, after one overflow that the hysteresis forgives.
    assert logged[100][1:] == ("32768.0", "18")
    assert {i for i in logged if logged[i][1] == "32768.0"} == set(range(100, 1100, 100))
