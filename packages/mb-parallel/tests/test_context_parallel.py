"""Ranks that hold parts of sequences compute what one process does: outputs, gradients, losses."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoE, MoEConfig, dMoE
from mb_parallel import ParallelDims, apply_data_parallel, parallelize_experts
from mb_parallel.context_parallel import parallelize_context
from mb_parallel.expert_parallel import GlobalCapacity
from mb_parallel.recompute import apply_recompute
from mb_parallel.tensor_parallel.collectives import exchange
from mb_parallel.testing import run_ranks
from torch import nn

# Query heads, key-value heads, width, value width, sequences, tokens of each of four ranks.
SIZES = {
    "as many heads": (4, 4, 6, 6, 3, 5),
    "groups": (8, 4, 6, 6, 1, 3),
    "fewer groups than ranks": (4, 2, 6, 4, 2, 3),
    "one group, a token": (4, 1, 5, 7, 2, 1),
    "groups that ranks cut across": (12, 3, 4, 4, 2, 2),
    "six groups": (12, 6, 4, 8, 1, 2),
    "no sequence": (4, 2, 4, 4, 0, 2),
}


class Core(nn.Module):
    """Causal attention within documents."""

    def forward(self, q_BSHC, k_BSGC, v_BSGV, documents_BS=None, *, flip=False):
        q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGV))
        mask = None
        if documents_BS is not None:
            mask = (documents_BS[:, None, :, None] == documents_BS[:, None, None, :]).tril()
        causal = {"is_causal": mask is None, "attn_mask": mask}
        y = F.scaled_dot_product_attention(q, k, v, **causal, enable_gqa=True)
        return (-y if flip else y).transpose(1, 2)


def _inputs(sizes, ranks: int, dtype: torch.dtype, device: str):
    heads, groups, width, value, sequences, part = sizes
    generator = torch.Generator().manual_seed(1)
    shapes = (heads, width), (groups, width), (groups, value), (heads, value)
    *qkv, dy = (
        torch.randn(sequences, ranks * part, *shape, generator=generator).to(device, dtype)
        for shape in shapes
    )
    documents = torch.randint(0, 2, (sequences, ranks * part), generator=generator).cumsum(1)
    return qkv, dy, documents.to(device)


def _through(core, qkv, dy, documents=None):
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    y = core(*qkv, documents, flip=True)
    return [y.detach(), *torch.autograd.grad(y, qkv, dy)]


LIMITS = {torch.float64: 1e-12, torch.bfloat16: 0.1}


def _attention(rank: int, ranks: int, device: str = "cpu") -> dict[str, float]:
    """The largest deviation of this rank's part, over what it may be."""
    mesh = ParallelDims(dp_shard=ranks, cp=ranks).build(device)
    found = {}
    for name, sizes in SIZES.items():
        part = slice(rank * sizes[-1], (rank + 1) * sizes[-1])
        for dtype, recompute in ((torch.float64, False), (torch.bfloat16, True)):
            qkv, dy, documents = _inputs(sizes, ranks, dtype, device)
            core = Core()
            if recompute:
                apply_recompute([core], "full")
            assert parallelize_context([core, core], mesh) == 1
            mine = [x[:, part] for x in (*qkv, dy)]
            for given in (None, documents):
                wanted = _through(Core(), qkv, dy, given)
                got = _through(copy.deepcopy(core), mine[:3], mine[3], given)
                errors = [
                    (a.double() - b[:, part].double()).abs().max().item() if a.numel() else 0.0
                    for a, b in zip(got, wanted, strict=True)
                ]
                assert all(a.shape == b[:, part].shape for a, b in zip(got, wanted, strict=True))
                found[f"{name}, {dtype}"] = max(errors) / LIMITS[dtype]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_is_that_of_whole_sequences(ranks):
    for found in run_ranks(_attention, ranks):
        assert len(found) == 2 * len(SIZES)
        assert all(error < 1 for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_attention_over_two_gpus_is_that_of_one():
    for found in run_ranks(_attention, 2, "cuda", device_type="cuda"):
        assert all(error < 1 for error in found.values()), found


class _ByHead(nn.Module):
    def forward(self, q_BSHC, k_BSGC, v_BSGV, *, sinks_H):
        return q_BSHC.cumsum(1) * sinks_H[:, None]


def _numbers_of_heads(rank: int, ranks: int) -> None:
    """What a rank's part comes to, and the gradient of the numbers, which ranks add up."""
    mesh, core = ParallelDims(dp_shard=ranks, cp=ranks).build("cpu"), _ByHead()
    parallelize_context([core, _ByHead()], mesh)
    part = slice(rank * 3, (rank + 1) * 3)
    x = torch.randn(2, 3 * ranks, 4, 5, generator=torch.Generator().manual_seed(1))
    x, sinks_H = x.double(), torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    sinks_H.requires_grad_()
    found = []
    for call, mine in ((_ByHead(), x), (core, x[:, part])):
        y = call(mine, mine, mine, sinks_H=sinks_H)
        found.append([y, *torch.autograd.grad(y.square().sum(), sinks_H)])
    (whole, wanted), (y, gradient) = found
    torch.testing.assert_close(y, whole[:, part])
    mesh.all_reduce(gradient, "dp")
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_is_given_the_numbers_of_its_heads(ranks):
    run_ranks(_numbers_of_heads, ranks)


class _WithStates(nn.Module):
    """Two heads for each key head; numbers of one kind in 16 bits, of two in fp32."""

    def forward(self, mixed_BSGX, decay_BSGR, beta_BSGR, begins_BS, *, weights):
        (weight_GXT,) = weights
        assert (mixed_BSGX.dtype, decay_BSGR.dtype) == (torch.bfloat16, torch.float32)
        weighted_BSG = torch.einsum("bsgx,gxt->bsg", mixed_BSGX.float(), weight_GXT)
        weighted_BSG = weighted_BSG.masked_fill(begins_BS[..., None], 0)
        y_BSGR = (weighted_BSG[..., None] * beta_BSGR).cumsum(1) * decay_BSGR.exp()
        return y_BSGR.flatten(2)[..., None]


def _states(rank: int, ranks: int, compiled: bool) -> None:
    mesh, core = ParallelDims(dp_shard=ranks, cp=ranks).build("cpu"), _WithStates()
    parallelize_context([core], mesh)
    if compiled:
        core.compile(backend="aot_eager", fullgraph=True)
    part = slice(rank * 3, (rank + 1) * 3)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    by_head = normal(2, 3 * ranks, 4, 5).bfloat16(), *normal(2, 2, 3 * ranks, 4, 2)
    begins, dy = normal(2, 3 * ranks) > 0, normal(2, 3 * ranks, 8, 1)
    weight = normal(4, 5, 3).requires_grad_()
    found = []
    for call, mine in ((_WithStates(), slice(None)), (core, part)):
        leaves = [x[:, mine].clone().requires_grad_() for x in by_head]
        y = call(*leaves, begins, weights=(weight,))
        found.append([y, *torch.autograd.grad(y, [*leaves, weight], dy[:, mine])])
    (*whole, wanted), (*mine, gradient) = found
    assert [x.dtype for x in mine] == [x.dtype for x in whole]
    torch.testing.assert_close(mine, [x[:, part] for x in whole])
    mesh.all_reduce(gradient, "dp")
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("ranks", "compiled"), [(2, False), (4, False), (2, True)])
def test_states_are_exchanged_by_key_head_and_in_their_dtypes(ranks, compiled):
    run_ranks(_states, ranks, compiled)


