"""What waits in the host's memory comes back as it was: results are equal to the bit, and the
device holds what two blocks keep."""

import copy
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest
import tiny_gpt
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig, dMoE
from mb_parallel import offload as module
from mb_parallel.expert_parallel import GlobalCapacity, PeerBuffers, PeerDispatcher
from mb_parallel.offload import Offload, apply_offload, evenly_spread, lasting
from mb_parallel.offload_copies import Cargo, Copies
from mb_parallel.recompute import apply_recompute
from mb_parallel.testing import run_ranks
from tiny_gpt import Options, train
from torch import nn

WIDTH = 8
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(width, 3 * width), nn.Dropout(0.3)
        sizes = {"hidden_size": width, "ffn_hidden_size": 16, "num_experts": 3, "top_k": 2}
        self.moe = dMoE(MoEConfig(**sizes, jitter_eps=0.2, init_method_std=0.1))

    def forward(self, x_BSD, table_S=None):
        qkv = self.qkv(x_BSD).unflatten(2, (2, 3, -1))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x_BSD = x_BSD + self.dropout(y.transpose(1, 2).reshape(x_BSD.shape))
        if table_S is not None:
            x_BSD = x_BSD * table_S
        out = self.moe(x_BSD)
        return x_BSD + self.dropout(out.y), out.aux_loss


class Late(Copies):
    """Copies that are made when somebody waits for them; until then their memory is rubbish."""

    def __init__(self):
        super().__init__(CPU)
        self.ways = []  # of those that were begun, with their bytes

    def _copy(self, pairs, way):
        for _, target in pairs:
            target.fill_(0x7F)
        self.ways.append((way, sum(target.nbytes for _, target in pairs)))
        return list(pairs)

    def wait(self, done):
        for source, target in done or ():
            target.copy_(source)


def late(least_numbers=1):
    made = Offload(CPU, least_numbers=least_numbers)
    made.copies = Late()
    return made


@pytest.fixture
def cargos(monkeypatch):
    """All that travel, while they live."""
    alive = weakref.WeakSet()

    class Counted(Cargo):
        def __init__(self, tensor):
            super().__init__(tensor)
            alive.add(self)

    monkeypatch.setattr(module, "Cargo", Counted)
    return alive


def held(cargos):
    """Bytes on the device."""
    return sum(cargo.here.nbytes for cargo in cargos if cargo.here is not None)


def blocks_of(number, width=WIDTH):
    torch.manual_seed(0)
    return nn.ModuleList(Block(width) for _ in range(number))


