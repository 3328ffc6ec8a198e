"""Layers of Mamba-2: the layer by its parts, its weights, its flags."""

import pytest
import torch
import torch.nn.functional as F
from mb_train.assembly.optimizer import parameter_groups
from mb_train.config import TrainConfig
from mb_train.models.attention import BlockContext
from mb_train.models.config import MambaSizes, TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.mamba import Mamba2, scan_note
from mb_train.models.transformer import Block
from mb_train.tasks.architecture import transformer_config
from state_checks import with_gradients

B, S, D = 2, 70, 24
SIZES = MambaSizes(heads=6, width=3, groups=2, state=5, taps=4)


def config_of(**change):
    sizes = {
        "num_layers": 4, "hidden_size": D, "ffn_size": 16, "vocab_size": 31, "num_heads": 4,
        "num_kv_heads": 2, "head_size": 6, "max_positions": 128, "positions": "none",
        "norm": "rmsnorm", "activation": "swiglu", "bias": False, "init_std": 0.2,
        "output_init_std": 0.2, "mamba": SIZES, "pattern": "M-*M",
    }  # fmt: skip
    return TransformerConfig(**sizes | change)


def slow(x, b, c, dt, A, D_H):
    """The scan as its definition says it, one token after the other."""
    b, c = (y.repeat_interleave(x.shape[2] // b.shape[2], dim=2) for y in (b, c))
    s_BHNP, found = 0, []
    for t in range(x.shape[1]):
        written_BHP = dt[:, t, :, None] * x[:, t]
        s_BHNP = s_BHNP * (dt[:, t] * A).exp()[..., None, None]
        s_BHNP = s_BHNP + torch.einsum("bhn,bhp->bhnp", b[:, t], written_BHP)
        found.append(torch.einsum("bhn,bhnp->bhp", c[:, t], s_BHNP) + D_H[:, None] * x[:, t])
    return torch.stack(found, dim=1)


def test_groups_that_share_heads_unevenly():
    with pytest.raises(ValueError, match=r"groups of Mamba layers to divide .*, got 2 and 5"):
        config_of(mamba=SIZES._replace(heads=5))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_is_its_parts(groups):
    """Of rows that stand apart."""
    torch.manual_seed(0)
    sizes = SIZES._replace(groups=groups)
    module = Mamba2(config_of(mamba=sizes)).double()
    with torch.no_grad():
        for parameter in (module.norm.weight, module.gates.D):
            parameter.add_(torch.randn_like(parameter))
    H, P, G, N, taps = sizes
    u = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)

    def mixed(rows, filters, bias, part, width):
        """A half of the rows of each head or group, which are convolved."""
        own = F.linear(u, rows.unflatten(0, (-1, 2, width))[:, part].flatten(0, 1))
        seen = F.pad(own, (0, 0, taps - 1, 0)).unfold(1, taps, 1)
        found = (seen * filters).sum(-1) + bias
        return (found / (1 + (-found).exp())).unflatten(2, (-1, width))

    conv, both = module.conv, module.conv_bc
    x = mixed(module.xz.weight, conv.weight, conv.bias, 0, P)
    filters, biases = both.weight.unflatten(0, (G, 2, N)), both.bias.unflatten(0, (G, 2, N))
    b, c = (
        mixed(module.bc.weight, filters[:, k].flatten(0, 1), biases[:, k].flatten(), k, N)
        for k in (0, 1)
    )
    dt = (1 + (F.linear(u, module.dt.weight) + module.gates.dt_bias).exp()).log()
    y = slow(x, b, c, dt, -module.gates.A_log.exp(), module.gates.D)
    z = F.linear(u, module.xz.weight.unflatten(0, (H, 2, P))[:, 1].flatten(0, 1))
    y = (y.flatten(2) * z / (1 + (-z).exp())).unflatten(2, (G, -1))
    y = y / (y.square().mean(-1, keepdim=True) + module.norm.eps).sqrt()
    want = module.out(y.flatten(2) * module.norm.weight)
    leaves = [u, *module.parameters()]
    found = with_gradients([module(u, BlockContext())], leaves)
    torch.testing.assert_close(found, with_gradients([want], leaves), rtol=1e-9, atol=1e-10)


def test_a_note_says_how_the_scan_is_computed(monkeypatch):
    assert scan_note(SIZES, torch.device("cpu"), torch.bfloat16).endswith("in plain PyTorch")
    for there, end in ((True, "kernels"), (False, "states of 128 at most")):
        monkeypatch.setattr(
            "mb_train.models.mamba.has_state_space_kernels", lambda *_, there=there: there
        )
        assert scan_note(SIZES, torch.device("cuda"), torch.bfloat16).endswith(end)


def test_what_it_begins_with():
    module = Mamba2(config_of(mamba=MambaSizes(512, 4, 8, 4, 4)))
    rates, steps = module.gates.A_log.detach().exp(), F.softplus(module.gates.dt_bias.detach())
    assert 1 <= rates.min() <= rates.max() <= 16
    assert abs(float(rates.mean()) - 8.5) < 0.7
    assert (float(steps.min()) > 0.999e-3, float(steps.max()) < 0.1001) == (True, True)
    assert abs(float(steps.log().mean()) - torch.tensor([1e-3, 1e-1]).log().mean()) < 0.2
    assert bool((module.gates.D == 1).all())
    for taps in (module.conv.weight, module.conv.bias, module.conv_bc.bias):
        assert float(taps.detach().abs().max()) <= 0.5 < 2.1 * float(taps.detach().max())
    assert {name for name, p in module.named_parameters() if p.dtype != torch.float32} == set()


def test_steps_are_not_rounded():
    """In 16 bits they are as of the same numbers in 32."""
    gates, dt = Mamba2(config_of()).gates, torch.randn(B, S, 6, dtype=torch.bfloat16)
    found = gates(dt)
    torch.testing.assert_close(found, gates(dt.float()), rtol=0, atol=0)
    assert {x.dtype for x in found} == {torch.float32}


RUN = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
    "micro_batch_size": 2, "train_iters": 2, "lr": 1e-3, "position_embedding_type": "none",
    "hybrid_layer_pattern": "ME*-", "mamba_head_dim": 8, "mamba_num_groups": 2,
    "mamba_state_dim": 4, "moe_num_experts": 4, "moe_top_k": 2,
}  # fmt: skip


