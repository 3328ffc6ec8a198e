"""Gates of attention's output and layers without positions: against loops, and transformers."""

import math

import pytest
import torch
from mb_layers import MoEConfig
from mb_parallel.recompute import apply_recompute
from mb_train.models.attention import Attention, BlockContext, CoreAttention
from mb_train.models.bert import Bert
from mb_train.models.config import LatentSizes, TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.mtp import layers_of_module
from mb_train.models.rotary import rotary_tables
from mb_train.models.segments import seen
from mb_train.models.t5 import T5
from mb_train.models.transformer import Block
from transformers import AfmoeConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeAttention

B, S, D, C = 2, 6, 20, 4


def config_of(**change) -> TransformerConfig:
    sizes = {
        "num_layers": 4, "hidden_size": D, "ffn_size": 24, "vocab_size": 31, "num_heads": 6,
        "num_kv_heads": 2, "head_size": C, "max_positions": 16, "positions": "rope",
        "init_std": 0.4, "output_init_std": 0.4, "output_gate": True,
        "rope_layers": (True, False, True, True),
    }  # fmt: skip
    return TransformerConfig(**sizes | change)


def turned(x_C, place):
    """A head's channels, each pair by its own angle."""
    half, found = len(x_C) // 2, [None] * len(x_C)
    for pair in range(half):
        angle = place * 10_000 ** (-pair / half)
        a, b, cos, sin = x_C[pair], x_C[pair + half], math.cos(angle), math.sin(angle)
        found[pair], found[pair + half] = a * cos - b * sin, b * cos + a * sin
    return torch.stack(found)