def run(model, seen=None, device="cpu"):
    """Loss and gradients; `seen` is called when a block has run, there and back."""
    torch.manual_seed(4)
    width = next(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    x = torch.randn(3, 16, width, generator=torch.Generator().manual_seed(1)).to(device)
    x.requires_grad_()
    table = torch.linspace(0.5, 1.5, width, device=device)
    y, loss = x, 0.0
    for block in model:
        y, aux = block(y, table)
        loss = loss + aux
        if seen is not None:
            seen()
            y.register_hook(lambda _: seen())
    loss = loss + y.square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def ahead(model, recompute, backend):
    if recompute is not None:
        apply_recompute(model, recompute)
    for block in model if backend is not None else ():
        block.compile(backend=backend)
    return model


@pytest.mark.parametrize("recompute", [None, "full", "moe", "selective"])
@pytest.mark.parametrize("count", [None, 1, 3])
def test_same_numbers_and_two_blocks_on_the_device(recompute, count, cargos):
    model = blocks_of(5)
    want = run(ahead(copy.deepcopy(model), recompute, None))
    other, offload, most = ahead(copy.deepcopy(model), recompute, None), late(), []
    number = 5 if count is None else count
    assert apply_offload(other, offload, count=count) == number
    assert same(run(other, lambda: most.append(held(cargos))), want)
    each = offload.sent // number
    assert each * number == offload.sent > 0
    assert max(most) <= 2 * each
    if recompute == "full":  # nothing but what the block was given
        assert each == 3 * 16 * WIDTH * 4
    assert not list(cargos)
    assert list(other.state_dict()) == list(model.state_dict())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_compiled_block_gives_what_its_graph_saves(recompute):
    model = blocks_of(3)
    want = run(ahead(copy.deepcopy(model), recompute, "aot_eager"))
    torch._dynamo.reset()
    other, offload = ahead(copy.deepcopy(model), recompute, "aot_eager"), late()
    apply_offload(other, offload, count=2)
    assert same(run(other), want)
    assert offload.sent > 0
    with pytest.raises(ValueError, match="not compiled for parts of them, got a compiled Block"):
        apply_offload(ahead(blocks_of(1), None, "eager"), late(), parts=lambda b: [b.moe])


def test_parts_of_blocks_send_what_they_save_themselves():
    model = blocks_of(3)
    want, sent = run(copy.deepcopy(model)), []
    for parts in (lambda b: [b.qkv], lambda b: [b.moe.experts], lambda b: [b.qkv, b.moe.experts]):
        other, offload = copy.deepcopy(model), late()
        number = apply_offload(other, offload, parts=parts)
        assert number == 3 * len(parts(model[0]))
        assert same(run(other), want)
        sent.append(offload.sent)
    assert sent[0] == 3 * 3 * 16 * WIDTH * 4  # x
    assert sent[2] == sent[0] + sent[1]
    other = copy.deepcopy(model)
    assert apply_offload(other, late(), parts=lambda b: [b.moe] if b is other[1] else []) == 1
    assert same(run(other), want)


class Saves(torch.autograd.Function):
    """Returns the sum of tensors; notes how they came back."""

    came: ClassVar[list] = []

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.stack([t.sum() for t in tensors]).sum()

    @staticmethod
    def backward(ctx, grad):
        Saves.came[:] = ctx.saved_tensors
        return tuple(torch.ones_like(t) * grad for t in Saves.came)


class Block1(nn.Module):
    """Saves what `make` makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(48.0).reshape(6, 8))
        self.register_buffer("buffer", torch.ones(6, 8))
        self.make = make

    def forward(self, x, other=None):
        return Saves.apply(*self.make(self, x, other))


def views(block, x, other):
    x = x * 2  # not what it was given
    return x, x.t(), x[1:, ::2], x[2].expand(4, 8), x.view(torch.int32).view(torch.float32), x[:0]


def test_views_of_a_storage_travel_once_and_come_back_as_they_were():
    block, offload = Block1(views), late()
    apply_offload([block], offload)
    x = torch.randn(6, 8, requires_grad=True)
    loss = block(x)
    offload._leaving.let_go()  # as the next block would
    loss.backward()
    assert offload.sent == x.nbytes
    want = views(block, x.detach(), None)
    for got, expected in zip(Saves.came, want, strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
        assert got.storage_offset() == expected.storage_offset()
    assert len({t.untyped_storage().data_ptr() for t in Saves.came[:-1]}) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda block, x, other: (block.weight,),
        lambda block, x, other: (block.weight.t(), block.weight[1:]),
        lambda block, x, other: (block.weight.double(), block.weight.t().clone().bfloat16().t()),
        lambda block, x, other: (block.weight.detach(), block.buffer * 1.0 if x is None else x[:1]),
        lambda block, x, other: (other, other[1:]),
        lambda block, x, other: (x.sum(), x[0, :4].clone()),  # small
    ],
    ids=["parameter", "view", "cast", "same storage", "given besides", "small"],
)
def test_what_lives_on_stays(make):
    block, offload = Block1(make), late(least_numbers=6)
    apply_offload([block], offload)
    x = torch.randn(1, 4, requires_grad=True)
    block(x, torch.randn(6, 8, requires_grad=True)).backward()
    assert offload.sent == 0


class Turned(nn.Module):
    """A product with a conjugate, which torch writes nowhere: it reads another's storage."""

    def __init__(self):
        super().__init__()
        self.turns = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table):
        turns = torch.view_as_complex(self.turns(x).unflatten(-1, (-1, 2))).conj()
        y = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns * turns.imag
        return x + table * torch.view_as_real(y).flatten(-2), x.new_zeros(())


def test_what_is_read_otherwise_than_it_is_stored_comes_back_so():
    torch.manual_seed(0)
    model = nn.ModuleList(Turned() for _ in range(3))
    want, other, offload = run(copy.deepcopy(model)), copy.deepcopy(model), late()
    apply_offload(other, offload)
    assert same(run(other), want)
    assert offload.sent > 0


def test_what_was_looked_up_in_a_table_travels():
    block, offload = Block1(lambda block, x, other: (block.weight[x], x)), late()
    apply_offload([block], offload)
    rows = torch.tensor([1, 5])
    block(rows).backward()
    assert offload.sent == 2 * 8 * 4 + rows.nbytes


