"""A configuration refuses what cannot work, in words; its defaults are Megatron's."""

import dataclasses
import inspect
from dataclasses import fields

import pytest
from mb_layers import MoEConfig
from mb_train.config import GROUPS, TrainConfig
from mb_train.config.field import spec
from mb_train.config.recipes import RECIPES, recipe
from mb_train.config.resume import check_changes, inherited
from mb_train.data.vocabulary import vocabulary_rows
from mb_train.machine.device import precision_note
from mb_train.models.config import DeltaSizes, MambaSizes
from mb_train.plan.sizing import sizes
from mb_train.tasks.architecture import expert_config, transformer_config

RUN = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8,
    "micro_batch_size": 2, "train_iters": 10, "lr": 1e-3,
}  # fmt: skip


def test_positions_are_as_many_as_the_longest_sequence_has():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "micro_batch_size": 1}
    longest = {"model": "t5", "seq_length": 4, "decoder_seq_length": 6, "vocab_extra_ids": 2}
    assert TrainConfig(**sizes, **longest, train_iters=1, lr=1.0).positions == 6


def test_a_precision_that_nobody_asked_for_is_told_where_megatrons_is_another():
    for said, told in (({}, True), ({"bf16": True}, False), ({"bf16": False}, False)):
        note = precision_note(TrainConfig(**RUN, **said), "cuda")
        assert (note is not None) == told
    assert "--no-bf16" in precision_note(TrainConfig(**RUN), "cuda")
    assert precision_note(TrainConfig(**RUN, fp16=True), "cuda") is None
    assert precision_note(TrainConfig(**RUN), "cpu") is None  # in fp32, as there


