"""The command line: every field is a flag, layers win in order, mistakes name the nearest flag."""

import json
import re
import typing
from dataclasses import fields

import mb_train
import pytest
from mb_train.cli import main
from mb_train.commands import COMMANDS
from mb_train.config import TrainConfig, flag_name
from mb_train.config.field import Bounds, spec, value_types
from mb_train.config.toml_file import UsageError, read_toml, to_toml
from mb_train.flags.command_line import parse, resolve, without_effect
from mb_train.flags.megatron_core import CORES
from mb_train.flags.parser import Parser, build_parser
from mb_train.flags.settled import SETTLED
from mb_train.recipes import recipe
from mb_train.schedule import build_schedule

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"),
]


def test_every_field_has_a_flag_and_a_help():
    options = build_parser()._option_string_actions
    for f in fields(TrainConfig):
        assert options[flag_name(f.name)].help, f.name


def test_no_flag_is_the_quickstart():
    assert resolve(parse([])) == TrainConfig(**recipe("quickstart"))
    assert resolve(parse(["--train-iters", "7"])).train_iters == 7


def test_a_described_model_starts_from_megatrons_defaults():
    config = resolve(parse(RUN))
    assert (config.moe_num_experts, config.lr_decay_style, config.save) == (None, "linear", None)


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('recipe = "dense-46m"\nlr = 1\n[training]\nmicro-batch-size = 4\n')
    config = resolve(parse(["--config", str(file), "--seed", "5"]), {"lr": 0.5, "clip_grad": 2.0})
    assert config.lr == 1.0  # the file's, over the recipe's and the loaded run's
    assert (config.micro_batch_size, config.seed) == (4, 5)
    assert config.clip_grad == 1.0  # the recipe's, over the loaded run's
    assert config.num_layers == 6


