"""Where a run multiplies in 8-bit floats, and where it does not."""

import dataclasses

import mb_kernels
import pytest
import torch
from mb_layers.moe import MoELayer
from mb_train.config import TrainConfig
from mb_train.config.resume import check_changes
from mb_train.flags.command_line import parse
from mb_train.flags.starting import resolve_start
from mb_train.machine.device import check_fp8
from mb_train.models.linear import Linear
from mb_train.models.unfilled import unfilled
from mb_train.plan.sizing import sizes
from mb_train.plan.words import describe
from mb_train.tasks.make import whole_model

RUN = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
    "micro_batch_size": 2, "train_iters": 4, "lr": 1e-3,
}  # fmt: skip
FP8 = {"fp8_format": "hybrid"}
EXPERTS = {"moe_num_experts": 4, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 8}
LATENT = {
    "multi_latent_attention": True, "position_embedding_type": "rope", "q_lora_rank": 12,
    "kv_lora_rank": 8,
}  # fmt: skip


def in_fp8(**change):
    """The names of all modules that multiply in 8-bit floats, and of all maps that do not."""
    config = TrainConfig(**{**RUN, **FP8, **change})
    with unfilled():
        model = whole_model(config, vocab_size=64)
    kinds = {n: m.fp8 for n, m in model.named_modules() if isinstance(m, Linear)}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MoELayer)}
    for name, layer in layers.items():
        kinds[f"{name}.experts"] = layer.experts.config.fp8
        if layer.shared_expert is not None:
            kinds[f"{name}.shared_expert"] = layer.shared_expert.config.fp8
    return {n for n, fp8 in kinds.items() if fp8}, {n for n, fp8 in kinds.items() if not fp8}


def layers_of(names, stack="stack"):
    return {int(name.split(".")[2]) for name in names if name.startswith(f"{stack}.blocks.")}


def test_all_maps_of_blocks_are_and_nothing_else():
    rounded, rest = in_fp8(untie_embeddings_and_output_weights=True, **EXPERTS)
    parts = {name.partition(".blocks.1.")[2] for name in rounded} - {""}
    assert parts == {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}
    assert {"stack.blocks.0.mlp.experts", "stack.blocks.2.mlp.shared_expert"} <= rounded
    assert (layers_of(rounded), rest) == ({0, 1, 2, 3}, {"head"})
    latent, _ = in_fp8(**LATENT)
    assert {n.rpartition(".")[2] for n in latent if ".attention." in n} == {
        "q_down", "q_up", "kv_down", "kv_up", "out",
    }  # fmt: skip
    assert in_fp8(fp8_format=None, **EXPERTS)[0] == set()