def test_defaults_derive_from_sizes():
    config = TrainConfig(**RUN)
    assert (config.head_size, config.ffn_size, config.positions) == (8, 128, 8)
    assert config.activation_name == "gelu_tanh"
    assert TrainConfig(**RUN, glu=True).activation_name == "geglu_tanh"
    for hidden, width in (32, 64), (1024, 2688), (4096, 10880):  # 8/3 of it, down to a step of 64
        gated = TrainConfig(**RUN | {"hidden_size": hidden}, swiglu=True)
        assert (gated.ffn_size, gated.expert_ffn_size) == (width, width)
    assert (config.weight_decay, config.clip_grad, config.seed) == (0.01, 1.0, 1234)
    assert config.batch_size(3) == 6
    assert TrainConfig(**RUN, global_batch_size=12).batch_size(2) == 12
    # Zero experts are chosen among too.
    TrainConfig(**RUN, moe_num_experts=2, moe_top_k=4, moe_num_zero_experts=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": None}, "missing --num-layers"),
        ({"hidden_size": 30}, "--hidden-size to be divisible by --num-attention-heads, got 30 and"),
        ({"moe_num_experts": 2, "moe_top_k": 3}, "--moe-top-k of at most --moe-num-experts, got 3"),
        (
            {"moe_num_experts": 2, "moe_top_k": 5, "moe_num_zero_experts": 2},
            "of at most --moe-num-experts and --moe-num-zero-experts together, got 5 and 4",
        ),
        ({"lr": 0.0}, "--lr above 0, got 0"),
        ({"lr": float("nan")}, "--lr above 0, got nan"),
        ({"moe_capacity_factor": -1.0}, "--moe-capacity-factor of at least 0, got -1"),
        ({"hidden_dropout": 1.0}, r"--hidden-dropout in \[0, 1\), got 1"),
        ({"mask_prob": 1.0}, r"--mask-prob in \[0, 1\), got 1"),
        ({"optimizer": "lion"}, "--optimizer to be one of adam, sgd, adafactor, muon, got"),
        ({"max_position_embeddings": 4}, "--max-position-embeddings of at least --seq-length"),
        ({"train_iters": None}, "one of --train-iters and --train-samples, got neither"),
        ({"train_samples": 4}, "one of --train-iters and --train-samples, got both"),
        ({"global_batch_size": 3}, "to be a multiple of --micro-batch-size 2, got 3"),
        ({"min_lr": 1.0}, "--min-lr of at most --lr 0.001, got 1.0"),
        ({"lr_decay_samples": 8}, "in the unit of --train-iters, got --lr-decay-samples"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2}, "one kind of warm-up"),
        ({"weight_decay_incr_style": "linear"}, "--start-weight-decay and --end-weight-decay"),
        ({"glu": True, "activation": "relu"}, "gated --activation with --glu, got 'relu'"),
        ({"zero_stage": 4}, "--zero-stage to be one of 0, 1, 2, 3, got 4"),
        ({"seed": 2**32}, r"--seed in \[0, 2\*\*32\), got 4294967296"),
        ({"lr": float("inf")}, "a finite --lr, got inf"),
        ({"hidden_size": "32"}, "--hidden-size to be int, got '32'"),
        ({"hidden_size": 2**63}, "--hidden-size to fit 64 bits, got 9223372036854775808"),
        ({"lr": 10**400}, "--lr to fit 64 bits, got 1000"),
        ({"micro_batch_size": True}, "--micro-batch-size to be int, got True"),
        ({"train_iters": 10.5}, "--train-iters to be int, got 10.5"),
        ({"eval_interval": None}, "--eval-interval to be int, got None"),
        ({"data_path": "a"}, "--data-path to be a list of str, got 'a'"),
        ({"rampup_batch_size": [1, 2, 3.0]}, "--rampup-batch-size to be a list of int"),
        ({"num_query_groups": 3, "group_query_attention": True}, "--num-query-groups to divide"),
        ({"save": ""}, "--save to name something, got nothing"),
        ({"data_path": ["a", ""]}, "--data-path to name something, got nothing"),
        ({"initial_loss_scale": 0.5}, "--initial-loss-scale of at least --min-loss-scale 1.0"),
        ({"end_weight_decay": 0.1}, "weight-decay-incr-style linear or cosine .* got constant"),
        ({"swiglu": True, "activation": "relu"}, "one activation, got --swiglu and --activation"),
        ({"swiglu": True, "squared_relu": True}, r"got --swiglu and --squared-relu\.$"),
        ({"squared_relu": True, "glu": True}, r"one activation, got --glu and --squared-relu\.$"),
        (
            {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
            "--use-rope-scaling or --rotary-seq-len-interpolation-factor, got both",
        ),
        ({"use_rope_scaling": True}, "rope with slowed rotations, got learned"),
        ({"fp16": True, "bf16": True}, "one of --fp16 and --bf16, got both"),
        (
            {"post_layernorm": True, "apply_residual_connection_post_layernorm": True},
            "one place of norms, got --post-layernorm and --apply-residual-connection-post-",
        ),
        ({"loss_scale": 8.0}, "--fp16 with --loss-scale"),
        (
            {"fp16": True, "loss_scale": 1e39},
            r"--loss-scale in \[2\*\*-126, 2\*\*128\), got 1e\+39",
        ),
        ({"min_loss_scale": 1e-46}, r"--min-loss-scale in \[2\*\*-126, 2\*\*128\), got 1e-46"),
        ({"rampup_batch_size": [2, 2]}, "3 values of --rampup-batch-size, got 2"),
        (
            {"recompute_method": "block", "recompute_granularity": "selective"},
            "--recompute-granularity full with --recompute-method block, got selective",
        ),
        (
            {"context_parallel_size": 2, "model": "bert"},
            "--context-parallel-size 1 with --model bert, .*, got 2",
        ),
        (
            {"context_parallel_size": 2, "tensor_model_parallel_size": 4},
            "--num-attention-heads .* --context-parallel-size 2 x --tensor-model-parallel-size 4",
        ),
        (
            {"context_parallel_size": 2, "seq_length": 15},
            r"--seq-length .* multiple of --context-parallel-size, got 15 and 2\. Change one\.",
        ),
        (
            {"tensor_model_parallel_size": 2, "seq_length": 15, "sequence_parallel": True},
            "multiple of --tensor-model-parallel-size with --sequence-parallel, got 15 and 2.*out",
        ),
        ({"pipeline_model_parallel_size": 3}, "of at most --num-layers 2, got 3"),
        (
            {"pipeline_model_parallel_size": 2, "zero_stage": 0},
            "--zero-stage 1, 2 or 3 with --pipeline-model-parallel-size 2, .* got 0",
        ),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "at least 2 stages with --num-layers-per-v"),
        (
            {
                "num_layers": 5,
                "pipeline_model_parallel_size": 4,
                "num_layers_per_virtual_pipeline_stage": 1,
            },
            "a layer of --num-layers for each of their chunks, got 4 stages, 5 layers and 1",
        ),
        ({"pipeline_schedule": "zbv-zero-bubble"}, "--num-layers-per-virtual-pipeline-stage with"),
        (
            {
                "pipeline_schedule": "zbv-zero-bubble",
                "num_layers": 8,
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
            },
            "two chunks a stage with --pipeline-schedule zbv-zero-bubble, got 4, .* of 8 layers",
        ),
        (
            {"moe_expert_model_parallelism": True, "expert_model_parallel_size": 2},
            "one of --moe-expert-model-parallelism",
        ),
        (
            {"moe_num_experts": 4, "moe_router_num_groups": 2, "moe_rebalance_interval": 8},
            "--moe-rebalance-interval 0 with --moe-router-num-groups, .* got 8",
        ),
        (
            {"moe_num_experts": 4, "moe_dispatcher": "fixed"},
            "--moe-capacity-factor above 0 with --moe-dispatcher fixed, got 0",
        ),
        (
            {
                "moe_num_experts": 4,
                "moe_dispatcher": "peer",
                "expert_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "pipeline_schedule": "interleaved-zero-bubble",
                "num_layers_per_virtual_pipeline_stage": 1,
                "num_layers": 4,
            },
            "than peer with --pipeline-schedule interleaved-zero-bubble, .* Take all_to_all",
        ),
        (
            {"moe_num_experts": 4, "moe_first_k_dense": 2},
            "a layer of --num-layers 2 to have experts .* got --moe-first-k-dense 2",
        ),
        (
            {"data_path": ["nan", "x"]},
            "--data-path: expected weights above 0 in a data path, got nan",
        ),
        (
            {"data_path": ["a", "1"]},
            "--data-path: .* prefixes alone, or of weights and prefixes by turns, got a 1",
        ),
        ({"data_path": ["1", "a", "2"]}, "prefixes alone, or of weights and prefixes by turns"),
        ({"data_path": ["1", "2", "b", "4"]}, "or of weights and prefixes by turns"),
        (
            {"data_path": ["a"], "train_data_path": ["b"]},
            "one of the ways to name data, got --data-path and --train-data-path",
        ),
        ({"valid_data_path": ["a"]}, "--train-data-path with --valid-data-path, got none"),
        ({"merge_file": "merges.txt"}, "--vocab-file with --merge-file, got none"),
        ({"vocab_file": "v.txt", "tokenizer": "gpt2"}, "--tokenizer or Megatron's tokenizer"),
        ({"tokenizer_model": "t", "tokenizer": "gpt2"}, "tokenizer flags, got 'gpt2' and 't'"),
        ({"vocab_file": "v", "tokenizer_model": "t"}, "Expected --tokenizer-type with --vocab"),
        ({"model": "t5"}, "--decoder-seq-length with --model t5"),
        (
            {"position_embedding_type": "rope", "kv_channels": 64, "rotary_percent": 0.3},
            r"an even number of a head's channels .* got 19 of 64 with --rotary-percent 0\.3",
        ),
        ({"position_embedding_type": "rope", "kv_channels": 5}, r"or more, got 5 of 5 with"),
        (
            {"position_embedding_type": "rope", "kv_channels": 64, "rotary_percent": 0.01},
            "or more, got 0 of 64 with",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**{**RUN, **change})


LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope", "hidden_size": 30}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "bert"}, "--model gpt with --multi-latent-attention, got bert"),
        ({"group_query_attention": True}, "no --group-query-attention with --multi-latent-att"),
        ({"position_embedding_type": "learned"}, "--position-embedding-type rope with --multi"),
        ({"position_embedding_type": "none"}, "--position-embedding-type rope with --multi"),
        ({"rotary_percent": 0.5}, "--rotary-percent 1 with .* --qk-pos-emb-head-dim says"),
        ({"qk_pos_emb_head_dim": 3}, "an even --qk-pos-emb-head-dim with .* got 3"),
        ({"add_qkv_bias": True}, "no --add-qkv-bias with --multi-latent-attention"),
        ({"qk_layernorm_over": "width"}, "no --qk-layernorm-over with .*, got width"),
        ({"use_rope_scaling": True}, "--rotary-scaling-factor .* with --multi-.*, got --use-rope"),
        ({"rotary_seq_len_interpolation_factor": 2.0}, "with --multi.*interpolation-factor 2"),
        (
            {"rope_type": "rope", "rotary_scaling_factor": 4.0},
            r"--rope-type yarn with --rotary-scaling-factor 4\.0, got rope",
        ),
        (
            {"multi_latent_attention": False, "hidden_size": 32, "rope_type": "yarn",
             "use_rope_scaling": True},
            "--rotary-scaling-factor to slow rotations with --rope-type yarn, got --use-rope",
        ),
        ({"rotary_scaling_factor": 4.0, "beta_fast": 0.5}, "at least --beta-slow, got 0.5 and 1"),
        ({"rotary_scaling_factor": 4.0, "rotary_base": 1.0}, "--rotary-base above 1 with YaRN"),
        ({"mscale": -1.0}, "--mscale of at least 0, got -1"),
        ({"q_lora_rank": 0}, "--q-lora-rank above 0, got 0"),
        ({"window_size": 0}, "no --window-size with --multi-latent-attention, got both: 0"),
        ({"softmax_type": "learnable"}, "--softmax-type vanilla with --multi-latent-att"),
        ({"qk_l2_norm": True, "qk_layernorm": False}, "no --qk-l2-norm with --multi-.*, got both"),
        ({"clip_qkv": 8.0}, "no --clip-qkv with --multi-latent-attention, got both: 8.0"),
        ({"attention_output_gate": True}, "no --attention-output-gate with --multi-.*, got both"),
        ({"no_rope_freq": 9}, "no --no-rope-freq with --multi-latent-attention, got both: 9"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_latent_attention_cannot_have_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        TrainConfig(**{**RUN, **LATENT, **change})


def test_tensor_parallel_ranks_compute_with_whole_heads_and_equal_widths():
    """As the plans of mb_parallel want it, of layers that attend alone."""
    run = RUN | {"num_attention_heads": 8, "tensor_model_parallel_size": 4}
    assert TrainConfig(**run, group_query_attention=True, num_query_groups=4).kv_heads == 4
    in_common = run | {"group_query_attention": True, "num_query_groups": 2}
    assert TrainConfig(**in_common).kv_heads == 2  # each of two ranks
    with pytest.raises(ValueError, match=r"--num-query-groups to be .*-size 4, .* got 2"):
        TrainConfig(**in_common, qk_layernorm=True, qk_layernorm_over="width")
    with pytest.raises(ValueError, match=r"--num-query-groups to be .*-size 16, .* got 2"):
        TrainConfig(**in_common | {"tensor_model_parallel_size": 16})
    few = run | {"tensor_model_parallel_size": 3, "ffn_hidden_size": 24}
    with pytest.raises(ValueError, match=r"--num-attention-heads to be a multiple of .* got 8"):
        TrainConfig(**few)
    assert TrainConfig(**few, experimental_attention_variant="gated_delta_net").kv_heads == 8
    halves = {"hybrid_layer_pattern": "M-", "mamba_num_groups": 1}
    assert TrainConfig(**few, **halves, position_embedding_type="none").kv_heads == 8
    odd = run | {"ffn_hidden_size": 25}
    with pytest.raises(ValueError, match=r"--ffn-hidden-size to be .*-size 4, .*, got 25"):
        TrainConfig(**odd)
    assert not TrainConfig(**odd, moe_num_experts=4).has_dense_layers  # experts are whole
    with pytest.raises(ValueError, match="--ffn-hidden-size"):
        TrainConfig(**odd, moe_num_experts=4, moe_first_k_dense=1)


def test_what_can_work_beside_another_is_not_refused():
    config = TrainConfig(**RUN | {"hidden_size": 33, "kv_channels": 6}, squared_relu=True)
    assert (config.head_size, config.activation_name) == (6, "squared_relu")
    both = {"vocab_file": "v", "tokenizer_model": "t", "tokenizer_type": "TikTokenizer"}
    assert TrainConfig(**RUN, **both, glu=True, activation="reglu").is_glu
    assert TrainConfig(**RUN | LATENT, rope_type="rope").rope_scaling is None
    for field, norms in (
        ({"apply_residual_connection_post_layernorm": True}, "kept"),
        ({"post_layernorm": True}, "sum"),
        ({"norm_placement": "output"}, "output"),
        ({}, "before"),
    ):
        assert transformer_config(TrainConfig(**RUN | field), 64).norms == norms


def test_yarn_is_the_default_of_latent_attention_alone():
    latent, rope = TrainConfig(**RUN | LATENT), {"position_embedding_type": "rope"}
    assert (latent.latent_sizes, latent.head_size) == ([None, 32, 128, 64, 128], 192)
    assert latent.rope_scaling is None  # a factor of 1
    longer = {"rotary_scaling_factor": 4.0}
    numbers = ("yarn", 4.0, 4096, 32.0, 1.0, 1.0, 0.0, True)
    assert TrainConfig(**RUN | LATENT | longer).rope_scaling == numbers
    one = {"rotary_seq_len_interpolation_factor": 1.0}  # as scripts have it
    assert TrainConfig(**RUN | LATENT | longer | one).rope_scaling == numbers
    assert TrainConfig(**RUN | rope | longer).rope_scaling is None
    ordinary = TrainConfig(**RUN | rope | longer, rope_type="yarn")
    assert (ordinary.rope_scaling, ordinary.latent_sizes) == (numbers, None)


@pytest.mark.parametrize(
    ("every", "layers", "in_force"),
    [
        (None, [True] * 5, (3, None)),
        (1, [False] * 5, None),
        (2, [True, False, True, False, True], (3, 2)),
        (5, [True] * 4 + [False], (3, 5)),
        (6, [True] * 5, (3, None)),
    ],
)
def test_every_nth_layer_sees_all(every, layers, in_force):
    config = TrainConfig(**RUN | {"num_layers": 5}, window_size=3, window_attn_skip_freq=every)
    assert list(map(config.has_window, range(5))) == layers
    assert config.windows == in_force
    made = transformer_config(config, 64)
    assert [made.window_of(layer) for layer in range(5)] == [3 if near else None for near in layers]


@pytest.mark.parametrize(
    ("every", "layers", "in_force"),
    [
        (None, [True] * 5, None),
        (1, [False] * 5, 1),
        (2, [True, False, True, False, True], 2),
        (5, [True] * 4 + [False], 5),
        (6, [True] * 5, None),
    ],
)
def test_every_nth_layer_has_no_positions(every, layers, in_force):
    rope = {"num_layers": 5, "position_embedding_type": "rope"}
    config = TrainConfig(**RUN | rope, no_rope_freq=every)
    assert list(map(config.has_rope, range(5))) == layers
    assert config.unrotated == in_force
    made = transformer_config(config, 64)
    assert list(map(made.rotates, range(5))) == layers
    other = TrainConfig(**RUN | {"num_layers": 5}, no_rope_freq=every)
    assert (other.unrotated, transformer_config(other, 64).rope_layers) == (None, None)


def test_layers_of_a_list_have_windows_or_positions():
    said = {"window_size": 3, "window_layers": [0, 0, 1, 1, 0], "rope_layers": [1, 0, 1, 1, 1]}
    five = RUN | {"num_layers": 5, "position_embedding_type": "rope"}
    config = TrainConfig(**five | said)
    assert config.windows == (3, said["window_layers"])
    assert config.unrotated == said["rope_layers"]
    made = transformer_config(config, 64)
    assert made.window_layers == (False, False, True, True, False)
    assert list(map(made.rotates, range(5))) == [True, False, True, True, True]
    alike = {"window_size": 3, "window_layers": [1, 0] * 2 + [1], "rope_layers": [1] * 5}
    one = TrainConfig(**five | alike)
    assert (one.windows, one.unrotated) == ((3, 2), None)  # as if it were said of every second
    for wrong, why in (
        ({"window_layers": [1, 0]}, "--window-layers to have a number .* 5, got 2"),
        ({"rope_layers": [1, 0, 2, 1, 1]}, "--rope-layers 0 or 1, got"),
        ({"no_rope_freq": 2}, "--rope-layers or --no-rope-freq, got both"),
    ):
        with pytest.raises(ValueError, match=why):
            TrainConfig(**five | said | wrong)


def test_a_run_of_before_there_were_gates_is_of_the_same_model():
    def identity(**change):
        config = TrainConfig(**RUN | {"position_embedding_type": "rope"}, **change)
        return config.model_identity(vocab_size=64, tokenizer="")

    kept = identity()
    for name in ("gates", "sinks", "delta_sizes", "scores_bias"):
        assert kept.pop(name) is None  # as if it had never been
    assert identity(no_rope_freq=2) == identity()
    assert identity(attention_output_gate=True) == identity() | {"gates": True}
    assert identity(head_bias=True) == identity() | {"scores_bias": True}


def test_gates_and_layers_without_positions_are_of_no_t5():
    t5 = RUN | {"model": "t5", "decoder_seq_length": 8}
    with pytest.raises(ValueError, match="another --model than t5 with --attention-output-gate"):
        TrainConfig(**t5, attention_output_gate=True)
    with pytest.raises(ValueError, match="another --model than t5 with --no-rope-freq 2"):
        TrainConfig(**t5, position_embedding_type="rope", no_rope_freq=2)
    with pytest.raises(ValueError, match="--no-rope-freq above 0, got 0"):
        TrainConfig(**RUN, no_rope_freq=0)
    bert = RUN | {"model": "bert", "position_embedding_type": "rope"}
    assert TrainConfig(**bert, attention_output_gate=True, no_rope_freq=2).unrotated == 2


def test_factors_are_of_every_pair_that_turns_and_of_nothing_else():
    run = RUN | {"position_embedding_type": "rope", "rope_type": "longrope"}
    pairs = TrainConfig(**RUN).head_size // 2
    factors = {"rotary_factors": [1.0] * (pairs - 1) + [3.0]}
    *_, mscale, _, _, found = TrainConfig(**run, **factors, mscale=1.2).rope_scaling
    assert (mscale, found) == (1.2, tuple(factors["rotary_factors"]))
    with pytest.raises(ValueError, match=f"for each of the {pairs} pairs .* turn, got 0"):
        TrainConfig(**run)
    with pytest.raises(ValueError, match=f"for each of the {pairs // 2} pairs .* got {pairs}"):
        TrainConfig(**run, **factors, rotary_percent=0.5)
    with pytest.raises(ValueError, match=r"--rotary-factors to .* longrope, got --use-rope-scal"):
        TrainConfig(**run, **factors, use_rope_scaling=True)
    with pytest.raises(ValueError, match=r"--rope-type yarn with .* 2\.0, got longrope, whose"):
        TrainConfig(**run, **factors, rotary_scaling_factor=2.0)
    with pytest.raises(ValueError, match="--rotary-factors above 0, got 0"):
        TrainConfig(**run, rotary_factors=[0.0] * pairs)
    learned = run | {"position_embedding_type": "learned"}
    with pytest.raises(ValueError, match="--position-embedding-type rope with slowed"):
        TrainConfig(**learned, **factors)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("moe_renormalize", True, "--moe-renormalize"),
        ("moe_router_score_function", "sigmoid", "--moe-router-score-function sigmoid"),
        ("moe_uniform_expert_assignment", True, "--moe-uniform-expert-assignment"),
        ("moe_router_enable_expert_bias", True, "--moe-router-enable-expert-bias"),
    ],
)
def test_experts_near_the_best_are_chosen_by_nothing_else(field, value, words):
    with pytest.raises(ValueError, match=f"type topk with {words}, .* got sparsemixer"):
        TrainConfig(**RUN, moe_num_experts=4, moe_router_type="sparsemixer", **{field: value})
    TrainConfig(**RUN, moe_router_type="sparsemixer", **{field: value})  # no experts