def test_the_other_length_of_training_overrules_a_recipe():
    config = resolve(parse(["--recipe", "dense-46m", "--train-samples", "5120"]))
    assert (config.train_samples, config.train_iters) == (5120, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hiden-size", "8"], "Unknown flag --hiden-size. The nearest is --hidden-size"),
        (["--qqq=8"], "Unknown flag --qqq. See --help"),
        (["train"], "Unknown argument train"),
        (["--hidden-size", "big"], "--hidden-size: invalid int value: 'big'"),
        (["--lr-decay-style", "cosin"], "invalid choice: 'cosin'"),
        (["--config", "none.toml"], "Cannot read --config none.toml: No such file"),
        (["--tokenizer-type", "Bert"], "--tokenizer-type: invalid choice: 'Bert'"),
        (["--use-rope"], "The nearest is --use-rope-scaling"),  # not --use-sharp, of no effect
        (["--use-flash-atn"], "The nearest is --use-flash-attn"),
        (["--no-bf17"], "Unknown flag --no-bf17. The nearest is --no-bf16"),
        (
            ["--hiden-size", "-8", "--seed=1", "--trian-iters=2"],
            "--hidden-size. Unknown flag --trian-iters. The nearest is --train-iters",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises(UsageError, match=says):
        parse(arguments)


def test_a_value_of_several_words_may_begin_like_a_flag():
    assert parse(["--wandb-exp-name", "-a b"]).values == {"wandb_exp_name": "-a b"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hiden_size = 3", "Unknown key 'hiden_size' in .* The nearest is hidden_size"),
        ("hidden_size = 'x'", "run.toml: Expected --hidden-size to be int, got 'x'"),
        ("bf16 = 1", "run.toml: Expected --bf16 to be bool, got 1"),
        ("hidden_size = = 3", "is not TOML"),
        ("[a]\nlr = 1\n[b]\nlr = 2", "Expected lr once in .*, got it twice"),
        ("rampup_batch_size = ['a']", "to be a list of int, got"),
        ("recipe = 3", "Expected recipe in .* to be a name, got 3"),
    ],
    ids=["unknown", "kind", "bool", "syntax", "twice", "list", "recipe"],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, says):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_toml(str(file))


def test_settled_flags_are_answered_in_one_note():
    arguments = []
    for name, (valued, _) in SETTLED.items():
        arguments += [name, "1"] if valued else [name]
    (note,) = parse(arguments).notes
    for name, (_, answer) in SETTLED.items():
        assert re.search(rf"{name}[,\w _-]* \({re.escape(answer)}\)", note), name
    assert parse(["--seed", "1"]).notes == ()
    assert not parse(arguments).values


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--fp8-format hybrid", r"--fp8-format cannot be honoured: there is no FP8 here"),
        ("--deepspeed --topk 2", r"--deepspeed cannot be .* --topk cannot be .*--moe-router-topk"),
        (
            "--perform-rl-step --grpo-group-size 2 --no-rl-partial-rollouts --refit-method gloo",
            r"--perform-rl-step, --grpo-group-size, --no-rl-partial-rollouts, --refit-method "
            r"cannot be honoured: there is no reinforcement learning",
        ),
        (
            "--inference-max-requests 8 --flash-decode --num-tokens-to-generate 1",
            r"--inference-max-requests, --flash-decode, --num-tokens-to-generate cannot be .*: "
            r"mb-train generate RUN writes texts, and mb-train serve RUN",
        ),
        ("--export-quant-cfg x", r"--export-quant-cfg cannot be .* mb-train convert RUN"),
        ("--train-idx-path x --repeated-dataloader", r"--train-idx-path, --rep.*--data-cache-path"),
        ("--enable-zbh1-pipeline", r"--enable-zbh1-pipeline cannot .* interleaved-zero-bub"),
        ("--fp8-of-tomorrow x", r"--fp8-of-tomorrow cannot be honoured: there is no FP8 here"),
        (
            "--fp4-format e2m1 --enable-gpt-oss --softmax-type learnable --mtp-num-layers 1",
            r"--fp4-format cannot .*Unknown flag --enable-gpt-oss.*--mtp-num-layers to be 0, got "
            r"'1'.*--softmax-type to be vanilla, got 'learnable'",
        ),
        ("--deepspeed --optimizer lion", r"--deepspeed cannot .* Argument --optimizer: invalid"),
        (
            "--moe-router-load-balancing-type aux_loss global_aux_loss",
            r"one --moe-router-load-balancing-type, .* got aux_loss global_aux_loss",
        ),
        ("--moe-aux-loss-coeff 1e-2 1e-3", r"one --moe-aux-loss-coeff, .* got 1e-2 1e-3"),
        ("--moe-aux-loss-coeff x", r"--moe-aux-loss-coeff to be a number, got x"),
        ("--q-lora-rank=512", r"--q-lora-rank cannot be honoured: there is no latent attention"),
        ("--context-parallel-size 2", r"--context-parallel-size to be 1, got '2'.*--sequence-para"),
        ("--moe-router-dtype fp64", r"--moe-router-dtype to be fp32, got 'fp64'"),
        ("--moe-layer-freq [1,0,0,1,1]", r"--moe-layer-freq to be dense layers and then experts"),
        ("--moe-layer-freq [0]*4", r"--moe-layer-freq to be dense layers and then experts"),
        ("--moe-layer-freq ([1", r"--moe-layer-freq to be dense layers and then experts"),
        ("--moe-layer-freq ()*9[0]", r"--moe-layer-freq to be dense layers and then experts"),
        ("--moe-expert-capacity-factor x", r"--moe-expert-capacity-factor to be a number, got x"),
        (
            "--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2",
            r"--moe-router-pre-softmax with .* scores a group by the sum of its best 3 logits",
        ),
        (
            "--num-layers 2 --num-experts 8 --moe-grouped-gemm --moe-router-group-topk 1",
            r"--moe-router-pre-softmax with .* scores a group by the sum of its best 2 logits",
        ),
        ("--exp-avg-dtype bf16", r"one dtype of --exp-avg-dtype and --exp-avg-sq-dtype"),
        (
            "--recompute-modules mlp",
            r"--recompute-modules of core_attn, layernorm, moe, moe_act, got 'mlp'",
        ),
        (
            "--num-layers 5 --moe-layer-freq [0]+[1]*5",
            r"--moe-layer-freq to be of --num-layers 5, got \[0\]\+\[1\]\*5, which is of 6",
        ),
        ("--num-experts 4 --eval-iters -2", r"--eval-iters of at least 0, got -2"),
        (
            "--img-h 224 --retro-add-retriever --vision-model-type clip",
            r"--img-h, --vision-model-type cannot .*no models of images\. --retro-add-ret",
        ),
        (
            "--learning-rate 1e-3 --tp 2 --nproc_per_node 8",
            r"--learning-rate .*: say --lr\. --tp .*: say --tensor-model-parallel-size\. "
            r"--nproc_per_node .*: it is torchrun's, and stands before -m mb_train",
        ),
        (
            "--zero-reduce-bucket-size 5e8 --ds-sequence-parallel-size 2 --curriculum-learning-x",
            r"--zero-reduce-bucket-size .*: see --zero-stage.* --ds-sequence-parallel-size cannot "
            r".*--sequence-parallel, rec.* --curriculum-learning-x .*no curriculum",
        ),
        (
            "--train-weighted-split-paths-path x --kill-switch-path y",
            r"--train-weighted-split-paths-path .*say --train-data-path.*--kill-switch-path .*"
            r"SIGTERM",
        ),
    ],
)
def test_what_cannot_be_honoured_is_an_error_with_its_reason(typed, said):
    with pytest.raises(ValueError, match=said):
        resolve(parse([*RUN, *typed.split()]))


