"""Experts that begin as a dense model's feed-forwards."""

import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.convert import export_model, write_run
from mb_train.loading import load_trained
from mb_train.models.segments import Segments
from mb_train.tasks.make import whole_model

V, S = 41, 11
GATED = {
    "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip


def dense_run(folder, **fields):
    base = {
        "num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "seq_length": S, "lr": 1.0,
        "micro_batch_size": 1, "train_iters": 1, "tokenizer": f"null:{V - 1}",
        "init_method_std": 0.3, "make_vocab_size_divisible_by": V,
    }  # fmt: skip
    config = TrainConfig(**base | fields)
    torch.manual_seed(0)
    model = whole_model(config, vocab_size=V)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_run(folder, config, model.state_dict(), say=lambda line: None)
    return folder


HYBRID = {
    "hybrid_layer_pattern": "-M-*-", "num_layers": 5, "position_embedding_type": "none",
    "mamba_head_dim": 8, "mamba_num_groups": 1, "mamba_state_dim": 4,
}  # fmt: skip


@torch.no_grad()
def outputs_of(run):
    trained = load_trained(run, kinds=("gpt", "bert", "t5"))
    x_BS = torch.randint(0, V, (2, S), generator=torch.Generator().manual_seed(1))
    whole_B1, ones_BS = torch.full((2, 1), S), torch.ones_like(x_BS)
    if trained.config.model == "gpt":
        return trained.model.logits(x_BS)
    if trained.config.model == "bert":
        return trained.model.encode(x_BS, torch.zeros_like(x_BS), whole_B1, ones_BS)[0]
    read = Segments(whole_B1, S)
    memory_BSD, _ = trained.model.encode(x_BS, read, ones_BS)
    return trained.model.decode(x_BS, read, ones_BS, memory_BSD, read)[0]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, []),
        (GATED, ["--moe-top-k", "2"]),
        ({}, ["--moe-first-k-dense", "1", "--moe-top-k", "3", "--moe-output-bias"]),
        ({"model": "bert"}, ["--moe-top-k", "2", "--moe-router-enable-expert-bias"]),
        ({"model": "t5", "decoder_seq_length": S}, ["--moe-top-k", "2"]),
        ({}, ["--moe-router-type", "sinkhorn"]),
        (HYBRID, ["--moe-top-k", "2"]),
        (HYBRID | {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*-"}, []),
    ],
    ids=str,
)
def test_it_computes_what_the_dense_model_did(tmp_path, capsys, fields, flags):
    dense = dense_run(tmp_path / "dense", **fields)
    words = ["upcycle", str(dense), str(tmp_path / "run"), "--moe-num-experts", "4", *flags]
    assert main(words) == 0
    assert "does not compute" not in capsys.readouterr().out
    torch.testing.assert_close(outputs_of(tmp_path / "run"), outputs_of(dense))
    model = load_trained(tmp_path / "run", kinds=("gpt", "bert", "t5")).model
    routers = [p for name, p in model.named_parameters() if name.endswith("router.weight")]
    assert len(routers) == {"t5": 6}.get(fields.get("model"), 3) - ("--moe-first-k-dense" in flags)
    assert all(router.std() > 0 for router in routers)


def test_a_mistral_becomes_a_mixtral(tmp_path):
    dense = dense_run(tmp_path / "dense", **GATED)
    words = ["--num-experts", "4", "--moe-aux-loss-coeff", "0.1", str(dense), str(tmp_path / "run")]
    torch.manual_seed(7)
    assert main(["upcycle", *words]) == 0
    assert torch.initial_seed() == 7
    config = load_trained(tmp_path / "run").config
    assert (config.moe_num_experts, config.moe_top_k) == (4, 2)
    said = []
    export_model(tmp_path / "run", tmp_path / "theirs", say=said.append)
    assert said[0].startswith("MixtralForCausalLM")


def test_what_computes_otherwise_is_said_and_what_has_no_copy_refused(tmp_path, capsys):
    dense, run = dense_run(tmp_path / "dense"), tmp_path / "run"
    four = ["upcycle", str(dense), str(run), "--moe-num-experts", "4"]
    for words, says in (
        ([*four, "--lr", "1"], "flags of the experts alone, got --lr"),
        ([*four, "--recipe", "dense-46m", "--print-config"], "got --recipe, --print-config"),
        (four[:3], "got no number of them"),
        ([*four, "--moe-num-experts", "0"], "got no number of them"),  # none, as Megatron means it
        ([*four, "--moe-ffn-hidden-size", "32"], "--moe-ffn-hidden-size 64 of experts"),
        ([*four, "--moe-shared-expert-intermediate-size", "8"], "--moe-shared-expert"),
        ([*four, "--no-moe-mlp-bias"], "--moe-mlp-bias True of experts"),
        ([*four, "--moe-latent-size", "8"], "--moe-latent-size None of experts"),
        (["upcycle", str(tmp_path), *four[2:]], "Expected a checkpoint in"),
    ):
        assert main(words) == 2
        assert says in " ".join(capsys.readouterr().err.split())
        assert not run.exists()
    assert main([*four, "--no-moe-renormalize"]) == 0
    assert "it does not compute what the dense model did" in capsys.readouterr().out
    others = (
        ["--moe-renormalize-p", "2"],
        ["--moe-router-topk-scaling-factor", "2"],
        ["--moe-num-zero-experts", "1"],
        ["--moe-capacity-factor", "1"],
    )
    for number, flags in enumerate(others):
        torch.manual_seed(number)
        assert main([*four[:2], str(tmp_path / f"{number}"), *four[3:], *flags]) == 0
        assert "it does not compute what the dense model did" in capsys.readouterr().out
    # New weights are of the run's own seed, whatever else was drawn in the process.
    first, second = (load_trained(tmp_path / name).model.state_dict() for name in "01")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    idle = ["--moe-renormalize-p", "2", "--no-moe-renormalize", "--moe-grouped-gemm"]
    assert main([*four[:2], str(tmp_path / "more"), *four[3:], *idle]) == 0
    said = capsys.readouterr().out
    assert "note: no effect without --moe-renormalize: --moe-renormalize-p\n" in said
    assert "--moe-grouped-gemm (the experts are always computed together)" in said
    assert main(["upcycle", str(run), str(tmp_path / "again"), *four[3:]]) == 2
    assert "Expected a dense model" in capsys.readouterr().err