def _curvature(rank: int, ranks: int) -> list[torch.Tensor]:
    """The gradient of a gradient's square, of a part."""
    mesh = ParallelDims(dp_shard=ranks, cp=ranks).build("cpu")
    x = torch.randn(ranks, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(
        (exchange(x, mesh.axis("cp").get_group()) ** 3).sum(), x, create_graph=True
    )
    (bend,) = torch.autograd.grad(slope.square().sum(), x)
    gaps = exchange(x.detach().t().contiguous().t(), mesh.axis("cp").get_group())
    return [x.detach(), slope.detach(), bend, gaps]


def test_an_exchange_is_its_own_backward_twice():
    by_rank = run_ranks(_curvature, 2)
    for x, slope, bend, _ in by_rank:
        torch.testing.assert_close(slope, 3 * x**2)
        torch.testing.assert_close(bend, 36 * x**3)
    (first, *_, of_first), (second, *_, of_second) = by_rank
    assert torch.equal(of_first, torch.stack([first[0], second[0]]))
    assert torch.equal(of_second, torch.stack([first[1], second[1]]))


REFUSALS = (
    "Expected attention cores that exchange no heads yet, got a Core that does. Call "
    "parallelize_context once.",
    "Expected cores to be several modules, got one Core.",
    "Expected a ParallelMesh, got NoneType.",
    "Expected cp = 2 and the 3 key-value heads to divide the 3 heads of a rank",
    "by position, got Core called with tensors [[1, 4, 6]]. Pass the module that computes",
    "by position, got Core called with tensors []. Pass the module that computes",
    "by position, got Core called with tensors [[4, 2, 2], [4, 2, 2], [4, 2, 2]]. Pass",
    "Expected a core to return one tensor, got tuple from Identity.",
    "Expected the parts that Core is given to be equal on all 2 ranks, got\n  rank 0: [([1, 2, 2",
    "Expected layers of experts that know of cp = 2 and tp = 1, got one that counts each rank's "
    "tokens alone. Call parallelize_experts first, with ep = 1 too.",
)


def _refusals(rank: int, ranks: int) -> None:
    mesh = ParallelDims(dp_shard=2, cp=2).build("cpu")
    core, unequal, pair = Core(), Core(), nn.Identity()
    pair.forward = lambda *qkv: qkv
    parallelize_context([core, unequal, pair], mesh)
    calls = (
        lambda: parallelize_context([core], mesh),
        lambda: parallelize_context(core, mesh),
        lambda: parallelize_context([core], None),
        lambda: core(*torch.ones(3, 1, 4, 3, 2).unbind()),
        lambda: core(torch.ones(1, 4, 6)),
        lambda: core(**dict(zip("qkv", torch.ones(3, 1, 4, 2, 2), strict=True))),
        lambda: core(*torch.ones(3, 4, 2, 2)),
        lambda: pair(*torch.ones(3, 1, 4, 2, 2)),
        lambda: unequal(*torch.ones(3, 1, 2 + rank, 2, 2)),
        lambda: apply_data_parallel(dMoE(_config()), mesh, blocks=[]),
    )
    for call, said in zip(calls, REFUSALS, strict=True):
        with pytest.raises(ValueError, match=re.escape(said)):
            call()


class _Dims(nn.Module):
    """Attention whose batch, heads and sequence are these dimensions of what it is given."""

    def __init__(self, *order: int, **how: Any) -> None:
        super().__init__()
        self.order, self.how = order, how

    def forward(self, *qkv):
        qkv = (x.permute(*self.order, 3) for x in qkv)
        y = F.scaled_dot_product_attention(*qkv, **self.how, enable_gqa=True)
        return y.permute(*(self.order.index(dim) for dim in range(3)), 3)


class _Slopes(nn.Module):
    """ALiBi: nearer tokens count more, by a factor of the head's own."""

    def forward(self, q, k, v, *, sinks_H=None):
        places = torch.arange(q.shape[1])
        slopes_H = 0.5 ** torch.arange(q.shape[2]) if sinks_H is None else sinks_H
        far_HSS = -(places[:, None] - places).abs() * slopes_H[:, None, None]
        y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), far_HSS)
        return y.transpose(1, 2)