def test_of_each_kind_of_layers_the_maps_that_stay_are_those_the_page_names():
    states = {
        "experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    mamba = {
        "hybrid_layer_pattern": "MS*-", "position_embedding_type": "none", "mamba_head_dim": 8,
        "mamba_num_groups": 1,
    }  # fmt: skip
    left = [in_fp8(**kind)[1] for kind in (states, mamba, {"mtp_num_layers": 1})]
    assert [{name.rpartition(".")[2] for name in names} for names in left] == [
        {"ba"}, {"dt"}, {"eh_proj"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "left"),
    [({}, {1, 2}), ({"num_layers_at_start_in_bf16": 0}, {0, 1, 2}),
     ({"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 0}, {2, 3})],
)  # fmt: skip
def test_layers_at_the_ends_are_spared(said, left):
    rounded, rest = in_fp8(first_last_layers_bf16=True, **said, **EXPERTS)
    assert (layers_of(rounded), layers_of(rest)) == (left, {0, 1, 2, 3} - left)
    assert layers_of(in_fp8(**said)[0]) == {0, 1, 2, 3}


def test_an_encoder_and_a_decoder_have_ends_of_their_own():
    t5 = {"model": "t5", "decoder_num_layers": 3, "decoder_seq_length": 8}
    rounded, _ = in_fp8(first_last_layers_bf16=True, **t5)
    assert (layers_of(rounded, "encoder"), layers_of(rounded, "decoder")) == ({1, 2}, {1})
    assert "decoder.blocks.1.cross.kv" in rounded
    _, rest = in_fp8(model="bert")
    assert rest == {"lm_head.dense", "pooler.dense", "order_head"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fp16": True}, "--bf16 with --fp8-format, got --fp16"),
        ({"moe_num_experts": 4, "moe_mlp_impl": "sparse"}, "--moe-mlp-impl grouped with --fp8-f"),
        (
            {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
            "to leave one of 4 layers to --fp8-format, got 1 and 3",
        ),
        ({"num_layers_at_start_in_bf16": -1}, "--num-layers-at-start-in-bf16 of at least 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**{**RUN, **FP8, **change})


def test_a_gpu_is_asked_before_the_first_step(monkeypatch):
    config = TrainConfig(**RUN, **FP8)
    check_fp8(config, torch.device("cpu"))
    with pytest.raises(ValueError, match="--bf16 with --fp8-format on a GPU, got --no-bf16"):
        check_fp8(dataclasses.replace(config, bf16=False), torch.device("cuda"))

    def cannot(*_):
        raise ValueError("fp8: expected an NVIDIA GPU; got A100. Leave fp8 out.")

    monkeypatch.setattr(mb_kernels, "float8_linear", cannot)
    with pytest.raises(ValueError, match=r"^--fp8-format: .* got A100. Leave --fp8-format out"):
        check_fp8(config, torch.device("meta"))
    check_fp8(TrainConfig(**RUN), torch.device("meta"))


def test_a_run_that_goes_on_tells_what_changes():
    without, run = TrainConfig(**RUN), TrainConfig(**RUN, **FP8)
    (line,) = check_changes(dataclasses.asdict(without), run)
    assert line == "--fp8-format was None until now, and is hybrid from here on"
    spared = dataclasses.replace(run, first_last_layers_bf16=True)
    (line,) = check_changes(dataclasses.asdict(run), spared)
    assert line == "--first-last-layers-bf16 was False until now, and is True from here on"
    same = dataclasses.replace(run, fp8_format="e4m3", num_layers_at_end_in_bf16=2)
    assert check_changes(dataclasses.asdict(run), same) == []


def test_one_note_says_what_is_computed_instead():
    words = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
    words += "--micro-batch-size 2 --train-iters 4 --first-last-layers-bf16"
    idle = resolve_start(parse(words.split())).notes
    assert "no effect without --fp8-format: --first-last-layers-bf16" in idle
    assert not any("E4M3" in note for note in idle)
    notes = resolve_start(parse([*words.split(), "--fp8-format", "hybrid"])).notes
    (note,) = (note for note in notes if "E4M3" in note)
    assert "found anew at each product, whatever --fp8-format and --fp8-recipe say" in note


def test_a_plan_counts_two_of_three_products_as_half():
    dense = RUN | {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048}
    times, lines = [], []
    for change in ({}, FP8, FP8 | {"first_last_layers_bf16": True}):
        config = TrainConfig(**dense | change)
        found = sizes(config, 64, 1, "H100")
        times.append(found.step_s)
        lines.append("\n".join(describe(config, found, ranks=1, device="H100")))
    assert times[1] < times[2] < times[0]
    assert (times[0] - times[2]) == pytest.approx((times[0] - times[1]) / 2)
    assert "in FP8 at twice the peak" in lines[1]
    assert "FP8" not in lines[0]
    for device in ("A100", "MI250X", "7900 XTX"):
        with pytest.raises(ValueError, match=rf"9070, for --fp8-format, got {device}\. Leave it"):
            sizes(TrainConfig(**dense | FP8), 64, 1, device)
    for device in ("MI300X", "R9700"):
        wide, rounded = (sizes(TrainConfig(**dense | c), 64, 1, device).step_s for c in ({}, FP8))
        assert rounded < wide
