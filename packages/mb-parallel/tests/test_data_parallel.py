"""Two ranks with half the samples each take the same steps as one process with all of them."""

import pytest
import torch
from mb_parallel import ParallelDims, apply_data_parallel, clip_grad_norm, set_gradient_sync
from mb_parallel.testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

STEPS, MICRO_BATCHES, SAMPLES, WIDTH = 3, 2, 6, 7  # odd width: shards are uneven


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH)) for _ in "ab"]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def _train(rank: int, world_size: int, zero_stage: int) -> list[tuple[float, float]]:
    """Loss and gradient norm per step; micro-batch m of the step goes to rank m % world_size."""
    model = _model()
    mesh = ParallelDims(dp_shard=world_size).build("cpu").axis("dp")
    apply_data_parallel(model, mesh, blocks=list(model)[:2], zero_stage=zero_stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(
        STEPS, 2 * MICRO_BATCHES, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)
    )
    history = []
    for step in range(STEPS):
        mine = [m for m in range(2 * MICRO_BATCHES) if m % world_size == rank]
        total = torch.zeros(())
        for m in mine:
            set_gradient_sync(model, m == mine[-1])
            loss = (model(data[step, m]) - 1).square().mean() / len(mine)
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        history.append((float(total) / world_size, float(norm)))
    return history


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_match_one_process(zero_stage):
    expected = _train(0, 1, zero_stage)
    assert expected[0][0] != expected[-1][0]
    for got in run_ranks(_train, 2, zero_stage):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


class _Probe(nn.Linear):
    """Remembers the dtypes that its forward pass saw."""

    def forward(self, input):
        self.seen = (input.dtype, self.weight.dtype)
        return super().forward(input.to(self.weight.dtype))


def _dtypes(rank, world_size):
    model = nn.Sequential(_Probe(4, 4), nn.Sequential(_Probe(4, 4), _Probe(4, 2)))
    apply_data_parallel(
        model,
        ParallelDims(dp_shard=world_size).build("cpu").axis("dp"),
        blocks=[model[1]],
        compute_dtype=torch.bfloat16,
        keep_fp32=[model[1][0]],
    )
    model(torch.ones(3, 4)).sum().backward()
    probes = [module.seen for module in model.modules() if isinstance(module, _Probe)]
    return probes, {p.grad.dtype for p in model.parameters()}, {p.dtype for p in model.parameters()}


def test_bf16_compute_with_fp32_routers_gradients_and_weights():
    full, half = torch.float32, torch.bfloat16
    for probes, grads, weights in run_ranks(_dtypes, 2):
        assert probes == [(half, half), (half, full), (full, half)]
        assert grads == weights == {full}


def test_one_process_is_left_alone():
    model = _model()
    before = dict(model.named_parameters())
    apply_data_parallel(model, None, blocks=list(model))
    set_gradient_sync(model, False)
    assert type(model) is nn.Sequential
    assert all(p is before[name] for name, p in model.named_parameters())


def _two_axes(rank, world_size):
    mesh = ParallelDims(dp_shard=2).build("cpu").dense
    assert isinstance(mesh, DeviceMesh)
    apply_data_parallel(_model(), mesh, blocks=[])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="zero_stage 2 or 3, got 1"):
        apply_data_parallel(_model(), None, blocks=[], zero_stage=1)
    with pytest.raises(RuntimeError, match="Expected a mesh with one axis, got 4 axes"):
        run_ranks(_two_axes, 2)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clip_matches_torch(max_norm):
    ours, theirs = _model(), _model()
    for model in (ours, theirs):
        model(torch.ones(3, WIDTH)).square().sum().backward()
    norm = clip_grad_norm(ours.parameters(), max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_clip_without_gradients_is_zero():
    assert clip_grad_norm(_model().parameters(), 1.0) == 0