def _other_dimensions(rank: int, ranks: int) -> None:
    mesh = ParallelDims(dp_shard=2, cp=2).build("cpu")
    other = [_Dims(0, 1, 2), _Dims(0, 1, 2, is_causal=True), _Dims(1, 2, 0, is_causal=True)]
    ours = [_Dims(0, 2, 1, dropout_p=0.5), _Dims(0, 2, 1, is_causal=True, dropout_p=0.5)]
    by_head = [_Dims(0, 2, 1, attn_mask=torch.zeros(4, 4, 4)) for _ in range(2)]
    parallelize_context(other + ours + by_head, mesh)
    for core, groups in zip(by_head, (8, 2), strict=True):
        core(torch.ones(2, 2, 8, 4), *[torch.ones(2, 2, groups, 4)] * 2)  # is not in the way
    for heads, groups in ((2, 2), (4, 2), (2, 1), (8, 4)):
        q, kv = torch.ones(2, 2, heads, 4), torch.ones(2, 2, groups, 4)
        for core in other:
            with pytest.raises(ValueError, match="got _Dims, in which values of others reach it"):
                core(q, kv, kv)
        for core in map(copy.deepcopy, ours):
            state = torch.get_rng_state()
            y = core(q, kv, kv)
            torch.set_rng_state(state)
            assert torch.equal(core(q, kv, kv), y)  # to have tried it drew nothing
    by_number, by_name = _Slopes(), _Slopes()
    parallelize_context([by_number, by_name], mesh)
    qkv = torch.randn(3, 2, 6, 4, 5, generator=torch.Generator().manual_seed(1))
    part, slopes_H = qkv[:, :, 3 * rank :][:, :, :3], 0.5 ** torch.arange(4)
    torch.testing.assert_close(
        by_name(*part, sinks_H=slopes_H), _Slopes()(*qkv)[:, 3 * rank :][:, :3]
    )
    with pytest.raises(ValueError, match="got _Slopes, in which they differ by their number"):
        by_number(*part)


