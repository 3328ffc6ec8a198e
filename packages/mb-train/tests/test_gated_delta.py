"""Layers with a state: the rule token by token, documents, caches, what kernels are given."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from mb_train.assembly.optimizer import parameter_groups
from mb_train.config import TrainConfig
from mb_train.models import gated_delta
from mb_train.models.attention import BlockContext
from mb_train.models.cache import KVCache
from mb_train.models.config import DeltaSizes, TransformerConfig
from mb_train.models.delta_net import (
    GatedDeltaNet,
    GatedNorm,
)
from mb_train.models.gated_delta import (
    delta_note,
    gated_delta_rule,
    installed_kernel,
    unit_length,
)
from mb_train.models.gpt import GPT
from mb_train.models.mtp import layers_of_module
from mb_train.models.states import StateContext
from mb_train.models.transformer import Block
from mb_train.tasks.architecture import transformer_config
from state_checks import documents, with_gradients

B, S, D = 2, 70, 24
SIZES = DeltaSizes(key_heads=2, value_heads=6, key=5, value=3, taps=4)


def config_of(**change):
    """Layers 0 and 1 have a state, layer 2 attends."""
    sizes = {
        "num_layers": 3, "hidden_size": D, "ffn_size": 16, "vocab_size": 31, "num_heads": 4,
        "num_kv_heads": 2, "head_size": 6, "max_positions": 128, "positions": "rope",
        "norm": "rmsnorm", "activation": "swiglu", "bias": False, "init_std": 0.2,
        "output_init_std": 0.2, "output_gate": True, "delta": SIZES,
        "delta_layers": (True, True, False),
    }  # fmt: skip
    return TransformerConfig(**sizes | change)


def slow(q, k, v, decay, beta, begins_BS=None, state=None):
    """The rule as its definition says it, one token after the other."""
    R, C = v.shape[2] // k.shape[2], k.shape[3]
    s_BHCV = v.new_zeros(*v.shape[:1], v.shape[2], C, v.shape[3]) if state is None else state
    found = []
    for t in range(v.shape[1]):
        k_BHC, q_BHC = (x[:, t].repeat_interleave(R, dim=1) for x in (k, q))
        if begins_BS is not None:
            s_BHCV = s_BHCV * ~begins_BS[:, t, None, None, None]
        s_BHCV = s_BHCV * decay[:, t, :, None, None].exp()
        held_BHV = torch.einsum("bhc,bhcv->bhv", k_BHC, s_BHCV)
        written_BHV = beta[:, t, :, None] * (v[:, t] - held_BHV)
        s_BHCV = s_BHCV + torch.einsum("bhc,bhv->bhcv", k_BHC, written_BHV)
        found.append(torch.einsum("bhc,bhcv->bhv", q_BHC, s_BHCV) / C**0.5)
    return torch.stack(found, dim=1), s_BHCV


def inputs(tokens, dtype=torch.float64, *, fading=3.0, sizes=SIZES, device="cpu"):
    """Of the rule: queries, keys, values, decays, shares to write, a state."""
    generator = torch.Generator().manual_seed(tokens)
    G, H, C, V, _ = sizes

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (unit_length(normal(B, tokens, G, C)) for _ in range(2))
    decay = -fading * torch.rand(B, tokens, H, generator=generator, dtype=torch.float64)
    beta = normal(B, tokens, H).sigmoid()
    found = [q, k, normal(B, tokens, H, V), decay, beta, normal(B, H, C, V)]
    kept = [torch.float64 if dtype == torch.float64 else torch.float32] * 3
    dtypes = [dtype] * 3 + kept  # decays, shares and states are in fp32 beside 16 bits
    return [
        x.to(device, d).requires_grad_() for x, d in zip(found, dtypes, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_are_what_the_loop_computes(tokens, divided):
    leaves = inputs(tokens)
    begins_BS = documents(tokens) if divided else None
    *others, state = leaves
    chunked = gated_delta_rule(*others, StateContext(begins_BS), state_BHCV=state)
    found = with_gradients(chunked, leaves)
    want = with_gradients(slow(*others, begins_BS, state), leaves)
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


def test_without_a_state_it_is_zero_before():
    leaves = inputs(70)[:5]
    found = gated_delta_rule(*leaves, StateContext())
    torch.testing.assert_close(found, slow(*leaves), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("fading", [0.1, 30.0])
def test_in_fp32_heads_that_fade_fast_lose_nothing(fading):
    """Sums of a chunk's decays are in the hundreds, where fp32 knows four digits behind the dot."""
    leaves = inputs(64, torch.float32, fading=fading)
    found = with_gradients(gated_delta_rule(*leaves[:5], StateContext()), leaves[:5])
    exact = [x.detach().double().requires_grad_() for x in leaves[:5]]
    for got, want in zip(found, with_gradients(slow(*exact), exact), strict=True):
        assert float(((got - want).norm() / want.norm()).detach()) < 1e-6