def test_a_bert_has_something_to_learn():
    nothing_masked = RUN | {"model": "bert", "mask_prob": 0.0}
    assert TrainConfig(**nothing_masked).bert_binary_head
    with pytest.raises(ValueError, match="--mask-prob above 0 with --bert-no-binary-head, got 0"):
        TrainConfig(**nothing_masked, bert_binary_head=False)


def test_windows_and_sinks_are_a_gpts():
    assert TrainConfig(**RUN, window_attn_skip_freq=2).windows is None
    assert TrainConfig(**RUN, window_size=0, window_attn_skip_freq=3).windows == (0, None)
    bert = RUN | {"model": "bert"}
    with pytest.raises(ValueError, match="--model gpt with --window-size 0, got bert"):
        TrainConfig(**bert, window_size=0)
    with pytest.raises(ValueError, match="--model gpt with --softmax-type off-by-one, got bert"):
        TrainConfig(**bert, softmax_type="off-by-one")
    with pytest.raises(ValueError, match="--window-size of at least 0, got -1"):
        TrainConfig(**RUN, window_size=-1)


def test_every_choice_of_a_model_reaches_it():
    values = {
        "layernorm_epsilon": (1e-3, "norm_eps"), "qk_layernorm_epsilon": (1e-4, "qk_norm_eps"),
        "rotary_base": (5e3, "rope_base"), "rotary_base_local": (7.0, "local_rope_base"),
        "rotary_percent": (0.5, "rope_fraction"),
        "attention_scale": (0.3, "attention_scale"), "init_method_std": (0.5, "init_std"),
        "attention_dropout": (0.2, "attention_dropout"), "hidden_dropout": (0.4, "hidden_dropout"),
        "norm_placement": ("both", "norms"), "fp32_residual_connection": (True, "fp32_residual"),
        "add_bias_linear": (False, "bias"), "add_qkv_bias": (True, "qkv_bias"),
        "moe_router_type": ("sinkhorn", "router"),
        "position_embedding_type": ("rope", "positions"), "window_size": (7, "window"),
        "clip_qkv": (3.0, "clip_qkv"), "head_bias": (True, "head_bias"),
        "softmax_type": ("learnable", "softmax"), "attention_output_gate": (True, "output_gate"),
        **{name: (0.25, name) for name in ("embedding_multiplier", "residual_multiplier")},
        "logits_scaling": (8.0, "logits_scaling"),
    }  # fmt: skip
    others = {
        "normalization": "RMSNorm", "qk_layernorm": True, "use_rope_scaling": True, "swiglu": True,
        "untie_embeddings_and_output_weights": True, "moe_num_experts": 2, "moe_first_k_dense": 1,
        "window_attn_skip_freq": 2, "no_rope_freq": 2, "linear_attention_freq": 2,
        "experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 7,
    }  # fmt: skip
    said = {name: value for name, (value, _) in values.items()}
    made = transformer_config(TrainConfig(**RUN | said | others), 64)
    assert {name: getattr(made, name) for _, name in values.values()} == {
        name: value for value, name in values.values()
    }
    further = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
    further |= {"fp8_format": "hybrid", "first_last_layers_bf16": True}
    further |= {"num_layers": 4, "num_layers_at_end_in_bf16": 2}
    hybrid = {
        "hybrid_layer_pattern": "M*S", "num_layers": 3, "position_embedding_type": "none",
        "mamba_num_heads": 4, "mamba_head_dim": 3, "mamba_num_groups": 2, "mamba_state_dim": 5,
        "mamba_conv_kernel_dim": 6, "short_conv_kernel_dim": 5,
        "mtp_num_layers": 1, "mtp_hybrid_override_pattern": "S*",
    }  # fmt: skip
    every = [
        made,
        *(transformer_config(TrainConfig(**RUN | x), 64) for x in (LATENT, hybrid, further)),
    ]
    assert (every[2].pattern, every[2].mamba) == ("M*S", MambaSizes(4, 3, 2, 5, 6))
    assert (every[2].conv_taps, every[2].mtp_pattern) == (5, "S*")
    assert (every[-1].mtp_modules, every[-1].mtp_loss_weight) == (2, 0.3)
    defaults = {f.name: f.default for f in fields(made) if f.default is not dataclasses.MISSING}
    alike = [n for n, value in defaults.items() if all(getattr(x, n) == value for x in every)]
    assert not alike  # a new field wants its choice above
    assert made.window_layers == made.rope_layers == made.delta_layers == (True, False)
    assert made.delta == DeltaSizes(key_heads=3, value_heads=6, key=4, value=5, taps=7)
    assert every[-1].fp8_spares == (1, 2)
    assert transformer_config(TrainConfig(**RUN), 64).qkv_bias


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_whole_run(name):
    config = TrainConfig(**recipe(name))
    assert config.num_layers
    dense = ("dense", "bert-110m", "bert-345m", "t5", "ict-bert")
    assert (config.moe_num_experts is None) == name.startswith(dense)
    assert (config.moe_capacity_factor > 0) == name.startswith("moe-")