def test_cores_of_other_dimensions_are_refused():
    run_ranks(_other_dimensions, 2)


def _config(**more: Any) -> MoEConfig:
    fields: dict[str, Any] = {
        "hidden_size": 8, "ffn_hidden_size": 16, "num_experts": 4, "top_k": 2,
        "init_method_std": 0.3, "load_balancing_loss_weight": 0.1, "z_loss_weight": 0.01,
    }  # fmt: skip
    return MoEConfig(**(fields | more))


def test_refusals_say_what_to_do():
    run_ranks(_refusals, 2)


def test_one_process_has_nothing_to_exchange():
    core = Core()
    assert parallelize_context([core], ParallelDims().build("cpu")) == 0
    assert "forward" not in vars(core)


def _shares_without_order(rank: int, ranks: int) -> None:
    mesh = ParallelDims(dp_shard=2, cp=2, tp=2).build("cpu")
    layer = MoE(_config(capacity_factor=1.0))
    with pytest.raises(
        ValueError,
        match=re.escape("sequence_parallel=True for the capacity of the layer with cp = 2 and tp"),
    ):
        parallelize_experts(layer, mesh, sequence_parallel=False)
    parallelize_experts(layer, mesh, sequence_parallel=True)
    assert isinstance(layer.dispatcher, GlobalCapacity)
    assert layer.dispatcher.place.size == layer.dispatcher.split_over == 4


def test_a_capacity_counts_parts_in_their_order_or_is_refused():
    run_ranks(_shares_without_order, 4)


LAYERS = {
    "dropless": {},
    "by scores": {"balance_by": "scores"},
    "in sequences": {"balance_over": "sequence"},
    "in sequences, by scores": {"balance_over": "sequence", "balance_by": "scores"},
    "capacity": {"capacity_factor": 0.7},
    "the surest": {"capacity_factor": 0.7, "drop_policy": "probability"},
}


