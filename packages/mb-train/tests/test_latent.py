"""Multi-head latent attention against loops written out, and against transformers' DeepSeek-V3."""

import math
from dataclasses import replace

import pytest
import torch
from mb_train.models.attention import BlockContext
from mb_train.models.config import LatentSizes, RopeScaling, TransformerConfig
from mb_train.models.latent import LatentAttention
from mb_train.models.rotary import rotary_tables, sharpening
from mb_train.models.segments import Segments, within_segments
from mb_train.models.transformer import Block
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

B, S, D, H = 2, 7, 20, 3
YARN = RopeScaling("yarn", 40.0, trained_on=64, beta_fast=8.0, mscale=0.7, mscale_all_dim=1.3)
LATENT = LatentSizes(q_rank=9, kv_rank=6, content=5, rotated=8, value=7)


def config_of(latent: LatentSizes = LATENT, **change) -> TransformerConfig:
    sizes = {
        "num_layers": 1, "hidden_size": D, "ffn_size": 24, "vocab_size": 31, "num_heads": H,
        "num_kv_heads": H, "head_size": latent.content + latent.rotated, "max_positions": 16,
        "positions": "rope", "norm": "rmsnorm", "norm_eps": 1e-6, "qk_norm": "latent",
        "init_std": 0.4, "output_init_std": 0.4,
    }  # fmt: skip
    return TransformerConfig(latent=latent, **sizes | change)


def made(config: TransformerConfig) -> LatentAttention:
    """In fp64, with norms that do something."""
    torch.manual_seed(1)
    module = LatentAttention(config).double()
    with torch.no_grad():
        for norm in (getattr(module, "q_norm", None), module.kv_norm):
            for parameter in [] if norm is None else norm.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        if module.out.bias is not None:
            module.out.bias.normal_()
    return module


def normed(x, norm):
    if norm is None:
        return x
    if norm.bias is None:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def turned(x, place, config):
    """The channels of one token's part of a head, each pair by its own angle."""
    pairs, scaling = len(x) // 2, config.rope_scaling
    found = [None] * len(x)
    for pair in range(pairs):
        speed = config.rope_base ** (-pair / pairs)
        longer = 1.0
        if scaling is not None:
            edges = [
                pairs * math.log(scaling.trained_on / (2 * math.pi * times)) / math.log(1e4)
                for times in (scaling.beta_fast, scaling.beta_slow)
            ]
            first, last = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), len(x) - 1)
            slow = min(max((pair - first) / (last - first), 0), 1)
            speed = slow * speed / scaling.factor + (1 - slow) * speed
            grows = 0.1 * math.log(scaling.factor)
            longer = (1 + scaling.mscale * grows) / (1 + scaling.mscale_all_dim * grows)
        cos, sin = (longer * f(place * speed) for f in (math.cos, math.sin))
        a, b = x[pair], x[pair + pairs]
        found[pair], found[pair + pairs] = a * cos - b * sin, b * cos + a * sin
    return torch.stack(found)


def reference(module, x, config):
    """y_BSD, token by token and head by head."""
    R, N, P, V = config.latent[1:]
    scale = (N + P) ** -0.5
    if config.rope_scaling is not None:
        grows = 0.1 * config.rope_scaling.mscale_all_dim * math.log(config.rope_scaling.factor)
        scale *= (1 + grows) ** 2
    rows = []
    for b in range(B):
        queries, keys, values = [], [], []
        for s in range(S):
            hidden = x[b, s]
            down = module.kv_down.weight @ hidden
            shared = turned(down[R:], s, config)
            up = module.kv_up.weight @ normed(down[:R], module.kv_norm)
            if config.latent.q_rank is None:
                q = module.q.weight @ hidden
            else:
                latent = normed(module.q_down.weight @ hidden, module.q_norm)
                q = module.q_up.weight @ latent
            q, up = q.view(H, N + P), up.view(H, N + V)
            queries.append([torch.cat([q[h, :N], turned(q[h, N:], s, config)]) for h in range(H)])
            keys.append([torch.cat([up[h, :N], shared]) for h in range(H)])
            values.append([up[h, N:] for h in range(H)])
        for s in range(S):
            heads = []
            for h in range(H):
                scores = torch.stack([queries[s][h] @ keys[t][h] for t in range(s + 1)]) * scale
                each = zip(scores.softmax(0), values, strict=False)
                heads.append(sum(p * v[h] for p, v in each))
            y = module.out.weight @ torch.cat(heads)
            rows.append(y if module.out.bias is None else y + module.out.bias)
    return torch.stack(rows).view(B, S, D)


CASES = {
    "yarn": {"rope_scaling": YARN, "bias": False},
    "direct": {"latent": LATENT._replace(q_rank=None)},
    "no-norms": {"qk_norm": "none"},
    "layernorm-wide-values": {"norm": "layernorm", "latent": LATENT._replace(value=15)},
    "equal-widths": {"latent": LATENT._replace(value=13)},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_loops_compute(case):
    config = config_of(**CASES[case])
    module = made(config)
    x = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(B, S, D, dtype=torch.float64)
    rope = rotary_tables(config, torch.arange(S)[None])
    leaves = [x, *module.parameters()]
    names = ["x", *(name for name, _ in module.named_parameters())]
    found = []
    for y in (module(x, BlockContext(rope=rope)), reference(module, x, config)):
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    for name, got, want in zip(["y", *names], *found, strict=True):
        # Angles and rotations are in fp32.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m)


def theirs(config: TransformerConfig, *, interleave: bool) -> DeepseekV3Attention:
    sizes, scaling = config.latent, config.rope_scaling
    rope = {"rope_type": "default", "rope_theta": config.rope_base}
    if scaling is not None:
        rope |= {
            "rope_type": "yarn", "factor": scaling.factor, "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow, "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
            "original_max_position_embeddings": scaling.trained_on,
        }  # fmt: skip
    about = DeepseekV3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=sizes.q_rank,
        kv_lora_rank=sizes.kv_rank, qk_nope_head_dim=sizes.content, qk_rope_head_dim=sizes.rotated,
        v_head_dim=sizes.value, rope_parameters=rope, rope_interleave=interleave,
        attention_bias=False, attn_implementation="eager", max_position_embeddings=16,
    )  # fmt: skip
    return DeepseekV3Attention(about, 0).double()


