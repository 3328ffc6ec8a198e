"""Experts chosen by Sinkhorn's balance: what flags mean, and models against a slow loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from mb_layers import SinkhornRouter
from mb_layers.moe import MoELayer
from mb_parallel.recompute import apply_recompute
from mb_train.cli import main
from mb_train.convert import export_model, read_model, write_run
from mb_train.flags.command_line import parse, resolve
from mb_train.folder.run_folder import checkpoint_in, read_saved_run
from mb_train.models.segments import Segments
from mb_train.models.transformer import Block
from mb_train.tasks.make import whole_model

SINKHORN = ["--moe-router-load-balancing-type", "sinkhorn"]
OURS = ["--moe-router-type", "sinkhorn"]
RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "2", "--train-iters", "2", "--lr", "1e-3"),
]


@pytest.mark.parametrize(
    ("typed", "top_k", "scores"),
    [
        ("--num-experts 8 --moe-router-topk 1", 1, "sigmoid"),
        ("--num-experts 8 --moe-router-topk 2", 2, "softmax"),
        ("--num-experts 8", 2, "softmax"),
        ("--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax", 1, "sigmoid"),
        ("--num-experts 8 --moe-router-topk 1 --moe-router-score-function sigmoid", 1, "sigmoid"),
        ("--num-experts 8 --moe-aux-loss-coeff 0 --moe-router-topk-scaling-factor 1", 2, "softmax"),
        ("--moe-num-experts 8", 1, "sigmoid"),
        ("--moe-num-experts 8 --moe-top-k 3", 3, "softmax"),
    ],
)
def test_megatrons_flag_has_megatrons_weights_and_no_loss(typed, top_k, scores):
    line = parse([*RUN, *SINKHORN, *typed.split()])
    config = resolve(line)
    assert (config.moe_router_type, config.moe_top_k) == ("sinkhorn", top_k)
    assert (config.moe_router_score_function, config.moe_renormalize) == (scores, False)
    assert config.moe_loss_weight == 0
    notes = "; ".join(line.notes)
    assert "no load-balancing loss" not in notes
    assert "weight is its probability" not in notes
    by_default = scores == "sigmoid" and "score-function" not in typed
    assert ("its sigmoid beside Sinkhorn's balance" in notes) == by_default


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--moe-aux-loss-coeff 1e-2", r"--moe-aux-loss-coeff 0.0 with .* sinkhorn, .* got 0.01"),
        (
            "--moe-router-topk 1 --moe-router-score-function softmax",
            "--moe-router-score-function sigmoid with .* got softmax",
        ),
        (
            "--moe-router-topk 2 --moe-router-score-function sigmoid",
            "--moe-router-score-function softmax with .* got sigmoid",
        ),
        ("--moe-router-topk-scaling-factor 2.5", "-scaling-factor 1.0 with .* got 2.5"),
        ("--moe-router-enable-expert-bias", "topk with --moe-router-enable-expert-bias, which"),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-pre-softmax",
            "topk with --moe-router-group-topk, which",
        ),
        ("--moe-router-load-balancing-type sinkhorn aux_loss", "got sinkhorn aux_loss"),
    ],
)
def test_what_megatron_passes_over_beside_it_is_refused(typed, says):
    with pytest.raises(ValueError, match=says):
        resolve(parse([*RUN, "--num-experts", "8", *SINKHORN, *typed.split()]))
    dense = parse([*RUN, "--num-experts", "0", *SINKHORN, *typed.split()[:2]])
    assert resolve(dense).moe_num_experts is None


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "--expert-model-parallel-size 2",  # which Megatron before Core had, too
        "--moe-router-topk 1",
        "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    ],
)
def test_experts_of_megatron_before_core_are_chosen_by_it(typed):
    line = parse([*RUN, "--num-experts", "8", "--use-legacy-models", *typed.split()])
    config = resolve(line)
    assert (config.moe_router_type, config.moe_top_k) == ("sinkhorn", 1)
    assert (config.moe_router_score_function, config.moe_renormalize) == ("sigmoid", False)
    assert (config.moe_loss_weight, config.moe_router_bias, config.moe_mlp_bias) == (0, False, True)
    told = any("Sinkhorn's balance with --use-legacy-models" in note for note in line.notes)
    assert told == ("sinkhorn" not in typed)
    assert not any("without effect" in note for note in line.notes if "legacy" in note)
    assert not any("Sinkhorn" in note for note in line.going_on().notes)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--moe-router-topk 2", "--moe-router-topk 1 with --use-legacy-models, .* got 2"),
        ("--moe-router-load-balancing-type aux_loss", "sinkhorn with --use-leg.* got aux_loss"),
        ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff 0.0 with --use-legacy-models, .* got 0"),
    ],
)
def test_what_experts_before_core_pass_over_is_refused(typed, says):
    legacy = ["--num-experts", "8", "--use-legacy-models", *typed.split()]
    with pytest.raises(ValueError, match=says):
        parse([*RUN, *legacy])
    assert resolve(parse([*RUN, *legacy, *OURS[:1], "topk"])).moe_router_type == "topk"
    assert resolve(parse([*RUN, *legacy, "--num-experts", "0"])).moe_num_experts is None


def test_our_flag_goes_with_any_weights_and_losses():
    words = "--moe-top-k 2 --moe-renormalize --moe-router-topk-scaling-factor 2 "
    words += "--moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid"
    line = parse([*RUN, "--moe-num-experts", "4", *OURS, *words.split()])
    config = resolve(line)
    assert (config.moe_router_type, config.moe_loss_weight) == ("sinkhorn", 0.2)
    assert config.moe_renormalize
    other = [*OURS, "--moe-router-load-balancing-type", "seq_aux_loss"]
    line = parse([*RUN, "--moe-num-experts", "4", *other])
    assert resolve(line).moe_balance_over == "sequence"
    assert resolve(line).moe_router_type == "sinkhorn"
    (note,) = (note for note in line.notes if "effect" in note)
    assert note.startswith("less effect beside --moe-router-type sinkhorn: --moe-router-load-")
    line = parse([*RUN, "--moe-num-experts", "4", "--moe-router-type", "topk", *SINKHORN])
    assert resolve(line).moe_router_score_function == "softmax"
    assert any(note.startswith("no effect beside --moe-router-type topk") for note in line.notes)
    with pytest.raises(ValueError, match="--moe-router-type topk with --moe-router-enable-expert"):
        resolve(parse([*RUN, "--moe-num-experts", "4", *OURS, "--moe-router-enable-expert-bias"]))


def test_another_balance_replaces_that_of_a_run():
    loaded = {"moe_router_type": "sinkhorn", "moe_num_experts": 4}
    for name in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
        line = parse([*RUN, "--moe-router-load-balancing-type", name])
        assert resolve(line, loaded).moe_router_type == "topk"
    assert resolve(parse(RUN), loaded).moe_router_type == "sinkhorn"


def reference(layer: MoELayer, x_TD: torch.Tensor) -> torch.Tensor:
    """y_TD of real tokens alone: masses scaled until nothing moves, then one expert at a time."""
    config, x_TD = layer.config, x_TD.double()
    named = {name: p.double() for name, p in layer.named_parameters()}
    logits_TE = x_TD @ named["router.weight"].T
    mass_TE = logits_TE.detach().exp()
    for _ in range(500):
        mass_TE = mass_TE / mass_TE.sum(dim=1, keepdim=True)
        mass_TE = mass_TE / mass_TE.sum(dim=0, keepdim=True)
    by = mass_TE / mass_TE.sum(dim=1, keepdim=True) if layer.training else logits_TE.detach()
    rows = []
    for t, x_D in enumerate(x_TD):
        best = sorted(range(config.num_experts), key=lambda e: -by[t, e].item())[: config.top_k]
        parts = []
        for e in best:
            gate_F, up_F = (named["experts.w1"][e] @ x_D).chunk(2)
            out_D = named["experts.w2"][e] @ (F.silu(gate_F) * up_F)
            alone = config.top_k == 1
            score = logits_TE[t, e].sigmoid() if alone else logits_TE[t].softmax(0)[e]
            parts.append(score * out_D)
        rows.append(sum(parts))
    return torch.stack(rows)


def model_of(kind: str, *typed: str):
    words = "--num-experts 4 --moe-ffn-hidden-size 12 --swiglu --disable-bias-linear "
    words += "--init-method-std 0.3 --attention-dropout 0 --hidden-dropout 0 "
    words += f"--model {kind} --decoder-seq-length 8"
    config = resolve(parse([*RUN, *words.split(), *SINKHORN, *typed]))
    torch.manual_seed(0)
    return whole_model(config, vocab_size=40)


def forward(model, kind: str) -> torch.Tensor:
    """A number of all that a model puts out of two texts, of which masked models pad the second."""
    generator = torch.Generator().manual_seed(1)
    x_BS = torch.randint(0, 40, (2, 8), generator=generator)
    if kind == "gpt":
        further = {"labels_1_BS": x_BS.roll(-2, 1), "weights_1_BS": torch.full((2, 8), 1 / 16)}
        further |= {"positions_1_BS": (torch.arange(8) + 1).clamp(max=7).expand(2, 8)}
        further = further if len(model.mtp) else {}
        return model(x_BS, labels_BS=x_BS.roll(-1, 1), **further).total()
    ends = torch.tensor([[8, 8], [5, 8]])  # what follows the second text is padding
    valid_BS = (torch.arange(8) < ends[:, :1]).long()
    if kind == "bert":
        return model.encode(x_BS, torch.zeros_like(x_BS), ends, valid_BS)[0].square().mean()
    read = Segments(ends, 8)
    memory_BSD, _ = model.encode(x_BS, read, valid_BS)
    return model.decode(x_BS, read, valid_BS, memory_BSD, read)[0].square().mean()


@pytest.mark.parametrize("top_k", ["1", "2"])
@pytest.mark.parametrize(
    ("kind", "typed", "layers"),
    [
        ("gpt", ["--mtp-num-layers", "1"], 3),
        ("gpt", ["--moe-expert-capacity-factor", "4"], 2),
        ("bert", [], 2),
        ("t5", [], 4),
    ],
)
def test_layers_choose_by_balanced_logits_in_training_and_by_scores_else(
    kind, typed, layers, top_k
):
    model = model_of(kind, "--moe-router-topk", top_k, *typed)
    found = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert len(found) == layers
    assert all(type(layer.router) is SinkhornRouter for layer in found)
    compared, moved = [], []

    def compare(layer, args, kwargs, output):
        mask = kwargs.get("mask")
        x_BSD = args[0]
        real_BS = torch.ones(x_BSD.shape[:-1], dtype=torch.bool) if mask is None else mask.bool()
        got_TD, want_TD = output.y[real_BS], reference(layer, x_BSD[real_BS])
        torch.testing.assert_close(got_TD.double(), want_TD, rtol=1e-4, atol=1e-5)
        tensors = [layer.router.weight, layer.experts.w1]
        mix_TD = torch.linspace(-1, 1, got_TD.numel()).view(got_TD.shape)
        grads = [
            torch.autograd.grad((y_TD * mix_TD).sum(), tensors, retain_graph=True)
            for y_TD in (got_TD, want_TD)
        ]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
        chosen = layer.route(x_BSD, mask=mask).expert_ids_TK.sort(1).values
        was = layer.training
        by_score = layer.eval().route(x_BSD, mask=mask).expert_ids_TK.sort(1).values
        layer.train(was)
        moved.append((chosen != by_score).any().item())
        compared.append(layer)

    for layer in found:
        layer.register_forward_hook(compare, with_kwargs=True)
    forward(model, kind)
    assert len(compared) == layers
    assert any(moved)  # by scores the experts would be others
    compared.clear()
    moved.clear()
    forward(model.eval(), kind)
    assert compared
    assert not any(moved)


@pytest.mark.parametrize("what", ["blocks", "attention"])
def test_a_recomputed_pass_chooses_the_same_experts(what):
    """With noise on what the router sees, and half of an even share of room."""
    typed = "--moe-router-topk 2 --moe-input-jitter-eps 0.3 --moe-expert-capacity-factor 0.5"
    grads = []
    for recomputed in (False, True):
        model = model_of("gpt", *typed.split(), "--attention-dropout", "0.2")
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        if recomputed:
            apply_recompute(blocks if what == "blocks" else [b.attention for b in blocks], "full")
        torch.manual_seed(7)
        forward(model, "gpt").backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    plain, again = grads
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert math.isfinite(sum(grad.abs().sum() for grad in plain.values()))


def test_a_model_is_written_as_the_one_that_chooses_by_the_same_scores(tmp_path):
    words = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12 --swiglu "
    words += "--disable-bias-linear --position-embedding-type rope --normalization RMSNorm "
    words += "--qk-layernorm --qk-layernorm-over width --init-method-std 0.3 --tokenizer null:39"
    config = resolve(parse([*RUN, *words.split(), *SINKHORN]))
    torch.manual_seed(0)
    model = whole_model(config, vocab_size=40)
    write_run(tmp_path / "run", config, model.state_dict(), say=lambda line: None)
    told = []
    export_model(tmp_path / "run", tmp_path / "written", say=told.append)
    assert any("chosen by Sinkhorn's balance in training; elsewhere by" in line for line in told)
    back, weights = read_model(tmp_path / "written", tokenizer="null:39")
    assert (back.moe_router_type, back.moe_renormalize) == ("topk", False)
    again = whole_model(back, vocab_size=40)
    again.load_state_dict(dict(weights))
    x_BS = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = [m.eval().logits(x_BS) for m in (model, again)]
    torch.testing.assert_close(*logits)


def test_a_run_goes_on_with_another_choice_and_says_so(tmp_path, capsys):
    run = tmp_path / "run"
    words = "--num-experts 4 --moe-router-topk 1 --moe-ffn-hidden-size 16 --eval-iters 1 "
    words += "--tokenizer null:40 --device cpu --split 80,20,0 --mock-data --log-interval 1"
    assert main([*RUN, *words.split(), *SINKHORN, "--save", str(run)]) == 0
    assert main(["generate", str(run), "--prompt", "1 2", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    more = ["--load", str(run), "--train-iters", "3"]
    assert main([*more, "--moe-router-load-balancing-type", "none"]) == 0
    said = capsys.readouterr().out
    assert "--moe-router-type was sinkhorn until now, and is topk from here on" in said
    # The scores are as they were, whose weights the experts have learned with.
    saved = read_saved_run(checkpoint_in(run)).config
    assert (saved["moe_router_type"], saved["moe_router_score_function"]) == ("topk", "sigmoid")
    assert main(["plan", *RUN, *words.split(), *SINKHORN, "--gpu", "H100"]) == 0