def test_what_has_no_effect_is_said():
    words = (
        "--num-query-groups 2 --rotary-base 500 --moe-top-k 2 --mask-prob 0.5 --hysteresis 2 "
        "--rope-scaling-factor 32 --moe-renormalize --expert-model-parallel-size 2"
    )
    command = parse([*RUN, "--num-layers", "2", *words.split()])
    assert without_effect(command, resolve(command)) == [
        "no effect without --group-query-attention: --num-query-groups",
        "no effect without --position-embedding-type rope: --rotary-base",
        "no effect without --use-rope-scaling: --rope-scaling-factor",
        "no effect without --moe-num-experts: --moe-top-k, --moe-renormalize, "
        "--expert-model-parallel-size",
        "no effect without --model bert or t5: --mask-prob",
    ]
    base = {"group_query_attention": True, "position_embedding_type": "rope", "model": "bert"}
    found = without_effect(command, resolve(command, {**base, "moe_num_experts": 4}))
    assert found == ["no effect without --use-rope-scaling: --rope-scaling-factor"]
    words = (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
        "--optimizer sgd --adam-beta2 0.95 --tokenizer-type GPT2BPETokenizer --vocab-size 500 "
        "--sequence-parallel --no-load-optim"
    )
    command = parse([*RUN, *words.split()])
    assert without_effect(command, resolve(command)) == [
        "no effect without --optimizer adam or muon: --adam-beta2",
        "no effect without --recompute-method block: --recompute-num-layers",
        "no effect without --load: --no-load-optim",
        "no effect without --tensor-model-parallel-size above 1: --sequence-parallel",
        "no effect without --tokenizer-type NullTokenizer or TikTokenizer: --vocab-size",
    ]


def test_a_flag_that_the_fields_own_overrules_is_said():
    words = (
        "--position-embedding-type none --use-rotary-position-embeddings --use-torch-fsdp2 "
        "--zero-stage 3 --moe-aux-loss-coeff 0.2 --moe-loss-weight 0.2"
    )
    command = parse(words.split())
    assert command.values["position_embedding_type"] == "none"
    assert command.notes == (
        "no effect beside --position-embedding-type none: --use-rotary-position-embeddings",
        "no effect beside --moe-loss-weight 0.2: --moe-aux-loss-coeff",
    )


def test_what_a_field_needs_is_there():
    named = {f.name: f for f in fields(TrainConfig)}
    for name, *values in (spec(f).needs for f in named.values() if spec(f).needs):
        ranges = [value for value in values if isinstance(value, Bounds)]
        assert {*values} - {*ranges} <= {*spec(named[name]).choices}
        assert values or not named[name].default


def test_older_spellings_mean_what_they_meant():
    line = "--activations-checkpoint-method uniform --encoder-seq-length 8 --bert-no-binary-head"
    assert parse(line.split()).values == {
        "recompute_granularity": "full", "recompute_method": "uniform", "seq_length": 8,
        "bert_binary_head": False,
    }  # fmt: skip
    typed = parse(["--recompute-activations", "--recompute-granularity", "full"]).values
    assert typed == {"recompute_granularity": "full"}
    assert parse(["--no-compile"]).values == {"compile": False}
    assert parse(["--rampup-batch-size", "16", "16", "5859"]).values == {
        "rampup_batch_size": [16, 16, 5859]
    }


