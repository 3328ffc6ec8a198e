"""Layers with a state of either kind in a model: documents, caches, recompute, ranks."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig
from mb_parallel import ParallelDims
from mb_parallel.context_parallel import parallelize_context
from mb_parallel.recompute import apply_recompute
from mb_parallel.testing import run_ranks
from mb_train.inference.decoding import Sampling, continue_tokens
from mb_train.models.attention import BlockContext, CoreAttention
from mb_train.models.bert import Bert
from mb_train.models.config import DeltaSizes, MambaSizes, TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.states import StateContext, StateCore, begins_of, short_convolution
from mb_train.models.t5 import T5
from mb_train.models.transformer import Block
from state_checks import with_gradients
from torch._subclasses import FakeTensorMode

B, S, D = 2, 72, 24
_SIZES = TransformerConfig(
    num_layers=3, hidden_size=D, ffn_size=16, vocab_size=31, num_heads=4, num_kv_heads=2,
    head_size=6, max_positions=128, positions="rope", norm="rmsnorm", activation="swiglu",
    bias=False, init_std=0.2, output_init_std=0.2, output_gate=True,
)  # fmt: skip
MOE = MoEConfig(hidden_size=D, ffn_hidden_size=16, num_experts=4, top_k=2)
MAMBA = MambaSizes(heads=4, width=3, groups=2, state=5, taps=4)
CONFIGS = {
    "delta": replace(
        _SIZES, delta=DeltaSizes(2, 6, 5, 3, 4), delta_layers=(True, True, False), moe=MOE
    ),
    "mamba": replace(
        _SIZES,
        num_layers=5,
        pattern="ME*-M",
        mamba=MAMBA,
        moe=replace(MOE, latent_size=10),
    ),
    "convolution": replace(_SIZES, num_layers=5, pattern="SE*-S", conv_taps=3, moe=MOE),
}
# What experts lose by their balance is not shared by the ranks of a sequence.
DENSE = {
    "delta": replace(CONFIGS["delta"], moe=None),
    "mamba": replace(CONFIGS["mamba"], moe=None, pattern="M-*-M"),
    "convolution": replace(CONFIGS["convolution"], moe=None, pattern="S-*-S"),
}
# One layer of each kind, where a compiler takes seconds for a layer.
ONE_OF_EACH = {
    "delta": replace(DENSE["delta"], num_layers=2, delta_layers=(True, False)),
    "mamba": replace(DENSE["mamba"], num_layers=3, pattern="M-*"),
    "convolution": replace(DENSE["convolution"], num_layers=3, pattern="S-*"),
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_a_convolution_is_torchs_but_for_documents(taps):
    x = torch.randn(B, 20, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, taps, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    leaves = [x, weight, bias]
    padded = F.pad(x, (0, 0, 0, 0, taps - 1, 0))
    own = (weight.flatten(0, 1)[:, None], bias.flatten())
    y = F.conv1d(padded.flatten(2).mT, *own, groups=6).mT.view_as(x)
    found = with_gradients([short_convolution(padded, weight, None, bias)], leaves)
    torch.testing.assert_close(found, with_gradients([F.silu(y)], leaves))
    torch.testing.assert_close(short_convolution(padded, weight, None, bias, silu=False), y)
    begins_BS = torch.zeros(B, 20, dtype=torch.bool)
    begins_BS[0, [1, 2, 9]] = begins_BS[1, 19] = True
    divided = short_convolution(padded, weight, begins_BS, bias)
    for row, ends in enumerate(([1, 2, 9, 20], [19, 20])):
        for begin, end in zip([0, *ends], ends, strict=False):
            alone = F.pad(x[row : row + 1, begin:end], (0, 0, 0, 0, taps - 1, 0))
            found = short_convolution(alone, weight, None, bias)[0]
            torch.testing.assert_close(divided[row, begin:end], found)


@KINDS
@pytest.mark.parametrize("form", ["ends_BN", "segments_BS"])
def test_documents_are_as_if_alone(kind, form):
    torch.manual_seed(0)
    config = replace(DENSE[kind], positions="none")
    model = GPT(config, compute_dtype=torch.float64).double()
    tokens_BS = torch.randint(31, (B, S))
    ends_BN = torch.tensor([[3, 5, 64, S], [64, S, S, S]])
    segments_BS = (torch.arange(S) >= ends_BN[..., None]).sum(1)
    divided = {"ends_BN": ends_BN, "segments_BS": segments_BS}[form]
    weights_BS = torch.rand(B, S, dtype=torch.float64)
    whole = model(tokens_BS, labels_BS=tokens_BS, weights_BS=weights_BS, **{form: divided}).total()
    alone = 0.0
    for row, ends in enumerate(ends_BN.tolist()):
        for begin, end in zip([0, *ends], ends, strict=False):
            if begin < end:
                own = (slice(row, row + 1), slice(begin, end))
                how = {"labels_BS": tokens_BS[own], "weights_BS": weights_BS[own]}
                alone = alone + model(tokens_BS[own], **how).total()
    parameters = list(model.parameters())
    found = [[loss, *torch.autograd.grad(loss, parameters)] for loss in (whole, alone)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)  # the loss is in fp32
    assert torch.equal(
        begins_of(segments_BS), torch.diff(segments_BS, dim=1, prepend=segments_BS[:, :1]) > 0
    )


@KINDS
def test_a_later_token_changes_no_earlier_one(kind):
    torch.manual_seed(0)
    model = GPT(CONFIGS[kind]).eval()
    tokens_BS = torch.randint(31, (B, S))
    other_BS = tokens_BS.clone()
    other_BS[:, 40:] = torch.randint(31, (B, S - 40))
    first, second = model.logits(tokens_BS), model.logits(other_BS)
    torch.testing.assert_close(first[:, :40], second[:, :40])
    assert not torch.allclose(first[:, 40:], second[:, 40:])


@KINDS
def test_nothing_in_plain_pytorch_waits_for_the_device(kind):
    """Which a CUDA graph could not hold: numbers are not known here, and shapes are enough."""
    module = Block(CONFIGS[kind], 0).attention
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(B, S, D, requires_grad=True)
        begins_BS = torch.zeros(B, S, dtype=torch.bool)
        y = module(x, BlockContext(states=StateContext(begins_BS)))
        grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    assert [g.shape for g in grads] == [x.shape, *(p.shape for p in module.parameters())]


@KINDS
@pytest.mark.parametrize("granularity", ["core", "block"])
def test_recompute_changes_no_gradient(kind, granularity):
    x, found = torch.randint(31, (B, S)), []
    for again in (False, True):
        torch.manual_seed(0)
        model = GPT(CONFIGS[kind])
        kinds = StateCore if granularity == "core" else Block
        if again:
            assert apply_recompute([m for m in model.modules() if isinstance(m, kinds)], "full")
        loss = model(x, labels_BS=x, ends_BN=torch.tensor([[9, S]] * B)).total()
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        pytest.param("mamba", False, id="kept-mamba"),
        pytest.param("delta", True, id="recomputed-delta", marks=pytest.mark.slow),
        pytest.param("delta", False, id="kept-delta", marks=pytest.mark.slow),
        pytest.param("mamba", True, id="recomputed-mamba", marks=pytest.mark.slow),
        pytest.param("convolution", False, id="kept-convolution", marks=pytest.mark.slow),
        pytest.param("convolution", True, id="recomputed-convolution", marks=pytest.mark.slow),
    ],
)
def test_blocks_compile_around_the_rule(kind, again):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, x = GPT(ONE_OF_EACH[kind]), torch.randint(31, (B, S))
    found = []
    for compiled in (False, True):
        if compiled and again:
            apply_recompute([m for m in model.modules() if isinstance(m, StateCore)], "full")
        for block in model.stack.blocks.values() if compiled else ():
            block.compile(backend="aot_eager")
        for tokens in (S, 33):
            ends_BN = torch.tensor([[9, tokens]] * B)
            loss = model(x[:, :tokens], labels_BS=x[:, :tokens], ends_BN=ends_BN).total()
            found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(found[2:], found[:2])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2


def _with_gradients(model, tokens_BS, part, ends_BN):
    """The loss of a part of the sequences, and its gradients."""
    own = tokens_BS[:, part]
    loss = model(
        own,
        labels_BS=own,
        weights_BS=torch.full(own.shape, 1 / tokens_BS.numel()),
        positions_BS=torch.arange(tokens_BS.shape[1])[None, part],
        ends_BN=ends_BN,
    ).total()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def _parts_of_sequences(rank, ranks, config, again, compiled):
    mesh = ParallelDims(dp_shard=ranks, cp=ranks).build("cpu")
    tokens_BS = torch.randint(31, (B, S), generator=torch.Generator().manual_seed(1))
    ends_BN = torch.tensor([[9, S], [35, S]])
    torch.manual_seed(0)
    model = GPT(config)
    wanted = _with_gradients(model, tokens_BS, slice(None), ends_BN)
    cores = [m for m in model.modules() if isinstance(m, CoreAttention | StateCore)]
    if again:
        apply_recompute(cores, "full")
    assert parallelize_context(cores, mesh) == len(cores) > 1
    model.parts = ranks
    for block in model.stack.blocks.values() if compiled else ():
        block.compile(backend="aot_eager")
    part = slice(rank * S // ranks, (rank + 1) * S // ranks)
    found = _with_gradients(model, tokens_BS, part, ends_BN)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mesh.all_reduce(got.detach(), "dp"), want, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("kind", "again", "compiled"),
    [
        ("delta", False, False),
        ("mamba", False, False),
        ("convolution", False, False),
        ("delta", True, True),
        pytest.param("mamba", True, True, marks=pytest.mark.slow),
        ("convolution", True, True),
    ],
)
def test_ranks_that_share_sequences_add_up_to_one(kind, again, compiled):
    """Documents too, one of which ends where a part does."""
    config = (ONE_OF_EACH if compiled else DENSE)[kind]
    run_ranks(_parts_of_sequences, 2, config, again, compiled)


@KINDS
def test_what_rows_are_filled_up_with_moves_no_state(kind):
    """From a cache, token by token, rows of unequal length."""
    torch.manual_seed(1)
    model = GPT(CONFIGS[kind]).eval()
    prompts = [[3], [5, 6, 7, 8, 9], list(range(1, 30))]
    how = {"vocab_size": 31, "context": 128, "ends": []}
    greedy = Sampling(temperature=0)

    def of(prompts):
        steps = continue_tokens(model, prompts, greedy, **how)
        return [next(steps) for _ in range(6)]

    with torch.no_grad():
        together = of(prompts)
        for row, prompt in enumerate(prompts):
            for step, (alone,) in zip(together, of([prompt]), strict=True):
                assert step[row].token == alone.token
                torch.testing.assert_close(step[row].logits_V, alone.logits_V)


@pytest.mark.parametrize("groups", [1, 2])
def test_more_ranks_than_groups_share_what_a_group_has_in_common(groups):
    config = replace(DENSE["mamba"], mamba=MAMBA._replace(groups=groups), num_kv_heads=4)
    run_ranks(_parts_of_sequences, 4, config, False, False)


@pytest.mark.parametrize("kind", CONFIGS)
def test_other_models_have_none(kind):
    config = replace(CONFIGS[kind], output_gate=False)
    for build in (lambda c: T5(c, decoder_layers=1), lambda c: Bert(c, binary_head=False)):
        with pytest.raises(ValueError, match=r"no layers with a state for a|whole blocks for a"):
            build(config)