def test_a_pattern_says_what_each_layer_is():
    config = transformer_config(TrainConfig(**RUN), 64)
    assert config.mamba == MambaSizes(heads=8, width=8, groups=2, state=4, taps=4)
    assert TrainConfig(**RUN).num_moe_layers == 1
    model = GPT(config)
    kinds = [
        [type(half).__name__ for half in (block.attention, block.mlp) if half is not None]
        for block in model.stack.blocks.values()
    ]
    assert kinds == [["Mamba2"], ["dMoE"], ["Attention"], ["DenseMLP"]]
    norms = {name for name, _ in model.named_parameters() if ".norm_" in name and "weight" in name}
    assert norms == {f"stack.blocks.{n}.norm_{k}.weight" for n, k in enumerate((1, 2, 1, 2))}
    # One half of a block adds to the residual in each layer.
    assert config.output_init_std == pytest.approx(config.init_std / 2)


def test_a_model_without_mamba_layers_has_none_of_their_sizes():
    config = TrainConfig(**RUN | {"hybrid_layer_pattern": "*E*-"})
    assert config.mamba_sizes is None
    assert transformer_config(config, 64).mamba is None


def test_what_decays_and_what_is_a_matrix():
    model = GPT(transformer_config(TrainConfig(**RUN), 64))
    of = {id(p): name for name, p in model.named_parameters()}
    inside = "stack.blocks.0.attention."

    def names(config, **about):
        groups = parameter_groups([model], config)
        chosen = [g for g in groups if all(g.get(k) == v for k, v in about.items())]
        found = {of[id(p)] for g in chosen for p in g["params"]}
        return {name.removeprefix(inside) for name in found if name.startswith(inside)}

    vectors = {f"gates.{name}" for name in ("A_log", "D", "dt_bias")} | {"norm.weight"}
    vectors |= {"conv.bias", "conv_bc.bias"}
    maps = {f"{name}.weight" for name in ("xz", "bc", "dt", "out")}
    taps = {"conv.weight", "conv_bc.weight"}
    adam, muon = TrainConfig(**RUN), TrainConfig(**RUN, optimizer="muon")
    assert names(adam, decays=False) == vectors
    assert names(adam, decays=True) == maps | taps
    assert names(muon, muon=True) == maps
    assert names(muon, muon=False, decays=True) == taps
    assert names(muon, muon=True, fused=(8, 8)) == {"xz.weight"}
    assert names(muon, muon=True, fused=(4, 4)) == {"bc.weight"}


def test_in_fp8_the_map_to_steps_is_not():
    mixer = Block(config_of(fp8=True), 0).attention
    maps = {name: mixer.get_submodule(name).fp8 for name in ("xz", "bc", "dt", "out")}
    assert maps == {"xz": True, "bc": True, "dt": False, "out": True}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hybrid_layer_pattern": "ME*"}, "a letter for each of --num-layers 4, got 3: ME"),
        ({"hybrid_layer_pattern": "MEG-"}, "to be of M .*, got 'MEG-'"),
        ({"mtp_num_layers": 1}, "--mtp-hybrid-override-pattern, .* got none. .*each module: ME"),
        (
            {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "MS"},
            r"of letters that --hybrid-layer-pattern ME\*- has, got MS",
        ),
        ({"hybrid_layer_pattern": "M-*-"}, "a layer E in .* alone, got M-.- and 4 experts"),
        ({"moe_num_experts": None}, "a layer E in .* got ME.- and None experts"),
        ({"moe_layers": [1] * 4}, "--moe-layers or --hybrid-layer-pattern, got both"),
        ({"moe_layer_freq": 2}, "--moe-layer-freq 1 .* with --hybrid-layer-pattern.* got 2 and 0"),
        ({"no_rope_freq": 2}, "--no-rope-freq to be left out with --hybrid-layer-pattern"),
        ({"model": "bert"}, "--model to be left out with --hybrid-layer-pattern, .* got bert"),
        ({"position_embedding_type": "learned"}, "none or rope with --hybrid.*, got learned"),
        ({"mamba_num_groups": 3}, "--mamba-num-groups to divide .*, got 3 and 8"),
        ({"mamba_head_dim": 7}, "--mamba-head-dim to divide 2 x --hidden-size, 64, got 7"),
        (
            {"context_parallel_size": 4, "mamba_num_heads": 6},
            "--mamba-num-heads to be a multiple of --context-parallel-size 4, .*, got 6",
        ),
    ],
    ids=str,
)
def test_where_they_cannot_be_is_said(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**RUN | change)


def test_sizes_of_mamba_layers_are_wanted():
    with pytest.raises(ValueError, match=r"sizes of Mamba layers for M-\*M, got none"):
        config_of(mamba=None)