def test_a_schedule_of_the_checkpoint_can_overrule_the_one_typed():
    loaded = {"lr": 0.5, "min_lr": 0.1, "clip_grad": 2.0}
    line = parse([*RUN, "--clip-grad", "3", "--use-checkpoint-opt_param-scheduler"])
    config = resolve(line, loaded)
    assert (config.lr, config.min_lr, config.clip_grad) == (0.5, 0.1, 3.0)
    longer = ["--train-iters", "200", "--weight-decay", "0.3"]
    del loaded["min_lr"]
    for length, decay in ({}, "100 steps"), ({"lr_decay_iters": 70}, "70 steps"):
        started = {**loaded, "train_iters": 100, "weight_decay": 0.2, **length}
        line = parse([*RUN, *longer, "--use-checkpoint-opt_param-scheduler"])
        config = resolve(line, started)
        assert (config.decay_length, config.weight_decay) == (decay, 0.2)
        assert (config.train_iters, resolve(parse([*RUN, *longer]), started).weight_decay) == (
            200, 0.3,
        )  # fmt: skip


def test_a_schedule_that_is_typed_and_overruled_is_said():
    words = "--load a --lr 0.4 --min-lr 0.1 --clip-grad 3 --lr-warmup-iters 5"
    loaded = {"lr": 0.5, "min_lr": 0.1, "clip_grad": 2.0, "train_iters": 10, "lr_warmup_iters": 2}
    line = parse([*RUN, *words.split(), "--use-checkpoint-opt_param-scheduler"])
    assert without_effect(line, resolve(line, loaded)) == [
        "no effect beside --use-checkpoint-opt-param-scheduler: --lr, --lr-warmup-iters"
    ]
    line = parse([*RUN, *words.split()])
    assert without_effect(line, resolve(line, loaded)) == []
    both = "--use-checkpoint-opt_param-scheduler --override-lr-scheduler"
    with pytest.raises(ValueError, match=r"Expected --override-lr-scheduler or .* got both"):
        parse([*RUN, *both.split()])


def test_the_weight_decay_of_the_checkpoint_rises_for_as_long_as_it_would_have():
    started = {"lr": 0.5, "train_iters": 100}
    ends = {"start_weight_decay": 0.1, "end_weight_decay": 0.3, "weight_decay_incr_style": "linear"}
    line = parse([*RUN, "--train-iters", "200", "--use-checkpoint-opt_param-scheduler"])
    for length, rises in ({}, "100 steps"), ({"weight_decay_incr_iters": 70}, "70 steps"):
        config = resolve(line, {**started, **ends, **length})
        assert (config.weight_decay_length, config.end_weight_decay) == (rises, 0.3)
    assert resolve(line, started).weight_decay_length is None


