"""The transformer's options, each against a plainer way to compute the same."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS, PRESETS, is_glu
from mb_layers import MoEConfig
from mb_train.config.network import Network
from mb_train.models.attention import BlockContext
from mb_train.models.config import LatentSizes, RopeScaling, TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.rotary import rotary_tables, rotate
from mb_train.models.segments import segment_mask
from mb_train.models.transformer import DenseMLP

V, S = 61, 12
SIZES = {
    "num_layers": 3, "hidden_size": 32, "ffn_size": 48, "vocab_size": V, "num_heads": 4,
    "num_kv_heads": 4, "head_size": 8, "max_positions": S, "init_std": 0.2,
}  # fmt: skip
EXPERTS = MoEConfig(hidden_size=32, ffn_hidden_size=16, num_experts=4, top_k=2)
KINDS = {
    "gpt2": {},
    "qwen3": {
        "positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2,
        "qk_norm": "head", "bias": False, "tie_embeddings": False, "moe": EXPERTS,
    },
    "olmoe": {"positions": "rope", "norm": "rmsnorm", "qk_norm": "width", "moe": EXPERTS},
    "dbrx": {
        "positions": "rope", "norm": "layernorm-without-bias", "activation": "swiglu",
        "num_kv_heads": 2, "clip_qkv": 0.02, "bias": False, "moe": EXPERTS,
    },
    "deepseek": {
        "positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False,
        "latent": LatentSizes(q_rank=12, kv_rank=10, content=8, rotated=4, value=10),
        "head_size": 12, "qk_norm": "latent", "rope_scaling": RopeScaling("yarn", 4.0, 8),
        "moe": EXPERTS, "moe_layers": (False, True, True), "tie_embeddings": False,
    },
    "trinity": {
        "positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2,
        "qk_norm": "head", "bias": False, "norms": "both", "output_gate": True,
        "rope_layers": (True, False, True), "window": 2, "window_layers": (True, False, True),
        "moe": EXPERTS, "moe_layers": (False, True, True),
    },
    "phimoe": {
        "positions": "rope", "num_kv_heads": 2, "tie_embeddings": False, "head_bias": True,
        "rope_scaling": RopeScaling("longrope", 1.0, mscale=1.2, factors=(1.0, 1.5, 2.0, 4.0)),
        "moe": EXPERTS, "router": "sparsemixer",
    },
    "llama-4": {
        "positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2,
        "qk_norm": "l2", "bias": False, "rope_layers": (True, False, True),
        "moe": replace(EXPERTS, score_function="sigmoid", weights_on_input=True),
        "moe_layers": (False, True, False),
    },
    "mixed": {"moe": EXPERTS, "moe_layers": (False, True, False)},
    "kept": {"norms": "kept", "norm": "rmsnorm"},
    "sum": {"norms": "sum"},
    "output": {"norms": "output", "norm": "rmsnorm", "moe": EXPERTS},
    "both": {"norms": "both", "moe": EXPERTS, "moe_layers": (True, False, True)},
}  # fmt: skip


def make(kind: str = "gpt2", **change) -> GPT:
    torch.manual_seed(3)
    return GPT(TransformerConfig(**{**SIZES, **KINDS[kind], **change}))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_if_alone(kind):
    model = make(kind).eval()
    lengths = (5, 1, 6)
    packed = tokens(1, sum(lengths))
    labels = packed.roll(-1, 1)
    segments = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    positions = torch.tensor([[p for n in lengths for p in range(n)]])
    got = model(packed, labels_BS=labels, segments_BS=segments, positions_BS=positions)
    start, total = 0, 0.0
    for length in lengths:
        here = slice(start, start + length)
        alone = model(packed[:, here], labels_BS=labels[:, here])
        total += alone.losses["lm loss"] * length / sum(lengths)
        start += length
    torch.testing.assert_close(got.losses["lm loss"], total)
    without = model(packed, labels_BS=labels).losses["lm loss"]
    assert (without - total).abs() > 1e-4


@pytest.mark.slow
def test_a_block_in_8_bits_compiles_without_a_break():
    fp8 = {"fp8": True, "fp8_spares": (1, 0), "bias": False}
    plain, model, x = make("mixed"), make("mixed", **fp8), tokens(2, S)
    loss = model(x, labels_BS=x).total()
    assert (loss - plain(x, labels_BS=x).total()).abs() > 1e-5
    for block in model.stack.blocks.values():
        block.compile(fullgraph=True, backend="aot_eager")
    compiled = model(x, labels_BS=x).total()
    torch.testing.assert_close(compiled, loss)
    got = torch.autograd.grad(compiled, list(model.parameters()))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [(1,), (1, 2)], ids=str)
def test_stages_one_after_the_other_are_the_model(kind, cut):
    whole, x = make(kind), tokens(2, S)
    expected = whole(x, labels_BS=x)
    expected.total().backward()
    edges = (0, *cut, 3)
    stages = [make(kind) for _ in edges[1:]]
    hidden, aux, rows = x, 0.0, []
    for i, stage in enumerate(stages):
        layers = range(edges[i], edges[i + 1])
        stage.keep(layers, first=i == 0, last=i == len(stages) - 1)
        output = stage(hidden, labels_BS=x)
        hidden = output.x
        aux = aux + (output.aux_loss if output.aux_loss is not None else 0.0)
        rows += list(output.metrics.get("tokens_per_expert", []))
    loss = output.losses["lm loss"]
    torch.testing.assert_close(loss, expected.losses["lm loss"])
    if expected.aux_loss is not None:
        torch.testing.assert_close(aux, expected.aux_loss)
        assert torch.equal(torch.stack(rows), expected.metrics["tokens_per_expert"])
    (loss + aux).backward()
    gradients = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():  # a tied embedding lives in two stages
            gradients[name] = gradients.get(name, 0) + parameter.grad
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


DENSE = {
    "gelu_tanh": lambda _, up: F.gelu(up, approximate="tanh"),
    "squared_relu": lambda _, up: F.relu(up).square(),
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "swiglu(limit=0.5)": lambda gate, up: F.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5),
    "reglu(offset=1)": lambda gate, up: F.relu(gate) * (up + 1),
}


@pytest.mark.parametrize("activation", DENSE)
def test_a_dense_feed_forward_is_its_formula(activation):
    torch.manual_seed(0)
    mlp = DenseMLP(TransformerConfig(**SIZES | {"activation": activation}))
    x = torch.randn(2, 5, 32)
    got = mlp(x)
    gate = None if mlp.gate is None else mlp.gate(x)
    want = mlp.down(DENSE[activation](gate, mlp.up(x)))
    torch.testing.assert_close(got, want)
    found, expected = (
        torch.autograd.grad(y.square().sum(), list(mlp.parameters())) for y in (got, want)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [*PLAIN_ACTIVATIONS, *GLU_ACTIVATIONS, *PRESETS, *DENSE])
def test_the_flags_know_the_gated_activations(name):
    assert Network(activation=name).is_glu == is_glu(name)


def test_without_biases_in_the_maps_a_layer_norm_keeps_its_own():
    """As in Megatron: --disable-bias-linear is of linear maps."""
    biases = {name for name, _ in make(bias=False).named_parameters() if name.endswith("bias")}
    norms = {f"stack.blocks.{layer}.norm_{half}.bias" for layer in range(3) for half in (1, 2)}
    assert biases == norms | {"stack.norm.bias"}
    assert not [n for n, _ in make("qwen3").named_parameters() if n.endswith("bias")]


def test_grouped_queries_are_repeated_keys_and_values():
    grouped, full = make(num_kv_heads=2), make()
    full.load_state_dict({n: t for n, t in grouped.state_dict().items() if "qkv" not in n}, False)
    for name, block in grouped.stack.blocks.items():
        for kind in ("weight", "bias"):
            rows = getattr(block.attention.qkv, kind).unflatten(0, (2, 4, 8))  # [G][2 q, k, v][C]
            q, k, v = rows.split([2, 1, 1], dim=1)
            both = torch.stack([q, k.expand_as(q), v.expand_as(q)], dim=2)  # [G][R][q, k, v][C]
            getattr(full.stack.blocks[name].attention.qkv, kind).data.copy_(both.flatten(0, 3))
    x = tokens(2, S)
    torch.testing.assert_close(grouped.logits(x), full.logits(x))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_scores_depend_on_distance_alone(fraction):
    config = TransformerConfig(**SIZES, positions="rope", rope_fraction=fraction)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        rope_i, rope_j = (rotary_tables(config, torch.tensor([[p]])) for p in (i, j))
        return (rotate(q.float(), rope_i) * rotate(k.float(), rope_j)).sum()

    torch.testing.assert_close(score(7, 3), score(11, 7))
    assert (score(7, 3) - score(7, 4)).abs() > 1e-4
    width = int(8 * fraction)
    turned = rotate(q.float(), rotary_tables(config, torch.tensor([[5]])))
    assert torch.equal(turned[..., width:], q.float()[..., width:])


def test_a_segment_sees_itself_and_nothing_later():
    mask = segment_mask(torch.tensor([[0, 0, 1, 1]]), causal=True)[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    cross = segment_mask(torch.tensor([[0, 1]]), torch.tensor([[1, 0, 0]]), causal=False)[0, 0]
    assert cross.int().tolist() == [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_choose_what_counts(kind):
    model, x = make(kind), tokens(2, S)
    labels = x.roll(-1, 1)
    every = torch.nn.functional.cross_entropy(
        model.logits(x).flatten(0, 1), labels.flatten(), reduction="none"
    )
    weights = torch.rand(2, S, generator=torch.Generator().manual_seed(1))
    weights[0, :5] = 0
    got = model(x, labels_BS=labels, weights_BS=weights).losses["lm loss"]
    torch.testing.assert_close(got, (every * weights.flatten()).sum())


@pytest.mark.parametrize(
    "wrong",
    [{"num_kv_heads": 3}, {"norm": "batchnorm"}, {"moe": EXPERTS, "moe_layers": (True,)}],
    ids=str,
)
def test_wrong_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match="Expected"):
        TransformerConfig(**{**SIZES, **wrong})


@pytest.mark.parametrize(
    ("norms", "half"),
    [
        ("before", lambda x, f, n, _: x + f(n(x))),
        ("kept", lambda x, f, n, _: n(x) + f(n(x))),
        ("sum", lambda x, f, n, _: n(x + f(x))),
        ("output", lambda x, f, n, _: x + n(f(x))),
        ("both", lambda x, f, n, out: x + out(f(n(x)))),
    ],
)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_norms_stand_where_they_are_told(norms, half, experts):
    model = make(norms=norms, norm="rmsnorm", moe=EXPERTS if experts else None)
    block = model.stack.blocks["1"]
    with torch.no_grad():
        for name, weight in block.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight))
    x_BSD, context = torch.randn(2, S, 32), BlockContext()

    def mlp(z_BSD):
        y = block.mlp(z_BSD)
        return y.y if experts else y

    attended = half(x_BSD, lambda z: block.attention(z, context), block.norm_1, block.norm_1_out)
    expected = half(attended, mlp, block.norm_2, block.norm_2_out)
    torch.testing.assert_close(block(x_BSD, context).x_BSD, expected)
    assert (model.stack.norm is None) == (model.embedding.norm is not None) == (norms == "sum")
    assert (block.norm_2_out is not None) == (norms == "both")


@pytest.mark.parametrize("kind", ["gpt2", "mixed"])
@pytest.mark.parametrize("norms", ["before", "sum", "output", "both"])
def test_a_residual_stream_in_fp32_under_16_bit_layers(kind, norms):
    seen = {}

    def remember(name):
        def hook(module, inputs, output):
            seen.setdefault(name, set()).add(inputs[0].dtype)

        return hook

    x = tokens(2, S)
    fields = SIZES | KINDS[kind] | {"norms": norms, "fp32_residual": True}
    torch.manual_seed(3)
    model = GPT(TransformerConfig(**fields), compute_dtype=torch.bfloat16)
    for block in model.stack.blocks.values():
        block.register_forward_hook(remember("block"))
        block.attention.register_forward_hook(remember("attention"))
        block.mlp.register_forward_hook(remember("mlp"))
    output = model(x, labels_BS=x)
    output.total().backward()
    half = {torch.bfloat16}
    assert seen == {"block": {torch.float32}, "attention": half, "mlp": half}
    assert model.logits(x).dtype == torch.float32
    exact = make(kind, norms=norms)
    expected = exact(x, labels_BS=x).losses["lm loss"]
    torch.testing.assert_close(output.losses["lm loss"], expected, rtol=2e-2, atol=0)
    model.keep(range(2), first=True, last=False)
    assert model(x, labels_BS=x).x.dtype == torch.float32  # what travels to the next stage


@pytest.mark.sweep(3)
@pytest.mark.parametrize("norms", ["before", "output", "both"])
def test_blocks_compile_once_for_all_layers(norms):
    """What a compiled run waits for at its start does not grow with its depth."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = make("qwen3", norms=norms), tokens(2, S)
    for block in model.stack.blocks.values():
        block.compile(backend="eager")
    model(x, labels_BS=x).total().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
