"""Recompute changes what is kept, not a bit of what comes out, dropout included."""

import copy
import functools
import gc
import weakref
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig, dMoE
from mb_parallel import recompute
from mb_parallel.recompute import apply_recompute
from torch import nn
from torch.utils._pytree import tree_leaves

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.3)
        sizes = {"hidden_size": WIDTH, "ffn_hidden_size": 16, "num_experts": 3, "top_k": 2}
        self.moe = dMoE(MoEConfig(**sizes, jitter_eps=0.2, init_method_std=0.5))
        self.calls = 0

    def forward(self, x_BSD):
        self.calls += 1
        q, k, v = self.qkv(x_BSD).view(*x_BSD.shape[:2], 2, 3, WIDTH // 2).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x_BSD = x_BSD + self.dropout(y.transpose(1, 2).reshape(x_BSD.shape))
        out = self.moe(x_BSD)
        return x_BSD + self.dropout(out.y), out.aux_loss


def run(model):
    """Loss, gradients, and bytes kept for the backward."""
    torch.manual_seed(4)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    x, loss = torch.randn(3, 16, WIDTH, generator=torch.Generator().manual_seed(1)), 0.0
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x
        for block in model:
            y, aux = block(y)
            loss = loss + aux
        loss = loss + y.square().mean()
    loss.backward()
    bytes_kept = sum(n for at, n in kept.items() if at not in parameters)
    return loss.detach(), [x.grad, *(p.grad for p in model.parameters())], bytes_kept


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3))


@pytest.mark.parametrize(
    ("mode", "every", "modules"),
    [("full", 1, 3), ("full", 2, 2), ("moe", 1, 3), ("selective", 1, 3)],
)
def test_same_numbers_less_kept(model, mode, every, modules):
    other = copy.deepcopy(model)
    names = list(other.state_dict())
    assert apply_recompute(other, mode, every=every) == modules
    loss, grads, kept = run(model)
    got_loss, got_grads, got_kept = run(other)
    assert torch.equal(got_loss, loss)
    for a, b in zip(got_grads, grads, strict=True):
        assert torch.equal(a, b)
    assert got_kept < 0.95 * kept
    assert list(other.state_dict()) == names
    assert sum(block.calls for block in other) == 3 + (modules if mode == "full" else 0)
    with torch.no_grad():
        run_nothing = [block(torch.ones(1, 2, WIDTH)) for block in other]
    assert len(run_nothing) == 3