def test_a_schedule_in_steps_of_another_batch_is_not_taken_over():
    typed = [*RUN, "--global-batch-size", "16", "--use-checkpoint-opt_param-scheduler"]
    started = {"lr": 0.5, "global_batch_size": 8, "train_iters": 100}
    with pytest.raises(ValueError, match=r"Expected --global-batch-size 8, that of --load, .* 16"):
        resolve(parse(typed), started)
    assert resolve(parse(typed), {**started, "global_batch_size": 16}).lr_decay_iters == 100


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("--position-embedding-type learned_absolute", {"position_embedding_type": "learned"}),
        ("--no-position-embedding", {"position_embedding_type": "none"}),
        (
            "--no-position-embedding --use-rotary-position-embeddings",
            {"position_embedding_type": "rope"},
        ),
        (
            "--no-position-embedding --position-embedding-type rope",
            {"position_embedding_type": "rope"},
        ),
        ("--moe-router-topk 1", {"moe_top_k": 1}),
        ("--moe-router-topk 2", {"moe_top_k": 2, "moe_renormalize": True}),
        (
            "--moe-router-topk 2 --moe-router-pre-softmax",
            {"moe_top_k": 2, "moe_renormalize": False},
        ),
        (
            "--moe-router-topk=2 --moe-router-pre-softmax --moe-router-score-function sigmoid",
            {"moe_top_k": 2, "moe_renormalize": True, "moe_router_score_function": "sigmoid"},
        ),
        ("--moe-top-k 2 --moe-router-topk 4", {"moe_top_k": 4, "moe_renormalize": True}),
        (
            "--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2 "
            "--moe-router-pre-softmax",
            {
                "moe_top_k": 6,
                "moe_renormalize": False,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
                "moe_router_group_score_top": 3,
            },
        ),
        ("--moe-router-topk 2 --no-moe-renormalize", {"moe_top_k": 2, "moe_renormalize": False}),
        ("--moe-router-load-balancing-type aux_loss", {"moe_loss_weight": 0.0}),
        (
            "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss",
            {"moe_loss_weight": 0.01, "moe_balance_over": "sequence"},
        ),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
            {"moe_loss_weight": 0.0},
        ),
        ("--moe-token-dispatcher-type allgather", {"moe_dispatcher": "all_gather"}),
        ("--moe-layer-freq 2", {"moe_layer_freq": 2}),
        ("--moe-layer-freq ([0]*3+[1]*24)", {"moe_first_k_dense": 3, "moe_layer_freq": 1}),
        ("--moe-layer-freq=[0,1,1]", {"moe_first_k_dense": 1, "moe_layer_freq": 1}),
        ("--moe-layer-freq ([1]*1+[0]*1)*3", {"moe_first_k_dense": 0, "moe_layer_freq": 2}),
        ("--moe-layer-freq [0]*2+([1]+[0])*4", {"moe_first_k_dense": 2, "moe_layer_freq": 2}),
        ("--moe-layer-freq [1]*4", {"moe_first_k_dense": 0, "moe_layer_freq": 1}),
        (
            "--num-layers 9 --moe-layer-freq [0]*3+[1]*6 --num-layers 2 --moe-layer-freq [0,1]",
            {"num_layers": 2, "moe_first_k_dense": 1, "moe_layer_freq": 1},
        ),
        ("--moe-layer-freq=[0,1] --moe-layer-freq 2", {"moe_layer_freq": 2}),
        (
            "--moe-expert-capacity-factor 1.25",
            {"moe_capacity_factor": 1.25, "moe_drop_policy": "probability"},
        ),
        (
            "--moe-token-drop-policy position --moe-expert-capacity-factor -1",
            {"moe_capacity_factor": 0.0, "moe_drop_policy": "position"},
        ),
        (
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-params-dtype fp32",
            {"optimizer_state_dtype": "bf16"},
        ),
        ("--recompute-modules core_attn layernorm moe_act", {"moe_recompute": True}),
        ("--use-torch-fsdp2", {"zero_stage": 3}),
        ("--data-parallel-sharding-strategy optim", {"zero_stage": 1}),
        ("--data-parallel-sharding-strategy no_shard", {}),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"zero_stage": 2}),
        ("--num-distributed-optimizer-instances 2", {"data_parallel_replicas": 2}),
        ("--optimizer dist_muon --muon-momentum 0.95", {"optimizer": "muon"}),
        ("--context-parallel-size 1 --expert-tensor-parallel-size 1", {}),
        ("--mtp-num-layers 0 --rope-type rope --glu-linear-offset 0.0", {}),
        ("--eval-iters -1", {"eval_iters": 0}),
    ],
)
def test_what_later_megatrons_say_means_the_same_here(typed, wanted):
    assert parse(typed.split()).values == wanted
    with pytest.raises(ValueError, match=r"to be one of aux_loss, .*, got 'sinkhorn'"):
        parse(["--moe-router-load-balancing-type", "sinkhorn"])