def test_what_lives_on_is_known():
    layer = dMoE(MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=2))
    copied = torch.zeros(3)
    layer.experts.working_copies["w1"] = copied
    place = Mock(size=2, rank=0)
    buffers = PeerBuffers(place)
    buffers._made.append((SimpleNamespace(arena=(arena := torch.zeros(9))), None))
    layer.dispatcher = GlobalCapacity(PeerDispatcher(2, place, buffers), 2, 1.0, place)
    found = list(lasting(nn.Sequential(layer)))
    assert any(each is copied for each in found)
    assert any(each is arena for each in found)
    for parameter in (*layer.parameters(), *layer.buffers()):
        assert any(each is parameter for each in found)


class Written(nn.Module):
    def forward(self, x):
        y = x * 2.0
        z = y.square()  # saves y
        if self.when == "within":
            y.add_(1.0)
        self.y = y
        return z


@pytest.mark.parametrize("least_numbers", [1, 1000], ids=["travels", "stays"])
@pytest.mark.parametrize("when", ["within", "behind", "before the backward pass"])
def test_a_write_into_what_is_kept_is_an_error_as_ever(when, least_numbers):
    first, second, offload = Written(), Written(), late(least_numbers)
    first.when, second.when = when, "never"
    apply_offload([first, second], offload)

    def step():
        z = first(torch.randn(6, 8, requires_grad=True))
        if when != "within":
            first.y.add_(1.0)
        (second(z) if when == "behind" else z).sum().backward()

    with pytest.raises(RuntimeError, match=r"not to change, got one of \(6, 8\) that was written"):
        step()


@pytest.mark.parametrize("least_numbers", [1, 1000], ids=["travels", "stays"])
def test_a_result_that_its_own_graph_keeps_does_not_live_on_by_that(least_numbers):
    block = Block1(lambda block, x, other: (x.exp(),))
    block.forward = lambda x: x.exp()
    apply_offload([block], late(least_numbers))
    y = block(torch.randn(6, 8, requires_grad=True))
    left = weakref.ref(y)
    del y
    assert left() is None


def test_a_pass_that_breaks_off_leaves_nothing_behind(cargos):
    model = blocks_of(3)
    want = run(copy.deepcopy(model))
    other, offload = copy.deepcopy(model), late()
    apply_offload(other, offload)

    def fail(*_):
        raise KeyboardInterrupt

    for place in ("forward", "backward"):
        hook = (
            other[1].moe.register_forward_hook(fail)
            if place == "forward"
            else other[1].qkv.weight.register_hook(fail)
        )
        with pytest.raises(KeyboardInterrupt):
            run(other)
        hook.remove()
        other.zero_grad()
        gc.collect()
        assert same(run(other), want), place
        other.zero_grad()
        assert not list(cargos)
        assert not offload._coming