# Of keys, decays, and shares to write.
EXTREMES = {
    "nothing written": lambda k, decay, beta: (k, decay, 0 * beta),
    "all written": lambda k, decay, beta: (k, decay, 0 * beta + 1),
    "some keys of zero": lambda k, decay, beta: (k * (decay[..., :1, None] < -1), decay, beta),
    "one key": lambda k, decay, beta: (0 * k + k[:, :1], decay, 0 * beta + 1),
    "nothing fades": lambda k, decay, beta: (k, 0 * decay, beta),
    "all is forgotten": lambda k, decay, beta: (k, 1e5 * decay, beta),
    "some tokens forget": lambda k, decay, beta: (
        k, torch.where(decay < -2, 1e4, 1e-6) * decay, beta,
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", EXTREMES.values(), ids=EXTREMES)
def test_at_the_ends_of_their_ranges(change):
    def computed(leaves, rule, *more):
        q, k, v, *gates = leaves
        k, *gates = change(k, *gates)
        return with_gradients(rule(q, k, v, *gates, *more), leaves)

    leaves = inputs(100, torch.float32)[:5]
    found = computed(leaves, gated_delta_rule, StateContext())
    exact = [x.detach().double().requires_grad_() for x in leaves]
    for got, want in zip(found, computed(exact, slow), strict=True):
        assert bool(got.isfinite().all())
        assert float(((got - want).norm() / want.norm().clamp(min=0.1)).detach()) < 1e-5


def test_sixteen_bits_are_computed_in_fp32():
    leaves = inputs(200, torch.bfloat16)
    y, state = gated_delta_rule(*leaves[:5], StateContext())
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    want, _ = slow(*(x.double() for x in leaves[:5]))
    torch.testing.assert_close(y, want.bfloat16(), rtol=8e-3, atol=1e-5)


def test_value_heads_that_share_no_keys_evenly():
    q, k, v, decay, beta, _ = inputs(3)
    with pytest.raises(ValueError, match="to divide the value heads, got 2 and 5"):
        gated_delta_rule(q, k, v[:, :, :5], decay[..., :5], beta[..., :5], StateContext())
    with pytest.raises(ValueError, match="to divide their value heads, got 2 and 5"):
        config_of(delta=SIZES._replace(value_heads=5))


def stand_in(calls):
    """What is called as flash-linear-attention's kernel is, and computes as the loop does."""

    def kernel(q, k, v, *, g, beta, initial_state, output_final_state):
        assert all(x.is_contiguous() for x in (q, k, v))
        calls.append(output_final_state)
        y, state = slow(q, k, v, g, beta, None, initial_state)
        return y, state if output_final_state else None

    return kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_forgets_where_documents_begin(dtype):
    *leaves, state = inputs(130, dtype)
    calls, begins_BS = [], documents(130)
    context = StateContext(begins_BS, stand_in(calls))
    y, none = gated_delta_rule(*leaves, context)
    assert none is None
    want, _ = gated_delta_rule(*leaves, StateContext(begins_BS))
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
    found = gated_delta_rule(*leaves, context, state_BHCV=state)
    want = gated_delta_rule(*leaves, StateContext(begins_BS), state_BHCV=state)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert calls == [False, True]
    if dtype == torch.float32:  # not a bit of another document
        place = int(begins_BS[0].nonzero()[-1])
        (grad,) = torch.autograd.grad(y[0, place:].sum(), leaves[2])
        assert not grad[0, :place].any()
        assert grad[0, place:].any()


@pytest.mark.parametrize(
    ("version", "taken"), [("0.5.9", False), ("0.6.0", True), ("1.0.dev1", True), ("0.6rc1", True)]
)
def test_an_old_library_is_none(monkeypatch, version, taken):
    """It would take as many key heads as value heads for granted."""
    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule")
    modules = {name: types.ModuleType(name) for name in names}
    modules["fla"].__version__ = version
    modules[names[-1]].chunk_gated_delta_rule = len
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    installed_kernel.cache_clear()
    assert installed_kernel() == ((len, version) if taken else None)
    installed_kernel.cache_clear()


def test_which_way_is_taken_is_told(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(gated_delta, "_is_hopper", lambda _: False)
    assert delta_note(128, cpu) == "gated delta rule: in plain PyTorch"
    installed_kernel.cache_clear()
    monkeypatch.setattr(gated_delta, "installed_kernel", lambda: None)
    assert delta_note(128, gpu).endswith("which is slow; the extra mb-train[delta] has kernels")
    monkeypatch.setattr(gated_delta, "installed_kernel", lambda: (len, "0.6.0"))
    assert gated_delta.delta_kernel(128, gpu) is len
    assert gated_delta.delta_kernel(128, cpu) is None
    assert delta_note(128, gpu).endswith("the kernels of flash-linear-attention 0.6.0")
    assert delta_note(257, gpu).endswith("in plain PyTorch, for keys wider than 256")
    monkeypatch.setattr(gated_delta, "_is_hopper", lambda _: True)
    for release, taken in (
        ("3.6.0", False),
        ("3.7.0", False),
        ("3.7.1+git1", True),
        ("3.10", True),
    ):
        monkeypatch.setattr(gated_delta, "version", lambda _, release=release: release)
        gated_delta._triton_release.cache_clear()
        assert (gated_delta.delta_kernel(128, gpu) is len) == taken
        assert delta_note(128, gpu).endswith("ask for Triton 3.7.1, torch 2.13's") != taken
    gated_delta._triton_release.cache_clear()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert gated_delta.delta_kernel(128, gpu) is None
    assert delta_note(128, gpu).endswith("in plain PyTorch, which is deterministic")


def test_a_layer_is_its_parts():
    """Of rows that stand apart, by head."""
    torch.manual_seed(0)
    module = GatedDeltaNet(config_of()).double()
    with torch.no_grad():
        for parameter in (module.norm.weight, module.gates.dt_bias):
            parameter.add_(torch.randn_like(parameter))
    G, H, C, V, taps = SIZES
    R, x = H // G, torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    rows = module.qkvz.weight.unflatten(0, (G, 2 * C + 2 * R * V)).split([C, C, R * V, R * V], 1)
    filters = module.conv.weight.unflatten(0, (G, -1)).split([C, C, R * V], 1)

    def mixed(part):
        own = F.linear(x, rows[part].flatten(0, 1))
        seen = F.pad(own, (0, 0, taps - 1, 0)).unfold(1, taps, 1)
        return F.silu((seen * filters[part].flatten(0, 1)).sum(-1))

    q, k = (mixed(part).unflatten(2, (G, C)) for part in (0, 1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v, z = mixed(2).unflatten(2, (H, V)), F.linear(x, rows[3].flatten(0, 1)).unflatten(2, (H, V))
    b, a = (
        F.linear(x, w.flatten(0, 1)) for w in module.ba.weight.unflatten(0, (G, 2, R)).unbind(1)
    )
    decay = -module.gates.A_log.exp() * (1 + (a + module.gates.dt_bias).exp()).log()
    y, _ = slow(q, k, v, decay, 1 / (1 + (-b).exp()))
    y = y / (y.square().mean(-1, keepdim=True) + module.norm.eps).sqrt() * module.norm.weight
    want = module.out((y * z / (1 + (-z).exp())).flatten(2))
    leaves = [x, *module.parameters()]
    found = with_gradients([module(x, BlockContext())], leaves)
    torch.testing.assert_close(found, with_gradients([want], leaves), rtol=1e-9, atol=1e-10)


def test_what_it_begins_with():
    config = config_of(delta=DeltaSizes(8, 512, 4, 4, 4))
    module = GatedDeltaNet(config)
    rates = module.gates.A_log.exp()
    assert (float(rates.min()) >= 1, float(rates.max()) <= 16) == (True, True)
    assert abs(float(rates.mean()) - 8.5) < 0.7
    assert bool((module.gates.dt_bias == 1).all())
    assert float(module.conv.weight.abs().max()) <= 0.5 < 2.01 * float(module.conv.weight.max())
    assert {name for name, p in module.named_parameters() if p.dtype != torch.float32} == set()
    assert not any("bias" in name for name, _ in module.named_parameters() if "dt_" not in name)


def test_gates_are_not_rounded():
    """In 16 bits they are as of the same numbers in 32; a norm's gate too."""
    gates = GatedDeltaNet(config_of()).gates
    b, a = torch.randn(2, B, S, 6, dtype=torch.bfloat16)
    found = gates(b, a)
    torch.testing.assert_close(found, gates(b.float(), a.float()), rtol=0, atol=0)
    assert {x.dtype for x in found} == {torch.float32}
    norm, (y, z) = GatedNorm(8, 1e-6), torch.randn(2, 3, 8).bfloat16()
    want = (F.rms_norm(y, (8,), eps=1e-6).float() * F.silu(z.float())).bfloat16()
    torch.testing.assert_close(norm(y, z), want, rtol=0, atol=0)


def test_which_layers_have_a_state_is_by_their_number_in_the_whole_model():
    model = GPT(config_of(mtp_modules=1))
    model.keep(range(1, 3), first=False, last=True)
    kinds = {n: isinstance(b.attention, GatedDeltaNet) for n, b in model.stack.blocks.items()}
    assert kinds == {"1": True, "2": False}
    for last in (True, False):  # a module for further tokens is a layer like the last
        of_module = layers_of_module(config_of(delta_layers=(not last, True, last)))
        assert of_module.delta_layers == (last,)
        assert isinstance(Block(of_module, 0).attention, GatedDeltaNet) == last
    assert all(map(config_of(delta_layers=None).has_state, range(3)))


RUN = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
    "micro_batch_size": 2, "train_iters": 2, "lr": 1e-3,
    "experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("every", "states"),
    [(None, "1111"), (1, "0000"), (2, "1010"), (3, "1101"), (4, "1110"), (5, "1111")],
)
def test_every_nth_layer_attends(every, states):
    config = transformer_config(TrainConfig(**RUN, linear_attention_freq=every), 64)
    assert "".join(str(int(config.has_state(layer))) for layer in range(4)) == states
    assert (config.delta is None) == (every == 1)


def test_what_decays_and_what_is_a_matrix():
    fields = RUN | {"linear_attention_freq": 2}
    model = GPT(transformer_config(TrainConfig(**fields), 64))
    of = {id(p): name for name, p in model.named_parameters()}
    inside = "stack.blocks.0.attention."

    def names(config, **about):
        groups = parameter_groups([model], config)
        chosen = [g for g in groups if all(g.get(k) == v for k, v in about.items())]
        found = {of[id(p)] for g in chosen for p in g["params"]}
        return {name.removeprefix(inside) for name in found if name.startswith(inside)}

    vectors = {"gates.A_log", "gates.dt_bias", "norm.weight"}
    maps = {"qkvz.weight", "ba.weight", "out.weight"}
    adam, muon = TrainConfig(**fields), TrainConfig(**fields, optimizer="muon")
    assert names(adam, decays=False) == vectors
    assert names(adam, decays=True) == maps | {"conv.weight"}
    assert names(muon, muon=True) == maps
    assert names(muon, muon=False, decays=True) == {"conv.weight"}
    assert names(muon, muon=True, fused=(8, 8, 8, 8)) == {"qkvz.weight"}
    assert names(muon, muon=True, fused=(2, 2)) == {"ba.weight"}


def test_in_fp8_the_gates_maps_are_not():
    block = Block(config_of(fp8=True), 0)
    maps = {name: block.attention.get_submodule(name).fp8 for name in ("qkvz", "ba", "out")}
    assert maps == {"qkvz": True, "ba": False, "out": True}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"context_parallel_size": 4},
            "--linear-num-key-heads to be a multiple of --context-parallel-size 4, .*, got 2",
        ),
        (
            {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
            "--linear-num-key-heads .*-size 2 x --tensor-model-parallel-size 2, .* got 2",
        ),
        ({"model": "bert"}, "--model gpt with --experimental-attention-variant .*, got bert"),
        ({"model": "t5", "decoder_seq_length": 16}, "--model gpt with --experimental.*got t5"),
        ({"linear_num_value_heads": 3}, "to divide --linear-num-value-heads, got 2 and 3"),
        ({"experimental_attention_variant": "dsa"}, "to be one of gated_delta_net, got 'dsa'"),
        ({"linear_conv_kernel_dim": 0}, "--linear-conv-kernel-dim above 0, got 0"),
    ],
    ids=str,
)
def test_where_they_cannot_be_is_said(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**RUN | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200, 1000])
def test_kernels_are_what_plain_pytorch_computes(tokens, divided, dtype):
    """flash-linear-attention's, outputs and gradients, with a state and without."""
    found = installed_kernel()
    if found is None:
        pytest.skip("needs flash-linear-attention: pip install fla-core")
    sizes = DeltaSizes(2, 4, 64, 128, 4)
    leaves = inputs(tokens, dtype, sizes=sizes, device="cuda")
    begins_BS = documents(tokens).cuda() if divided else None
    exact = [x.detach().double().requires_grad_() for x in leaves]
    for count in (5, 6):
        state = {"state_BHCV": leaves[5]} if count == 6 else {}
        there = {"state_BHCV": exact[5]} if count == 6 else {}
        y = gated_delta_rule(*leaves[:5], StateContext(begins_BS, found[0]), **state)
        want = gated_delta_rule(*exact[:5], StateContext(begins_BS), **there)
        outputs = slice(2 if count == 6 else 1)
        got = with_gradients(y[outputs], leaves[:count])
        for one, other in zip(got, with_gradients(want[outputs], exact[:count]), strict=True):
            assert bool(one.isfinite().all())
            error = float((one - other).detach().norm() / other.detach().norm().clamp(min=0.1))
            # Where fp32 is multiplied as TF32, and sums of decays are in fp32.
            assert error < (3e-2 if dtype == torch.bfloat16 else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_is_the_same_by_kernels_and_without(monkeypatch, compiled):
    """A step's loss and gradients, of packed documents; and going on from a cache."""
    if installed_kernel() is None:
        pytest.skip("needs flash-linear-attention: pip install fla-core")
    config = config_of(delta=DeltaSizes(2, 4, 32, 32, 4), positions="none")
    torch.manual_seed(0)
    model = GPT(config, compute_dtype=torch.bfloat16).cuda()
    tokens_BS = torch.randint(31, (B, S)).cuda()
    ends_BN = torch.tensor([[9, S], [64, S]]).cuda()
    found = []
    for kernel in (True, False):
        if not kernel:
            monkeypatch.setattr("mb_train.models.gpt.delta_kernel", lambda *_: None)
        if compiled:
            torch._dynamo.reset()
            for block in model.stack.blocks.values():
                block.compile()
        loss = model(tokens_BS, labels_BS=tokens_BS, ends_BN=ends_BN).total()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        cache = KVCache(B, tokens_BS.device)
        cache.reserve(30)
        with torch.no_grad():
            logits = [
                model.go_on(tokens_BS[:, begin:end], torch.full((B,), end - begin).cuda(), cache)
                for begin, end in ((0, 9), (9, 10), (10, 30))
            ]
        together = torch.cat([grad.flatten() for grad in grads])
        found.append([loss.detach(), torch.cat(logits), together])
    for got, want in zip(*found, strict=True):
        assert float((got - want).norm() / want.norm()) < 3e-2