@pytest.mark.parametrize(
    ("typed", "layers"),
    [
        ("--num-layers 5", 5),
        ("--num-layers 5 --moe-layer-freq [0]+[1]*4", 4),
        ("--num-layers 5 --moe-layer-freq 2", 3),
        ("--num-layers 3 --model t5 --decoder-num-layers 2 --decoder-seq-length 8", 5),
        ("--num-layers 3 --model ict", 6),
    ],
)
def test_the_losses_of_megatron_core_weigh_in_every_layer(typed, layers):
    # There each layer's loss is added as it is, here their mean: see `ExpertReports`.
    run = [*RUN, *typed.split(), "--moe-num-experts", "4"]
    line = parse([*run, "--moe-aux-loss-coeff", "0.25", "--moe-z-loss-coeff", "0.5"])
    for loaded in None, {"moe_loss_weight": 3.0}:
        config = resolve(line, loaded)
        assert (config.moe_loss_weight, config.moe_z_loss_weight) == (0.25 * layers, 0.5 * layers)
    config = resolve(parse([*run, "--moe-loss-weight", "0.25"]))
    assert (config.moe_loss_weight, config.moe_layers) == (0.25, layers)


@pytest.mark.parametrize(
    ("typed", "top_k", "renormalized", "weight"),
    [
        ("--moe-num-experts 8", 1, False, 0.1),  # MegaBlocks' spelling
        ("--num-experts 8", 1, False, 0.0),  # Megatron-LM's, a Switch without a loss
        ("--num-experts 8 --moe-grouped-gemm", 2, True, 0.0),  # Core's, whose default is 2
        ("--num-experts 8 --moe-aux-loss-coeff 0.5", 2, True, 1.0),
        ("--num-experts 8 --moe-router-score-function sigmoid", 2, True, 0.0),
        ("--num-experts 8 --moe-shared-expert-overlap", 2, True, 0.0),
        ("--num-experts 8 --moe-capacity-factor 2 --moe-jitter-eps 0.1", 1, False, 0.0),
        ("--num-experts 8 --moe-expert-capacity-factor 1.25", 2, True, 0.0),
        ("--num-experts 8 --moe-grouped-gemm --moe-router-pre-softmax", 2, False, 0.0),
        ("--num-experts 8 --moe-grouped-gemm --moe-top-k 3 --moe-loss-weight 0.2", 3, False, 0.2),
        ("--num-experts 8 --moe-router-topk 1 --moe-aux-loss-coeff 0.5", 1, False, 1.0),
        ("--num-experts 8 --recipe dmoe-46m --moe-grouped-gemm", 1, False, 0.1),
    ],
)
def test_experts_have_the_defaults_of_whose_spelling_it_is(typed, top_k, renormalized, weight):
    line = parse([*RUN, "--num-layers", "2", *typed.split()])
    config = resolve(line)
    found = config.moe_top_k, config.moe_renormalize, config.moe_loss_weight
    assert found == (top_k, renormalized, weight)
    assert any("no load-balancing loss" in note for note in line.notes) == (weight == 0)
    assert any("2 experts for a token without" in note for note in line.notes) == (top_k == 2)


def test_every_flag_for_experts_is_known_as_cores_megablocks_or_ours():
    """One of Core's that is missing among `CORES` would leave its scripts without their top-k."""
    top_k = "--moe-top-k --moe-router-topk"  # one that is typed needs no default
    megablocks = """
        --moe-num-experts --moe-capacity-factor --moe-loss-weight --moe-lbl-in-fp32
        --moe-jitter-eps --moe-use-megatron-switch --moe-expert-model-parallelism
    """
    theirs = {
        name
        for action in build_parser()._actions
        for name in action.option_strings
        if name.startswith("--moe-") and "(ours)" not in (action.help or "")
    }
    assert theirs - CORES == {*top_k.split(), *megablocks.split()}


@pytest.mark.parametrize(
    ("typed", "biases"),
    [
        ("--moe-num-experts 8", False),
        ("--num-experts 8", True),
        ("--num-experts 8 --disable-bias-linear", False),
        ("--num-experts 8 --no-moe-mlp-bias", False),
        ("--num-experts 8 --recipe dmoe-46m", False),
    ],
)
def test_megatrons_experts_have_biases_like_its_other_maps(typed, biases):
    config = resolve(parse([*RUN, "--num-layers", "2", *typed.split()]))
    assert config.moe_mlp_bias == biases
    routers = biases or "--no-moe-mlp-bias" in typed
    assert config.moe_router_bias == routers


def test_a_file_has_its_say_beside_megatrons_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("moe_loss_weight = 0.25\n")
    typed = ["--num-layers", "2", "--num-experts", "8", "--config", str(path)]
    assert resolve(parse([*RUN, *typed])).moe_loss_weight == 0.25