def test_a_graph_that_is_kept_is_gone_through_again():
    model = blocks_of(3)
    apply_offload(model, late())
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    y = x
    for block in model:
        y, _ = block(y)
    grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_a_block_is_called_back_while_its_successor_is_at_work():
    model, offload, came = blocks_of(4), late(), []
    apply_offload(model, offload, count=3)
    run(model, lambda: came.append(sum(way for way, _ in offload.copies.ways)))
    # Called when a block has run, and when its own backward pass begins: the fourth sends nothing.
    assert came == [0, 0, 0, 0, 0, 1, 2, 3]
    each = offload.sent // 3
    there = [(way, nbytes // each) for way, nbytes in offload.copies.ways]
    # The fourth sends nothing, and calls the third back, which calls the second, and so on.
    assert there == [(0, 1), (0, 1), (0, 1), (0, 0), (1, 1), (1, 1), (1, 1)]


def test_between_blocks_that_send_are_others_behind_which_copies_hide():
    assert [evenly_spread(count, 6) for count in (0, 1, 2, 3, 4, 6, 9)] == [
        [], [0], [0, 3], [0, 2, 4], [0, 1, 3, 4], [*range(6)], [*range(6)],
    ]  # fmt: skip
    model, offload, came = blocks_of(4), late(), []
    apply_offload(model, offload, count=2)
    run(model, lambda: came.append(sum(way for way, _ in offload.copies.ways)))
    # The third, when it begins, calls the first back, which comes while the second is at work.
    assert came == [0, 0, 0, 0, 0, 1, 2, 2]


def test_nothing_is_done_without_gradients():
    model, offload = blocks_of(2), late()
    apply_offload(model, offload)
    x = torch.randn(2, 4, WIDTH)
    with torch.no_grad():
        for block in model:
            x, _ = block(x)
    assert not offload.copies.ways
    assert offload._leaving is None


def test_arguments_are_checked():
    block = blocks_of(1)
    with pytest.raises(ValueError, match="least_numbers of at least 0"):
        Offload(CPU, least_numbers=-1)
    with pytest.raises(ValueError, match="count of at least 0"):
        apply_offload(block, late(), count=-1)
    with pytest.raises(ValueError, match="blocks to be several modules"):
        apply_offload(block[0], late())
    assert apply_offload(block, late(), count=0) == 0


EXPERTS = Options(experts=4, padded=True, dropout=0.1, recompute=False)
LAYOUTS = [
    replace(EXPERTS, pp=2, schedule="gpipe", recompute=True),
    replace(EXPERTS, pp=2, schedule="zbv-zero-bubble", stages_per_rank=2, tied=False),
    replace(EXPERTS, tp=2, sequence_parallel=True, dropout=0.0),
    replace(EXPERTS, dp=2, ep=2, zero_stage=1),
    replace(EXPERTS, dp=2, zero_stage=3, recompute=True),
]
FURTHER = [
    replace(EXPERTS, pp=2),
    replace(EXPERTS, pp=2, schedule="interleaved-1f1b", stages_per_rank=2),
    replace(EXPERTS, pp=2, schedule="interleaved-zero-bubble", stages_per_rank=2, tied=False),
    replace(EXPERTS, dp=2, zero_stage=3),
]


def trained_both_ways(rank, world_size, layouts):
    """Of every layout: whether all is equal with offload and without; bytes sent."""
    found, made = [], []

    def noted(*args, **options):
        made.append(Offload(*args, **options))
        return made[-1]

    tiny_gpt.Offload = noted
    for options in layouts:
        plain, other = (train(rank, world_size, replace(options, offload=o)) for o in (False, True))
        sent = made[-1].sent
        equal = plain["loss"] == other["loss"] and plain["eval"] == other["eval"]
        equal &= same(plain["parameters"].values(), other["parameters"].values())
        for one, two in zip(plain["grads"], other["grads"], strict=True):
            equal &= same(one.values(), two.values())
        found.append((equal, sent))
    return found


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS, pytest.param(FURTHER, marks=pytest.mark.slow)],
    ids=["some", "further"],
)
def test_every_layout_trains_alike(layouts):
    for of_rank in run_ranks(trained_both_ways, 2, layouts, timeout_s=280.0):
        for (equal, sent), options in zip(of_rank, layouts, strict=True):
            assert equal, options
            assert sent > 0, options


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "compiled"])
def test_same_numbers_on_a_gpu(recompute, backend):
    model = blocks_of(5, 64).cuda()
    want = run(ahead(copy.deepcopy(model), recompute, backend), device="cuda")
    again = run(ahead(copy.deepcopy(model), recompute, backend), device="cuda")
    if not same(again, want):
        pytest.skip("this model is not computed alike twice")
    torch._dynamo.reset()
    offload = Offload("cuda", least_numbers=1)
    other = ahead(copy.deepcopy(model), recompute, backend)
    apply_offload(other, offload)
    for _ in range(3):
        other.zero_grad()
        assert same(run(other, device="cuda"), want)
    assert offload.sent > 0


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8192, 32768])
def test_memory_of_a_gpu_falls_to_that_of_two_blocks(rows):
    """And steps after the first pin nothing; rubbish in freed memory does no harm."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.ModuleList(Wide(512) for _ in range(8)).to(device)
    x = torch.randn(rows, 512, device=device)
    most, grads, pinned = [], [], []
    for offload in (None, Offload(device)):
        if offload is not None:
            apply_offload(model, offload)
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = x
            for block in model:
                y = block(y)
                torch.full_like(y, float("nan"))  # takes what was freed
            y.square().mean().backward()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        most.append(peak)
        grads.append([p.grad.clone() for p in model.parameters()])
    assert same(*grads)
    each = rows * 512 * 4 * (1 + 4 + 4)  # x, before and behind the activation
    assert most[0] > 8 * each
    assert most[1] < 5 * each  # two blocks', gradients, what one computes with
    assert pinned[-1] == pinned[-2]