class Named(nn.Module):
    """Called by name, as transformers' blocks are, and calls attention so."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, *, states, scale=1.0, debug=None):
        q, k, v = self.qkv(states * scale).unflatten(2, (3, 2, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(query=q, key=k, value=v, dropout_p=0.5)
        return states + y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_tensors_given_by_name_are_seen_by_torch(mode, monkeypatch):
    """It puts back the streams of the devices of those that are in its positional arguments."""
    seen, of_torch = [], recompute.checkpoint

    def checkpoint(run, *args, **options):
        seen.append(len({leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}))
        return of_torch(run, *args, **options)

    monkeypatch.setattr(recompute, "checkpoint", checkpoint)
    compare_by_name(mode, "cpu")
    assert seen == [2 if mode == "full" else 3]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_of_a_block_called_by_name_drops_alike_again_on_a_gpu(mode):
    compare_by_name(mode, "cuda")


def compare_by_name(mode, device):
    """Gradients of a block that recomputes with those of one that does not."""
    block = Named().to(device)
    other = copy.deepcopy(block)
    apply_recompute([other], mode)
    x, grads = torch.randn(2, 16, WIDTH, device=device), []
    for one in (block, other):
        torch.manual_seed(3)
        loss = one(states=x, scale=torch.full((), 2.0, device=device), debug=False).square().sum()
        torch.rand(7, device=device)  # the streams go on
        loss.backward()
        grads.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("mode", ["full", "moe"])
def test_a_block_whose_input_was_written_into_is_an_error(model, mode, by_name):
    block = model[0] if mode == "full" else model[0].moe
    apply_recompute(model, mode)
    x = torch.randn(3, 16, WIDTH, requires_grad=True)
    stream = x * 1
    y, *_ = block(**{"x_BSD" if mode == "full" else "x": stream}) if by_name else block(stream)
    stream += y.detach()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Collecting(nn.Linear):
    def forward(self, x, found, *, told):
        y = super().forward(x)
        found.append(y.square().sum())
        told["calls"] = told.get("calls", 0) + 1
        return y.tanh()


def test_what_a_block_puts_into_a_list_is_there_once():
    """A loss, say, whose gradient goes back through what is computed again."""
    blocks = [Collecting(4, 4), Collecting(4, 4)]

    def loss_and_grads():
        x, found, told = torch.linspace(-1, 1, 8).view(2, 4), [], {}
        for block in blocks:
            block.zero_grad()
            x = block(x, found, told=told)
        (sum(found) + x.sum()).backward()
        assert (len(found), told) == (2, {"calls": 2})
        return [*found, *(p.grad for block in blocks for p in block.parameters())]

    expected = loss_and_grads()
    apply_recompute(blocks, "full")
    torch.testing.assert_close(loss_and_grads(), expected, rtol=0, atol=0)


def test_full_keeps_least(model):
    kept = {}
    for mode in ("full", "moe", "selective"):
        other = copy.deepcopy(model)
        apply_recompute(other, mode)
        kept[mode] = run(other)[2]
    assert kept["full"] < min(kept["moe"], kept["selective"])


def test_a_compiled_block_recomputes(model):
    for mode in ("full", "selective"):
        plain, other = (copy.deepcopy(model[:1]) for _ in "ab")
        for block in (*plain, *other):  # what is drawn in a graph is drawn otherwise
            block.dropout.p = 0.0
            block.moe = nn.Identity()
            block.forward = lambda x, b=block: (Attention.forward(b, x), x.sum() * 0)
        apply_recompute(other, mode)
        other[0].compile(backend="aot_eager", fullgraph=True)
        for a, b in zip(run(plain)[1], run(other)[1], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wrapped", ["blocks", "inside", "selective"])
def test_blocks_alike_are_compiled_once(wrapped):
    """Of a deep model the compiler takes eight and leaves the others as they are."""

    class Unflattened(Attention):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x_BSD):
            q, k, v = self.qkv(x_BSD).unflatten(2, (3, 2, -1)).transpose(1, 3).unbind(2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x_BSD + y.transpose(1, 2).flatten(2)

    blocks = [nn.Sequential(Unflattened()) for _ in range(4)]
    expected = run_all(copy.deepcopy(blocks))
    inside = [block[0] for block in blocks]
    apply_recompute(inside if wrapped == "inside" else blocks,
                    "selective" if wrapped == "selective" else "full")  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for got, wanted in zip(run_all(blocks), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def run_all(blocks):
    """The output of one block after the other, and all gradients."""
    torch.manual_seed(0)
    y = x = torch.randn(2, 6, WIDTH, requires_grad=True)
    for block in blocks:
        y = block(y)
    parameters = [p for block in blocks for p in block.parameters()]
    return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]


class Attention(nn.Module):
    def forward(self, x_BSD):
        q, k, v = self.qkv(x_BSD).view(*x_BSD.shape[:2], 2, 3, WIDTH // 2).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BSD + y.transpose(1, 2).reshape(x_BSD.shape)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_arguments_by_name_reach_the_block(mode):
    class Scaled(nn.Linear):
        def forward(self, x, *, debug, preserve_rng_state):
            x = F.scaled_dot_product_attention(x, x, value=x)
            return super().forward(x) * debug + preserve_rng_state

    block = Scaled(2, 2)
    x, given = torch.eye(3, 2), {"debug": torch.tensor(3.0), "preserve_rng_state": 5}
    expected = block(x, **given)
    apply_recompute([block], mode)
    assert torch.equal(block(x, **given), expected)
    with torch.no_grad():
        assert torch.equal(block(x, **given), expected)


def test_a_layer_that_blocks_share_is_computed_twice_and_not_thrice(model):
    model[1].moe = model[0].moe
    assert apply_recompute([*model, model[2]], "moe") == 2
    calls, experts = [], model[0].moe.experts
    experts.register_forward_hook(lambda *_: calls.append(1))
    run(model)
    assert len(calls) == 4  # in two blocks, forward and backward


def test_what_cannot_be_is_refused(model):
    with pytest.raises(ValueError, match="one of full, moe, selective, got 'some'"):
        apply_recompute(model, "some")
    with pytest.raises(ValueError, match="every to be an integer >= 1, got 0"):
        apply_recompute(model, "full", every=0)
    with pytest.raises(ValueError, match="got none"):
        apply_recompute([nn.Linear(2, 2)], "moe")
    linear = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"several modules, got one Linear"):
        apply_recompute(linear, "full")
    apply_recompute([linear], "selective")
    with pytest.raises(ValueError, match=r"scaled_dot_product_attention.*Linear"):
        linear(torch.ones(2))


@pytest.mark.parametrize("second", ["full", "selective"])
@pytest.mark.parametrize("first", ["full", "selective"])
def test_what_recomputes_already_is_refused(model, first, second):
    apply_recompute(model, first)
    with pytest.raises(ValueError, match=f"do not recompute yet, got a .* with mode {first!r}"):
        apply_recompute(model, second)


def test_attention_and_experts_of_a_block_recompute(model):
    loss, grads, kept = run(copy.deepcopy(model))
    apply_recompute(model, "selective")
    apply_recompute(model, "moe")
    got_loss, got_grads, got_kept = run(model)
    torch.testing.assert_close([got_loss, *got_grads], [loss, *grads], rtol=0, atol=0)
    assert got_kept < 0.9 * kept


def test_a_forward_that_was_put_on_a_module_goes_with_it():
    """It may hold a mesh, and so the threads of its groups."""
    module = nn.Linear(2, 2)

    def forward(self, x):
        return F.linear(x, self.weight)

    module.forward = MethodType(forward, module)
    apply_recompute([module], mode="full")
    held = weakref.ref(forward)
    del module, forward
    gc.collect()
    assert held() is None


def test_a_forward_that_wraps_another_is_called_too():
    """As tensor parallelism's do, of a class whose own forward was wrapped before."""
    apply_recompute([nn.Linear(2, 2)], mode="full")
    module = nn.Linear(2, 2)

    @functools.wraps(nn.Linear.forward)
    def doubled(self, x):
        return 2 * nn.Linear.forward(self, x)

    module.forward = MethodType(doubled, module)
    apply_recompute([module], mode="full")
    x = torch.randn(3, 2)
    assert torch.equal(module(x), 2 * F.linear(x, module.weight, module.bias))
