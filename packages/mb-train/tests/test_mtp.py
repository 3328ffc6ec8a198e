"""Modules for further tokens: their formula, what counts for their losses, and what they cost."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.loading import load_trained
from mb_train.plan.flops import flops
from mb_train.plan.sizing import sizes
from mb_train.tasks import GPTTask
from mb_train.tasks.further import further_arrays

EOD, V = 0, 23
SIZES = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "lr": 1e-3,
    "micro_batch_size": 2, "train_iters": 1, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
KINDS = {
    "learned positions, tied": {},
    "rotated, untied": {
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
    },
    "experts behind a dense layer": {"moe_num_experts": 4, "moe_top_k": 2, "moe_first_k_dense": 1},
    "a window in the first layer": {
        "window_size": 2, "window_attn_skip_freq": 2, "position_embedding_type": "rope",
    },
    "gates, and no positions in the last layer": {
        "attention_output_gate": True, "no_rope_freq": 2, "position_embedding_type": "rope",
    },
    "norms of outputs": {"norm_placement": "output"},
    "norms in both places": {"norm_placement": "both", "normalization": "RMSNorm"},
    "what norms put out kept": {"norm_placement": "kept"},
    "layers that are halves of blocks": {
        "num_layers": 5, "hybrid_layer_pattern": "M*-ME", "mtp_hybrid_override_pattern": "*ME",
        "position_embedding_type": "none", "moe_num_experts": 4, "moe_top_k": 2,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 4,
    },
}  # fmt: skip
TEXT = np.array([[1, 2, 3, EOD, 5, 6, EOD, 8, 9], [4, 5, 6, 7, 8, 9, 10, 11, 12]])


def task(**change) -> GPTTask:
    return GPTTask(TrainConfig(**{**SIZES, "mtp_num_layers": 2, **change}), vocab_size=V, eod=EOD)


def batch_of(of: GPTTask, text=TEXT):
    return {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in of.collate([*text]).items()}


def model_of(of: GPTTask):
    torch.manual_seed(0)
    model = of.build_model(compute_dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = 0.3 if parameter.ndim > 1 else 0.1
            parameter.add_(wide * torch.randn_like(parameter)) if "router" not in name else None
    return model


def by_formula(model, text_BS):
    """Sums of the losses of two modules over all labels that there are, one after the other."""
    tokens_BS, S = text_BS[:, :-1], text_BS.shape[1] - 1
    positions_1S = torch.arange(S)[None]
    x_BSD, _, context = model._hidden(tokens_BS, positions_1S)
    head_VD = model.embedding.tokens.weight if model.head is None else model.head.weight
    found = []
    for k in (1, 2):
        module = model.mtp[str(k - 1)]
        further_BS = F.pad(text_BS[:, k:], (0, k - 1))
        e_BSD = model.embedding.tokens(further_BS)
        if model.embedding.positions is not None:
            e_BSD = e_BSD + model.embedding.positions((positions_1S + k).clamp(max=S - 1))
        both = torch.cat([module.enorm(e_BSD), module.hnorm(x_BSD)], 2)
        x_BSD = both @ module.eh_proj.weight.T
        for block in module.stack.blocks.values():
            x_BSD = block(x_BSD, context).x_BSD
        x_BSD = module.stack.norm(x_BSD)
        scores = x_BSD[:, : S - k] @ head_VD.T
        found.append(
            F.cross_entropy(scores.flatten(0, 1), text_BS[:, k + 1 :].flatten(), reduction="sum")
        )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_follow_the_formula(kind):
    of = task(mtp_loss_scaling_factor=0.4, moe_loss_weight=0.0, **KINDS[kind])
    model, batch = model_of(of).train(), batch_of(of)
    tokens_BS = batch.pop("tokens_BS")
    output = model(tokens_BS, **batch)
    assert list(output.losses) == ["lm loss", "mtp_1 loss", "mtp_2 loss"]
    wanted = by_formula(model, torch.from_numpy(TEXT))
    got = [output.losses[f"mtp_{k} loss"] for k in (1, 2)]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = output.losses["lm loss"].detach() * 0 + sum(output.losses.values())
    grads = torch.autograd.grad(total, parameters)
    scaled = model.eval()(tokens_BS, **batch).losses["lm loss"] + 0.4 / 2 * sum(wanted)
    expected = torch.autograd.grad(scaled, parameters, allow_unused=True)
    for name, grad, want in zip(dict(model.named_parameters()), grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4, msg=name)


def test_evaluation_does_without():
    of = task(moe_num_experts=4)
    model, batch = model_of(of), batch_of(of)
    plain = GPTTask(TrainConfig(**SIZES, moe_num_experts=4), vocab_size=V, eod=EOD)
    without = plain.build_model(compute_dtype=torch.float32)
    trunk = {n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")}
    without.load_state_dict(trunk)
    tokens_BS = batch.pop("tokens_BS")
    lm_loss = model.train()(tokens_BS, **batch).losses["lm loss"]
    evaluated = model.eval()(tokens_BS, **batch).losses
    assert list(evaluated) == ["lm loss"]
    assert evaluated["lm loss"] == lm_loss
    assert torch.equal(model.logits(tokens_BS), without.eval().logits(tokens_BS))


def test_what_counts_at_the_ends_of_sequences_and_documents():
    """By brute force: a label k places on counts as it does for the model, in its document."""
    for change in (
        {},
        {"eod_mask_loss": True},
        {"reset_attention_mask": True},
        {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True},
        {"reset_attention_mask": True, "pipeline_model_parallel_size": 2},
    ):
        batch = task(**change, mtp_num_layers=3).collate([*TEXT])
        S, apart = TEXT.shape[1] - 1, "reset_attention_mask" in change
        for k, row, i in np.ndindex(3, len(TEXT), S):
            k += 1
            crossed = apart and EOD in TEXT[row, i : i + k]
            inside = i + k < S and not crossed
            label, weight = (batch[f"{what}_{k}_BS"][row, i] for what in ("labels", "weights"))
            assert weight == (batch["weights_BS"][row, i + k] if inside else 0), (change, k, row, i)
            assert label == (TEXT[row, i + k + 1] if i + k < S else 0)


def test_answers_alone_count():
    labels_BS, weights_BS = np.arange(6)[None], np.array([[0, 1, 1, 0, 0, 1]], np.float32)
    batch = {"labels_BS": labels_BS, "weights_BS": weights_BS, "ends_BN": np.array([[3, 6]])}
    found = further_arrays(batch, 2, positions=False)
    assert found["weights_1_BS"].tolist() == [[1, 1, 0, 0, 1, 0]]
    assert found["weights_2_BS"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert found["labels_2_BS"].tolist() == [[2, 3, 4, 5, 0, 0]]


def test_more_modules_than_tokens_learn_nothing():
    of = task(seq_length=2, mtp_num_layers=3)
    model, batch = model_of(of).train(), batch_of(of, TEXT[:, :3])
    losses = model(batch.pop("tokens_BS"), **batch).losses
    assert [bool(losses[f"mtp_{k} loss"] > 0) for k in (1, 2, 3)] == [True, False, False]


@pytest.mark.parametrize("change", [{}, {"reset_attention_mask": True, "reset_position_ids": True}])
def test_parts_of_sequences_know_what_comes_behind_them(change):
    config = TrainConfig(**SIZES, mtp_num_layers=2, context_parallel_size=2, **change)
    whole = task(**change).collate([*TEXT])
    parts = []
    for part in range(2):
        mesh = SimpleNamespace(cp_rank=part, cp_size=2)
        of = GPTTask(config, vocab_size=V, eod=EOD, mesh=mesh)
        parts.append(of.collate([*TEXT]))
    for name, array in whole.items():
        if name == "ends_BN":
            assert all((part[name] == array).all() for part in parts)
        else:
            joined = np.concatenate([part[name] for part in parts], axis=1)
            assert (joined == array).all(), name
    for k in (1, 2):  # the first part's last tokens have the second's for further ones
        assert parts[0][f"weights_{k}_BS"][1].all()


def test_a_plan_counts_them():
    """Parameters, and products as Megatron counts them: a layer, the map to it, the head again."""
    plain, further = (TrainConfig(**SIZES, mtp_num_layers=n) for n in (0, 2))
    one, both = (sizes(config, V, 1, "CPU") for config in (plain, further))
    model = model_of(task())
    assert both.parameters - one.parameters == sum(p.numel() for p in model.mtp.parameters())
    D, S = 16, 8
    before, after = (GPTTask(c, vocab_size=V, eod=EOD).workload for c in (plain, further))
    more = [a - b for a, b in zip(flops(after), flops(before), strict=True)]
    block, attention, head = flops(before)
    assert more == [block + 2 * 6 * S * 2 * D * D, attention, 2 * head]
    assert both.activations > one.activations
    assert before.layers == after.layers == 2
    staged = dataclasses.replace(further, pipeline_model_parallel_size=2)
    alone = dataclasses.replace(plain, pipeline_model_parallel_size=2)
    assert sizes(staged, V, 2, "CPU").weights > sizes(alone, V, 2, "CPU").weights


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "bert"}, "--model gpt, .* got bert"),
        ({"post_layernorm": True}, "a norm that ends it.* got .* --post-layernorm"),
        ({"norm_placement": "sum"}, "a norm that ends it.* got .* --norm-placement"),
        ({"mtp_num_layers": -1}, "--mtp-num-layers of at least 0, got -1"),
    ],
)
def test_what_does_not_go_together_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**{**SIZES, "mtp_num_layers": 1, **change})


def test_a_run_stops_and_goes_on_to_the_bit(tmp_path, capsys):
    """With dropout; what else a run says of itself has them too."""
    line = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2 "
        "--micro-batch-size 2 --train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1 "
        "--moe-num-experts 2 --mtp-num-layers 2 --mock-data --tokenizer null:40 --device cpu "
        "--make-vocab-size-divisible-by 1"
    )
    words, whole, parts = line.split(), tmp_path / "whole", tmp_path / "parts"
    assert main([*words, "--save", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "| mtp_1 loss: " in said
    assert "mtp_1 loss value" not in said
    assert main([*words, "--save", str(parts), "--exit-interval", "2"]) == 0
    assert main(["--load", str(parts)]) == 0

    def lines(run):
        events = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        return [
            (e["lm_losses"], e["losses"], e["grad_norm"]) for e in events if e["event"] == "train"
        ]

    assert lines(whole) == lines(parts)
    assert len(lines(whole)) == 4
    assert main(["report", str(whole)]) == 0
    assert main(["generate", str(whole), "--prompt", "1 2", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    for other in ("0", "1", "3"):
        assert main(["--load", str(whole), "--train-iters", "6", "--mtp-num-layers", other]) == 2
        said = capsys.readouterr().err
        assert (
            f"--mtp-num-layers 2, with which the run to go on from was started, got {other}" in said
        )


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("before", "after"), [(2, 0), (2, 1), (0, 2), (1, 2)])
def test_a_new_run_from_its_weights_takes_as_many_as_it_likes(tmp_path, before, after):
    """The first of those that there are, and further ones as a run without --load draws them."""
    line = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-2 "
        "--micro-batch-size 2 --eval-iters 0 --moe-num-experts 2 --mock-data --tokenizer null:40 "
        "--device cpu --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    )
    words, old, new = line.split(), tmp_path / "old", tmp_path / "new"
    begun = ["--train-iters", "2", "--mtp-num-layers", str(before), "--save", str(old)]
    assert main([*words, *begun]) == 0
    # The first step of a warm-up has a rate of 0.
    still = "--train-iters 1 --lr-decay-iters 3 --lr-warmup-iters 2 --moe-router-bias-update-rate 0"
    further = [*still.split(), "--finetune", "--mtp-num-layers", str(after), "--save", str(new)]
    assert main(["--load", str(old), *further]) == 0
    fresh = [
        *words,
        *still.split(),
        "--mtp-num-layers",
        str(after),
        "--save",
        str(tmp_path / "fresh"),
    ]
    assert main(fresh) == 0
    first, second, drawn = (
        load_trained(run, mtp_num_layers=None).model.state_dict()
        for run in (old, new, tmp_path / "fresh")
    )
    more = {f"mtp.{number}" for number in range(before, after)}
    assert {".".join(name.split(".")[:2]) for name in second.keys() - first.keys()} == more
    assert len({name.split(".")[1] for name in second if name.startswith("mtp.")}) == after
    for name, tensor in second.items():
        assert torch.equal(tensor, first.get(name, drawn[name])), name