@pytest.mark.parametrize(
    ("name", "total", "for_a_token"),
    [
        ("olmoe-1b-7b", 6.919e9, 1.282e9),
        ("deepseek-v2-lite", 15.71e9, 2.66e9),
        ("gpt-oss-20b", 20.91e9, 4.19e9),
        ("qwen3-30b-a3b", 30.53e9, 3.35e9),
        ("qwen3-next-80b-a3b", 79.67e9, 3.87e9),
        ("nemotron-3-nano-30b-a3b", 31.58e9, 3.58e9),
    ],
)
def test_published_models_have_their_size(name, total, for_a_token):
    config = TrainConfig(**recipe(name))
    found = sizes(config, vocabulary_rows(config, 50257, ranks=1), 1, "H200")
    assert found.parameters == pytest.approx(total, rel=1e-3)
    assert found.active == pytest.approx(for_a_token, rel=1e-2)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"got 'dmoe-125'. Did you mean dmoe-125m\?"):
        recipe("dmoe-125")


def test_every_argument_of_a_moe_layer_has_a_field():
    config = TrainConfig(**RUN, moe_num_experts=4, moe_capacity_factor=1.5, moe_top_k=2)
    here = {"hidden_size", "ffn_hidden_size", "activation", "init_method_std", "output_init_std"}
    here |= {"fp8"}  # of a run that multiplies so in all of its blocks
    here |= {"sequence_dim"}  # the models' own: how they lay out their activations
    layer = {f.name for f in fields(MoEConfig)}
    assert config.moe_arguments().keys() == layer - here
    built = MoEConfig(hidden_size=32, ffn_hidden_size=64, **config.moe_arguments())
    assert (built.num_experts, built.top_k, built.capacity_factor) == (4, 2, 1.5)
    # Megatron's scripts say whom a capacity would drop without one, too.
    idle = {"moe_drop_policy": "probability", "moe_renormalize_p": 2.0, "moe_min_capacity": 4}
    idle_moe = TrainConfig(**RUN, moe_num_experts=4, **idle).moe_arguments()
    assert MoEConfig(hidden_size=32, ffn_hidden_size=64, **idle_moe).renormalize_p == 1
    plain = TrainConfig(**RUN).moe_arguments()
    defaults = {f.name: f.default for f in fields(MoEConfig)}
    differing = {name for name, value in plain.items() if value != defaults[name]}
    # Megatron's own default, and a dense model.
    assert differing == {"load_balancing_loss_weight", "num_experts"}