def normed(x, norm):
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def reference(module, x, config, layer):
    """y_BSD, token by token and head by head, of maps that stand apart."""
    H, G, rotates = config.num_heads, config.num_kv_heads, config.rotates(layer)
    R, window = H // G, config.window_of(layer)
    rows = {"q": [], "gate": [], "k": [], "v": []}  # of heads, from group to group
    place = 0
    for _ in range(G):
        for part, heads in (("q", R), ("gate", R), ("k", 1), ("v", 1)):
            for _ in range(heads):
                rows[part].append(slice(place, place + C))
                place += C
    assert place == len(module.qkv.weight)

    def mapped(part, head, hidden):
        own = rows[part][head]
        y = module.qkv.weight[own] @ hidden
        return y if module.qkv.bias is None else y + module.qkv.bias[own]

    def ready(part, head, hidden, s):
        y = mapped(part, head, hidden)
        norm = module.norm_q if part == "q" else module.norm_k
        y = y if norm is None else normed(y, norm)
        return turned(y, s) if rotates else y

    found = []
    for b in range(B):
        for s in range(S):
            heads = []
            for h in range(H):
                q, places = ready("q", h, x[b, s], s), range(s + 1)
                if window is not None:
                    places = range(max(s - window, 0), s + 1)
                keys = [ready("k", h // R, x[b, t], t) for t in places]
                scores = torch.stack([q @ k for k in keys]) / math.sqrt(C)
                weights = scores.softmax(0)
                if module.sinks is not None:
                    weights = torch.cat([scores, module.sinks[h : h + 1]]).softmax(0)[:-1]
                values = (mapped("v", h // R, x[b, t]) for t in places)
                y = sum(w * v for w, v in zip(weights, values, strict=True))
                gate = mapped("gate", h, x[b, s])
                heads.append(y / (1 + (-gate).exp()))
            y = module.out.weight @ torch.cat(heads)
            found.append(y if module.out.bias is None else y + module.out.bias)
    return torch.stack(found).view(B, S, D)


CASES = {
    "grouped": {},
    "no groups, no bias": {"num_kv_heads": 6, "bias": False},
    "one group, bias of queries alone": {"num_kv_heads": 1, "bias": False, "qkv_bias": True},
    "norms": {"norm": "rmsnorm", "qk_norm": "head"},
    "windows and sinks": {"window": 2, "softmax": "learnable"},
}


@pytest.mark.parametrize("layer", [0, 1], ids=["rotated", "without positions"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_loops_compute(case, layer):
    config = config_of(**CASES[case])
    torch.manual_seed(1)
    module = Block(config, layer).attention.double()
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.ndim == 1):
            parameter.add_(0.5 * torch.randn_like(parameter))
    x = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(B, S, D, dtype=torch.float64)
    places_1S = torch.arange(S)[None]
    masks = {} if config.plain_attention else seen(config, None, places_1S, torch.float64)
    context = BlockContext(**masks, rope=rotary_tables(config, places_1S))
    names, leaves = zip(("x", x), *module.named_parameters(), strict=True)
    found = []
    for y in (module(x, context), reference(module, x, config, layer)):
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    for name, got, want in zip(["y", *names], *found, strict=True):
        # Angles, rotations and gates are in fp32.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m)


def test_a_gate_is_that_of_afmoe_in_16_bits_too():
    """Whose rows stand apart, and whose sigmoid is in 16 bits where ours is in 32."""
    config = config_of(norm="rmsnorm", qk_norm="head", bias=False, init_std=0.2)
    about = AfmoeConfig(
        hidden_size=D, num_attention_heads=6, num_key_value_heads=2, head_dim=C,
        num_hidden_layers=4, layer_types=["full_attention"] * 4, rms_norm_eps=config.norm_eps,
    )  # fmt: skip
    about._attn_implementation = "sdpa"
    torch.manual_seed(0)
    mine, theirs = Attention(config, rotates=False), AfmoeAttention(about, 1)
    with torch.no_grad():
        q, gate, k, v = mine.qkv.weight.unflatten(0, (2, 8, C)).split([3, 3, 1, 1], dim=1)
        for part, weight in {"q": q, "gate": gate, "k": k, "v": v}.items():
            getattr(theirs, f"{part}_proj").weight.copy_(weight.flatten(0, 2))
        theirs.o_proj.weight.copy_(mine.out.weight)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x = torch.randn(B, S, D, dtype=dtype)
        want, _ = theirs.to(dtype)(x, (None, None), None, is_causal=True)
        torch.testing.assert_close(mine(x, BlockContext()), want, rtol=tolerance, atol=tolerance)


def test_a_gate_that_is_wide_open_or_shut():
    config = config_of(bias=False)
    block, plain = Block(config, 1), Block(config_of(bias=False, output_gate=False), 1)
    with torch.no_grad():
        rows = block.attention.qkv.weight.unflatten(0, (2, 8, C))
        kept = torch.cat([rows[:, :3], rows[:, 6:]], dim=1).flatten(0, 1).flatten(0, 1)
        plain.attention.qkv.weight.copy_(kept)
        plain.attention.out.weight.copy_(block.attention.out.weight)
        rows[:, 3:6] = 0
    x = torch.randn(B, S, D)
    half = block.attention(x, BlockContext())
    torch.testing.assert_close(half, plain.attention(x, BlockContext()) / 2)


MOE = MoEConfig(hidden_size=D, ffn_hidden_size=16, num_experts=4, top_k=2)


def test_a_model_without_a_rotated_layer_is_one_without_positions():
    models = []
    for change in ({"rope_layers": (False,) * 4}, {"rope_layers": None, "positions": "none"}):
        torch.manual_seed(2)
        models.append(GPT(config_of(moe=MOE, **change)))
    tokens_BS = torch.randint(31, (B, S))
    found = [model.logits(tokens_BS) for model in models]
    assert torch.equal(*found)
    torch.manual_seed(2)
    assert not torch.equal(GPT(config_of(moe=MOE)).logits(tokens_BS), found[0])


def test_which_layers_turn_is_by_their_number_in_the_whole_model():
    model = GPT(config_of(mtp_modules=1))
    model.keep(range(1, 3), first=False, last=False)
    turns = {name: block.attention.rotates for name, block in model.stack.blocks.items()}
    assert turns == {"1": False, "2": True}
    for last in (True, False):  # a module for further tokens is a layer like the last
        of_module = layers_of_module(config_of(rope_layers=(not last,) * 3 + (last,)))
        assert of_module.rope_layers == (last,)
        assert Block(of_module, 0).attention.rotates == last


@pytest.mark.parametrize("granularity", ["core", "block"])
def test_recompute_changes_no_gradient(granularity):
    x, found = torch.randint(31, (B, S)), []
    for again in (False, True):
        torch.manual_seed(0)
        model = GPT(config_of(moe=MOE))
        kinds = CoreAttention if granularity == "core" else Block
        if again:
            apply_recompute([m for m in model.modules() if isinstance(m, kinds)], "full")
        loss = model(x, labels_BS=x).total()
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_blocks_compile_once_for_each_kind_of_layer():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = GPT(config_of()), torch.randint(31, (B, S))
    expected = model(x, labels_BS=x).total()
    for block in model.stack.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    loss = model(x, labels_BS=x).total()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_padded_sentences_of_a_bert_are_as_if_alone():
    """Blocks see the kept tokens of all sentences in one row."""
    torch.manual_seed(0)
    model = Bert(config_of(norm="rmsnorm"), binary_head=False).eval()
    tokens_BS = torch.randint(31, (B, S))
    ends_BN, valid_BS = torch.tensor([[4, S], [2, S]]), torch.ones(B, S, dtype=torch.int64)
    valid_BS[0, 4:] = valid_BS[1, 2:] = 0
    kept_T = valid_BS.flatten().nonzero().flatten()
    types = torch.zeros_like(tokens_BS)
    together, _ = model.encode(tokens_BS, types, ends_BN, valid_BS, kept_T)
    for b, length in enumerate((4, 2)):
        own = (slice(b, b + 1), slice(length))
        alone, _ = model.encode(tokens_BS[own], types[own], torch.tensor([[length]]), valid_BS[own])
        torch.testing.assert_close(together[own], alone)


def test_where_they_cannot_be_is_said():
    with pytest.raises(ValueError, match="no gates, and positions alike in all layers, for a T5"):
        T5(config_of(rope_layers=None), decoder_layers=1)
    with pytest.raises(ValueError, match=r"got output_gate False and rope_layers \(True,"):
        T5(config_of(output_gate=False), decoder_layers=1)
    with pytest.raises(ValueError, match="one flag per layer in rope_layers, 4, got 2"):
        config_of(rope_layers=(True, False))
    latent = {"latent": LatentSizes(None, 8, 2, 2, 8), "num_kv_heads": 6, "qk_norm": "latent"}
    for change in ({"output_gate": True}, {"rope_layers": (True,) * 4}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} .* with latent attention"):
            config_of(**latent | {"output_gate": False, "rope_layers": None} | change)