def test_a_weight_decay_typed_alone_ends_the_schedule_of_another():
    loaded = {
        "weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2,
    }  # fmt: skip
    config = resolve(parse([*RUN, "--weight-decay", "0.3"]), loaded)
    assert (config.weight_decay_incr_style, config.end_weight_decay) == ("constant", None)


@pytest.mark.parametrize("recipe", ["quickstart", "bert-110m", "t5-220m"])
def test_the_decay_of_a_recipe_is_as_long_as_the_training_asked_for(recipe):
    config = resolve(parse(["--recipe", recipe, "--train-iters", "1000"]))
    assert config.decay_length == "1000 steps"
    warmup = 1000 * 8 * config.lr_warmup_fraction
    assert build_schedule(config, 8).warmup == pytest.approx(warmup)
    typed = ["--recipe", recipe, "--train-iters", "1000", "--lr-decay-iters", "900"]
    assert resolve(parse(typed)).decay_length == "900 steps"


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("--lr-warmup-iters 7", {"lr_warmup_iters": 7, "lr_warmup_fraction": None}),
        ("--fp16", {"fp16": True, "bf16": None}),
        ("--no-fp16", {"fp16": False, "bf16": True}),
        ("--train-samples 5120", {"train_samples": 5120, "train_iters": None}),
        (
            "--vocab-file a --merge-file b",
            {"vocab_file": "a", "merge_file": "b", "tokenizer": None},
        ),
        ("--tokenizer a", {"tokenizer": "a", "vocab_file": None}),
        ("--swiglu", {"swiglu": True, "activation": None}),
        ("--train-data-path a", {"train_data_path": ["a"], "data_path": None}),
    ],
)
def test_the_other_way_to_say_it_takes_the_place_of_the_recipes(tmp_path, typed, wanted):
    file = tmp_path / "run.toml"
    extra = "" if "--tokenizer" in typed else 'tokenizer = "gpt2"'
    file.write_text(f'recipe = "dense-46m"\n{extra}\n')
    loaded = {"activation": "relu", "data_path": ["b"]}
    command = parse(["--config", str(file)])
    config = resolve(parse(typed.split()), loaded | recipe("dense-46m") | command.values)
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("earlier", "typed", "wanted"),
    [
        ({"data_args_path": "a"}, "--train-data-path b", {"data_args_path": None}),
        (
            {"train_data_path": ["a"], "valid_data_path": ["b"]},
            "--data-args-path c",
            {"train_data_path": None, "valid_data_path": None},
        ),
        ({"tokenizer_model": "a"}, "--vocab-file b", {"tokenizer_model": None}),
        (
            {"vocab_file": "a", "merge_file": "b"},
            "--tokenizer-model c",
            {"vocab_file": None, "merge_file": None},
        ),
        (
            {"position_embedding_type": "rope", "use_rope_scaling": True},
            "--rotary-seq-len-interpolation-factor 2",
            {"rope_scaling": ("linear", 2.0)},
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "--recompute-granularity selective",
            {"recompute_method": None},
        ),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 200},
            "--lr-decay-style cosine",
            {"lr_decay_style": "cosine"},
        ),
    ],
    ids=str,
)
def test_no_earlier_setting_stands_in_the_way_of_a_later_one(earlier, typed, wanted):
    config = resolve(parse([*RUN, *typed.split()]), {"num_layers": 2, **earlier})
    assert {name: getattr(config, name) for name in wanted} == wanted
    build_schedule(config, 8)


def test_the_help_names_the_commands():
    text = build_parser(COMMANDS).format_help()
    assert text.startswith("usage: mb-train [FLAGS]\n")  # not all of them, twice
    start = text.index("other commands, each with a --help:")
    for name in COMMANDS:
        assert f"\n  {name} " in text[start : text.index("the run:")]
    assert max(map(len, text.splitlines())) <= 100


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--version"])
    assert capsys.readouterr().out == f"mb-train {mb_train.__version__}\n"