def _whole_layer(
    more: dict[str, Any], x_BSD: torch.Tensor, dy_BSD: torch.Tensor, mask_BS: torch.Tensor | None
) -> list[Any]:
    torch.manual_seed(3)
    config = _config(**more)
    layer = (dMoE if config.capacity_factor is None else MoE)(config)
    x_BSD = x_BSD.clone().requires_grad_()
    output = layer(x_BSD, mask=mask_BS)
    ((output.y * dy_BSD).sum() + output.aux_loss).backward()
    return [output, x_BSD.grad, layer.router.weight.grad]


def _layer_in_parts(rank: int, ranks: int, ep: int, padded: bool) -> None:
    """Of three sequences, a part each: the same slots dropped, the same losses and gradients."""
    mesh = ParallelDims(dp_shard=ranks, cp=ranks, ep=ep).build("cpu")
    x, dy = torch.randn(2, 3, 4 * ranks, 8, generator=torch.Generator().manual_seed(2)).unbind()
    part = slice(4 * rank, 4 * rank + 4)
    # The first sequence fills the first ranks' parts alone.
    lengths = torch.tensor([3, 4 * ranks - 1, 4 * ranks])
    mask = torch.arange(4 * ranks) < lengths[:, None] if padded else None
    for more in LAYERS.values():
        wanted, dx, slope = _whole_layer(more, x, dy, mask)
        torch.manual_seed(3)
        config = _config(**more)
        layer = (dMoE if config.capacity_factor is None else MoE)(config)
        parallelize_experts(layer, mesh, dispatcher="all_to_all")
        mine = x[:, part].clone().requires_grad_()
        output = layer(mine, mask=None if mask is None else mask[:, part])
        torch.testing.assert_close(output.y, wanted.y[:, part], rtol=1e-5, atol=1e-6)
        ((output.y * dy[:, part]).sum() + output.aux_loss / ranks).backward()
        torch.testing.assert_close(mine.grad, dx[:, part], rtol=1e-5, atol=1e-6)
        total = mesh.all_reduce(layer.router.weight.grad.clone(), "cp")
        torch.testing.assert_close(total, slope, rtol=1e-5, atol=1e-6)
        means = torch.stack([output.aux_loss.detach(), output.metrics["load_balancing_loss"]])
        expected = torch.stack([wanted.aux_loss, wanted.metrics["load_balancing_loss"]])
        torch.testing.assert_close(mesh.all_reduce(means, "cp") / ranks, expected.detach())
        if config.capacity_factor is not None:
            assert 0 < wanted.metrics["dropped_fraction"] < 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_experts_see_the_micro_batch_of_one_process(ranks, ep, padded):
    run_ranks(_layer_in_parts, ranks, ep, padded)


def _passes_of_several_sizes(rank: int, ranks: int) -> None:
    mesh = ParallelDims(dp_shard=ranks, cp=ranks).build("cpu")
    torch.manual_seed(3)
    whole = MoE(_config(capacity_factor=0.6))
    layer = copy.deepcopy(whole)
    parallelize_experts(layer, mesh)
    apply_recompute([layer], "moe")
    part = slice(4 * rank, 4 * rank + 4)
    x, dy = ([torch.randn(b, 4 * ranks, 8) for b in (4, 2, 1)] for _ in range(2))
    wanted = [x_BSD.clone().requires_grad_() for x_BSD in x]
    mine = [x_BSD[:, part].clone().requires_grad_() for x_BSD in x]
    # Of all passes at once, so that others lie between a pass and its recomputation.
    sum((whole(x).y * dy).sum() for x, dy in zip(wanted, dy, strict=True)).backward()
    sum((layer(x).y * dy[:, part]).sum() for x, dy in zip(mine, dy, strict=True)).backward()
    for got, want in zip(mine, wanted, strict=True):
        torch.testing.assert_close(got.grad, want.grad[:, part], rtol=1e-5, atol=1e-5)


def test_a_capacity_that_is_recomputed_counts_the_sequences_of_its_own_pass():
    run_ranks(_passes_of_several_sizes, 2)