def pairs_side_by_side(rows, sizes):
    """Rows of rotated channels as DeepSeek has them: those that turn together are neighbours."""
    halves = torch.arange(sizes.rotated).view(2, -1)
    other = halves.t().flatten()
    kept = rows[:, : -sizes.rotated]
    return torch.cat([kept, rows[:, -sizes.rotated :][:, other]], dim=1)


@pytest.mark.parametrize("interleave", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("case", ["yarn", "direct", "equal-widths"])
def test_it_is_deepseeks_attention(case, interleave):
    config = replace(config_of(**CASES[case]), bias=False)
    ours, sizes = made(config), config.latent
    other = theirs(config, interleave=interleave)
    weights = {name: weight.detach().clone() for name, weight in ours.named_parameters()}
    if interleave:
        for name in ("q.weight", "q_up.weight", "kv_down.weight"):
            if name in weights:
                heads = 1 if name == "kv_down.weight" else H
                by_head = weights[name].unflatten(0, (heads, -1))
                weights[name] = pairs_side_by_side(by_head, sizes).flatten(0, 1)
    names = {
        "q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj",
        "out": "o_proj",
    }  # fmt: skip
    renamed = {f"{names[name.split('.')[0]]}.weight": w for name, w in weights.items()}
    other.load_state_dict(renamed)
    x = torch.randn(B, S, D, dtype=torch.float64)
    cos, sin = rotary_tables(config, torch.arange(S)[None])
    hidden_later = torch.full((S, S), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want, _ = other(x, (cos[:, :, 0].double(), sin[:, :, 0].double()), hidden_later)
    got = ours(x, BlockContext(rope=(cos, sin)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "mscale", "all_dim", "trained_on"),
    [
        (40.0, 1.0, 1.0, 4096),
        (40.0, 0.707, 1.3, 4096),
        (4.0, 1.0, 0.0, 512),
        (0.5, 1.0, 0.0, 64),
        (4.0, 1.0, 0.0, 4),  # no pair turns once
        (4.0, 1.0, 0.0, 10**11),  # all pairs turn often
    ],
)
def test_yarns_tables_are_those_of_transformers(factor, mscale, all_dim, trained_on):
    width = 64
    scaling = RopeScaling("yarn", factor, trained_on, mscale=mscale, mscale_all_dim=all_dim)
    config = TransformerConfig(
        num_layers=1, hidden_size=2 * width, ffn_size=8, vocab_size=8, num_heads=2,
        num_kv_heads=2, head_size=width, max_positions=8, positions="rope", rope_scaling=scaling,
    )  # fmt: skip
    about = DeepseekV3Config(
        qk_rope_head_dim=width, hidden_size=2 * width, num_attention_heads=2,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "mscale": mscale,
            "mscale_all_dim": all_dim, "original_max_position_embeddings": trained_on,
        },
    )  # fmt: skip
    speeds, longer = ROPE_INIT_FUNCTIONS["yarn"](about, torch.device("cpu"))
    places = torch.tensor([[0, 1, 13, 700]])
    angles = (places[..., None].float() * speeds).repeat(1, 1, 2)[:, :, None]
    cos, sin = rotary_tables(config, places)
    torch.testing.assert_close(cos, angles.cos() * longer, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sin, angles.sin() * longer, rtol=1e-5, atol=1e-4)
    plain, _ = rotary_tables(replace(config, rope_scaling=None), places)
    assert (plain - cos).abs().max() > 0.01
    assert sharpening(scaling, 2.0) == (1 + 0.2 * math.log(factor) if factor > 1 else 1)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("attends", ["causal", "bounds", "kept"])
def test_one_graph_of_a_block(attends):
    """Values of another width break no compiled block, in the kernel over segments either."""
    torch._dynamo.reset()
    config = config_of(LATENT._replace(content=8, rotated=8, value=8))
    block = Block(config, 0)
    within = {"causal": True}
    if attends != "causal":
        segments = Segments(torch.tensor([[3, S], [S, S]]), S)
        within = within_segments(segments, causal=True, flash=attends == "bounds")
    context = BlockContext(**within, rope=rotary_tables(config, torch.arange(S)[None]))
    graphs = []

    def only_traced(graph, inputs):
        graphs.append(graph)
        raise RuntimeError("traced to its end")

    compiled = torch.compile(block, fullgraph=True, backend=only_traced)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="traced to its end"):
        compiled(torch.randn(2, S, D), context)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_size": 9}, "head_size 13"),
        ({"num_kv_heads": 1}, "num_kv_heads 3"),
        ({"positions": "learned"}, "positions rope"),
        ({"rope_fraction": 0.5}, r"rope_fraction 1\.0"),
        ({"qk_norm": "head"}, "none or latent"),
        ({"latent": LATENT._replace(content=6, rotated=7)}, "an even rotated part"),
    ],
    ids=str,
)
def test_sizes_that_no_latent_attention_has_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        replace(config_of(), **change)
    with pytest.raises(ValueError, match="latent sizes with qk_norm latent"):
        replace(config_of(), latent=None)
    with pytest.raises(ValueError, match="attend to an encoder"):
        Block(config_of(), 0, cross=True)