def test_a_pipeline_cuts_both_stacks_of_a_t5():
    t5 = RUN | {"model": "t5", "decoder_seq_length": 8, "vocab_extra_ids": 2, "num_layers": 3}
    TrainConfig(**t5, pipeline_model_parallel_size=6)
    chunks = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    TrainConfig(**t5, **chunks)
    with pytest.raises(ValueError, match=r"--num-layers . --decoder-num-layers 6, got 7"):
        TrainConfig(**t5, pipeline_model_parallel_size=7)
    with pytest.raises(
        ValueError, match=r"--decoder-num-layers for each .* got 2 stages, 5 layers"
    ):
        TrainConfig(**t5, **chunks, decoder_num_layers=2)


def test_what_another_library_refuses_is_said_as_it_is_typed():
    both = {"moe_weights_on_input": True, "moe_shared_expert_weighted_sum": True}
    shared = {"moe_num_experts": 4, "moe_shared_expert_intermediate_size": 16}
    config = TrainConfig(**RUN, **shared, **both)
    wanted = "--no-moe-shared-expert-weighted-sum with --moe-weights-on-input, got both"
    with pytest.raises(ValueError, match=f"expected {wanted}"):
        expert_config(config)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"moe_layer_freq": 2}, ["layer 0", "layer 2"]),
        (
            {"model": "t5", "decoder_num_layers": 2, "decoder_seq_length": 8, "moe_layer_freq": 2},
            ["encoder layer 0", "encoder layer 2", "decoder layer 0"],
        ),
        (
            {"model": "ict", "moe_first_k_dense": 2},
            ["query layer 2", "block layer 2"],
        ),
        (
            {"moe_first_k_dense": 2, "mtp_num_layers": 2},
            ["layer 2", "mtp 0 layer 0", "mtp 1 layer 0"],
        ),
        (
            {
                "hybrid_layer_pattern": "*E-", "mtp_hybrid_override_pattern": "E*E",
                "mtp_num_layers": 1, "position_embedding_type": "none",
            },
            ["layer 1", "mtp 0 layer 0", "mtp 0 layer 2"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_layers_with_experts_have_the_names_of_their_place(fields, names):
    config = TrainConfig(**RUN | {"num_layers": 3, "moe_num_experts": 4} | fields)
    assert config.moe_layer_names == names


def test_which_layers_have_experts():
    config = TrainConfig(**RUN | {"num_layers": 7}, moe_num_experts=4, moe_layer_freq=2)
    assert [config.has_experts(i) for i in range(7)] == [True, False] * 3 + [True]
    config = dataclasses.replace(config, moe_first_k_dense=3)
    assert [i for i in range(7) if config.has_experts(i)] == [4, 6]
    assert not TrainConfig(**RUN).has_experts(0)
    run = RUN | {"num_layers": 4, "moe_num_experts": 4}
    config = TrainConfig(**run, moe_layers=[0, 1, 1, 0])
    assert list(map(config.has_experts, range(4))) == [False, True, True, False]
    assert config.num_moe_layers == 2
    assert transformer_config(config, 64).moe_layers == (False, True, True, False)
    for wrong, why in (
        ({"moe_layers": [0, 1]}, r"--moe-layers to have a number .* 4, .* got \[0, 1\]"),
        ({"moe_layers": [0] * 4}, r"--moe-layers to have .* 1 for one of them, got \[0, 0"),
        ({"moe_layers": [0, 2, 0, 0]}, "--moe-layers 0 or 1, got 2"),
        ({"moe_layers": [1] * 4, "moe_first_k_dense": 1}, "and --moe-first-k-dense, got both"),
        ({"moe_layers": [1] * 4, "moe_layer_freq": 2}, "or --moe-layer-freq and .* got both"),
        ({"moe_layers": [1] * 4, "model": "t5", "decoder_seq_length": 8}, "than t5 with --moe-l"),
    ):
        with pytest.raises(ValueError, match=why):
            TrainConfig(**run | wrong)


def test_the_groups_hold_every_field_once():
    grouped = [f.name for members in GROUPS.values() for f in fields(members)]
    assert sorted(grouped) == sorted(f.name for f in fields(TrainConfig))
    assert set(GROUPS.values()) == set(filter(inspect.get_annotations, TrainConfig.__mro__))


def test_every_field_names_what_exists():
    config = TrainConfig(**RUN)
    for f in fields(TrainConfig):
        about = spec(f)
        assert about.on_load in ("own", "free", "said", "fixed", "model"), f.name
        if about.in_force is not None:
            getattr(config, about.in_force)
        assert not (about.choices and f.default is not None and f.default not in about.choices)


def named(value):
    """The id of a change: its fields."""
    return "-".join(value) if isinstance(value, dict) else ""


CHANGES = [
    # what is another, what is said of it
    ({"moe_top_k": 1}, "--moe-top-k was 2 until now, and is 1 from here on"),
    ({"seed": 5}, "--seed was 1234 until now, and is 5"),
    ({"eval_iters": 3}, "--eval-iters was 100 until now, and is 3"),  # of other samples, perhaps
    ({"layernorm_epsilon": 1e-6}, "--layernorm-epsilon was 1e-05 until now, and is 1e-06"),
    ({"train_iters": 20}, "was 10 steps until now, and is 20 steps"),
    ({"micro_batch_size": 1, "log_interval": 5, "save": "x", "exit_interval": 2}, None),
    ({"ffn_hidden_size": 128, "kv_channels": 8}, None),  # what they were without being said
    ({"muon_momentum": 0.5, "mask_prob": 0.5, "moe_drop_policy": "probability"}, None),  # idle
]
REFUSED = [
    ({"hidden_size": 64}, "another model: its --hidden-size is 32, this run's is 64", False),
    (
        {"swiglu": True, "ffn_hidden_size": 128},
        "another model: its --swiglu is gelu_tanh, this run's is swiglu",
        False,
    ),
    ({"moe_num_experts": 8}, "another model: its --moe-num-experts is 4", False),
    # What follows from these, the rows of a table and the width of a feed-forward, nobody has said.
    ({"position_embedding_type": "rope"}, "its --position-embedding-type is learned", False),
    ({"swiglu": True}, "its --swiglu is gelu_tanh, this run's is swiglu", False),
    (
        LATENT | {"hidden_size": 32},
        "its --multi-latent-attention is False, this run's is True",
        False,
    ),
    ({"split": "9,1,0"}, "Expected --split 969,30,1, with which the run", True),
    ({"optimizer": "sgd"}, "Expected --optimizer adam, with .* with --no-load-optim, or", True),
    ({"seq_length": 4}, "Expected --seq-length 8, with which the run", True),
]
SAVED = dataclasses.asdict(TrainConfig(**RUN, moe_num_experts=4, moe_top_k=2, save="old"))


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=named)
def test_a_change_that_matters_is_said_when_a_run_goes_on(change, said):
    config = TrainConfig(**inherited(SAVED, "run.json") | change)
    lines = check_changes(SAVED, config)
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


def test_a_flag_is_named_with_its_own_value():
    """Not with what it says together with others: widths of latents, numbers of YaRN."""
    run = RUN | LATENT | {"rotary_scaling_factor": 4.0}
    saved = dataclasses.asdict(TrainConfig(**run))
    changed = TrainConfig(**run | {"rotary_scaling_factor": 8.0, "beta_fast": 16.0})
    (line,) = check_changes(saved, changed)
    assert line == (
        "--rotary-scaling-factor / --beta-fast was 4.0 / 32.0 until now, and is 8.0 / 16.0 from "
        "here on"
    )
    other = TrainConfig(**run | {"q_lora_rank": 12})
    with pytest.raises(ValueError, match="its --q-lora-rank is None, this run's is 12"):
        check_changes(saved, other)


def test_the_micro_batch_is_what_a_retriever_learns_from():
    saved = dataclasses.asdict(TrainConfig(**RUN, model="ict"))
    config = TrainConfig(**inherited(saved, "run.json") | {"micro_batch_size": 1})
    (line,) = check_changes(saved, config)
    assert line == "--micro-batch-size was 2 until now, and is 1 from here on"


def test_schedules_in_steps_that_another_batch_moves_are_named():
    saved = SAVED | {"global_batch_size": 4}
    config = TrainConfig(**inherited(saved, "run.json") | {"global_batch_size": 8})
    size, schedules = check_changes(saved, config)
    assert size == "--global-batch-size was 4 until now, and is 8 from here on"
    assert "as if all samples so far had come in batches of 8, and so jump" in schedules
    by_samples = {"train_iters": None, "train_samples": 80, "lr_decay_samples": 40}
    in_samples = dataclasses.replace(config, **by_samples)
    assert not any("jump" in line for line in check_changes(saved, in_samples))
    # Batches that grew until now were smaller too.
    grown = dataclasses.asdict(dataclasses.replace(in_samples, rampup_batch_size=[2, 2, 16]))
    assert any("in batches of 8, and so jump" in line for line in check_changes(grown, config))


@pytest.mark.parametrize(
    ("change", "says", "new_run_may"),
    REFUSED,
    ids=named,
)
def test_a_change_that_a_run_cannot_survive_is_refused(change, says, new_run_may):
    values = inherited(SAVED, "run.json") | {"max_position_embeddings": 8} | change
    with pytest.raises(ValueError, match=says):
        check_changes(SAVED, TrainConfig(**values))
    finetune = TrainConfig(**values, finetune=True)
    if new_run_may:
        assert check_changes(SAVED, finetune) == []
    else:
        with pytest.raises(ValueError, match=says):
            check_changes(SAVED, finetune)


def test_only_a_table_of_positions_bounds_how_long_texts_may_get():
    for kind, may in (("learned", False), ("rope", True), ("none", True)):
        saved = SAVED | {"position_embedding_type": kind}
        longer = {"seq_length": 32, "max_position_embeddings": 64, "finetune": True}
        config = TrainConfig(**inherited(saved, "run.json") | longer)
        if may:
            assert check_changes(saved, config) == []
        else:
            with pytest.raises(ValueError, match="its --max-position-embeddings is 8"):
                check_changes(saved, config)


def test_the_optimizer_may_change_without_its_state():
    config = TrainConfig(**inherited(SAVED, "") | {"optimizer": "sgd", "no_load_optim": True})
    assert check_changes(SAVED, config) == [
        "--optimizer was adam until now, and is sgd from here on",
        "with --no-load-optim the schedules begin anew from here, as in Megatron",
    ]


def test_fields_of_one_start_are_not_taken_over():
    taken = inherited(SAVED | {"load": "a", "finetune": True}, "run.json")
    assert not {"save", "load", "finetune", "exit_interval", "no_load_optim"} & taken.keys()
    assert taken["moe_top_k"] == 2
    with pytest.raises(ValueError, match=r"run.json holds 'moe_topk', .* nearest is 'moe_top_k'"):
        inherited(SAVED | {"moe_topk": 2}, "run.json")