@pytest.mark.parametrize("name", ["quickstart", "dmoe-760m"])
def test_the_printed_configuration_reads_back(tmp_path, name):
    config = resolve(parse(["--recipe", name, "--data-path", "0.3", "a b", "0.7", "c"]))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert resolve(parse(["--config", str(file)])) == config


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--moe-router-group-topk 2", "--moe-router-num-groups and --moe-router-group-topk toget"),
        ("--moe-mlp-impl sparse", "--moe-ffn-hidden-size to be a multiple of 128"),
    ],
)
def test_a_configuration_that_no_model_can_have_is_not_printed(typed, says, capsys):
    for command in [], ["plan"]:
        words = [*command, *RUN, "--moe-num-experts", "8", "--ffn-hidden-size", "64"]
        assert main([*words, *typed.split(), "--print-config"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert says in err


@pytest.mark.parametrize("text", ["\U0001f600 \u00e9\u4e2d", 'a"b\\c', "\x7f\x00\t\n\u2028", "x'y"])
def test_any_text_reads_back_from_toml(tmp_path, text):
    config = resolve(parse([*RUN, "--save", text, "--data-path", "0.5", text, "0.5", "b"]))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert resolve(parse(["--config", str(file)])) == config


def sample(f, kind):
    """A value of a field that is not its default, and the words that say it."""
    about = spec(f)
    if kind is bool:
        return not f.default, []
    if about.choices:
        value = next(choice for choice in reversed(about.choices) if choice != f.default)
        return value, [str(value)]
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        values = [kind(n) for n in range(1, 1 + (about.count or 2))]
        return values, list(map(str, values))
    value = kind("0.5") if kind is float else kind("7")
    return value, [str(value)]


@pytest.mark.parametrize("f", fields(TrainConfig), ids=lambda f: f.name)
def test_every_field_can_be_typed_and_written_to_a_file(tmp_path, f):
    value, words = sample(f, value_types(TrainConfig)[f.name])
    for flag in (flag_name(f.name), *spec(f).also):
        if value is False:
            flag = "--no-" + flag[2:]
        more = {"moe_renormalize": True} if flag == "--moe-router-topk" else {}
        assert parse([flag, *words]).values == {f.name: value} | more
    for flag in spec(f).off:
        assert parse([flag]).values == {f.name: False}
    file = tmp_path / "run.toml"
    file.write_text(f"{f.name} = {json.dumps(value)}\n")
    assert read_toml(str(file))[0] == {f.name: value}


def test_a_path_that_is_not_in_utf8_is_refused_at_once():
    with pytest.raises(UsageError, match="in UTF-8, got"):
        parse(["--save", "runs/\udcff"])


@pytest.mark.parametrize(
    "words",
    ["SRC DST --moe-num-experts 8", "--moe-num-experts 8 SRC DST", "SRC --moe-num-experts=8 DST"],
)
def test_a_command_takes_the_flags_of_a_run_anywhere(words):
    own = Parser()
    own.add_argument("source")
    own.add_argument("target")
    own.add_argument("--task")
    command = parse([*words.split(), "--task", "of my own"], own=own)
    assert (command.own.source, command.own.target) == ("SRC", "DST")
    assert command.own.task == "of my own"
    assert command.values == {"moe_num_experts": 8}
    with pytest.raises(UsageError, match="The following arguments are required: source, target"):
        parse(["--moe-num-experts", "8"], own=own)
    for behind in ("SRC DST", "DST"):  # a flag that takes all words that follow
        given = [] if "SRC" in behind else ["SRC"]
        command = parse([*given, "--data-path", "a", "b", *behind.split()], own=own)
        assert (command.own.source, command.own.target) == ("SRC", "DST")
        assert command.values == {"data_path": ["a", "b"]}
    with pytest.raises(UsageError, match=r"Unknown flag --tusk\. The nearest is --task"):
        parse([*words.split(), "--tusk"], own=own)


def test_a_choice_of_the_checkpoint_can_be_turned_off():
    loaded = {
        "recompute_granularity": "full", "recompute_method": "uniform",
        "moe_saved_activation_bits": 8, "moe_num_experts": 4, "activation": "gelu",
    }  # fmt: skip
    words = ["--recompute-granularity", "none", "--moe-saved-activation-bits", "none"]
    config = resolve(parse([*RUN, *words]), loaded)
    assert config.recompute_granularity is config.recompute_method is None
    assert config.moe_saved_activation_bits is None
    assert resolve(parse(RUN), loaded).recompute_granularity == "full"
