"""The command line: every field is a flag, layers win in order, mistakes name the nearest flag."""

import itertools
import json
import typing
from dataclasses import fields

import mb_train
import pytest
from mb_train.cli import main
from mb_train.commands import COMMANDS
from mb_train.config import TrainConfig, flag_name
from mb_train.config.field import Bounds, spec, value_types
from mb_train.config.recipes import recipe
from mb_train.config.toml_file import UsageError, read_toml, to_toml
from mb_train.flags.command_line import parse, resolve, without_effect
from mb_train.flags.parser import Parser, build_parser
from mb_train.schedule import build_schedule

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"),
]


def test_every_field_has_a_flag_and_a_help():
    options = build_parser()._option_string_actions
    for f in fields(TrainConfig):
        text = options[flag_name(f.name)].help
        assert text, f.name
        assert text.endswith("(default yes)") == (f.default is True), f.name


def test_no_flag_is_the_quickstart():
    assert resolve(parse([])) == TrainConfig(**recipe("quickstart"))
    assert resolve(parse(["--train-iters", "7"])).train_iters == 7


def test_a_described_model_starts_from_megatrons_defaults():
    config = resolve(parse(RUN))
    assert (config.moe_num_experts, config.lr_decay_style, config.save) == (None, "linear", None)


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.toml"
    text = 'recipe = "dense-46m"\nlr = 1\ndata-path = "a"\n[training]\nmicro-batch-size = 4\n'
    file.write_text(text, "utf-8-sig")  # as some editors write it
    config = resolve(parse(["--config", str(file), "--seed", "5"]), {"lr": 0.5, "clip_grad": 2.0})
    assert config.lr == 1.0  # the file's, over the recipe's and the loaded run's
    assert (config.micro_batch_size, config.seed, config.data_path) == (4, 5, ["a"])
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
        (["train" * 60], "Unknown argument train.*. See --help"),  # no file may have this name
        (
            ["conf/train.yaml"],
            "Unknown argument conf/train.yaml. A file of settings is given",
        ),
        (
            ["pretrain_gpt.py", "--lr=1"],
            "Unknown .* -m mb_train stands in place of a script",
        ),
        (["model.d_model=8"], "Unknown argument model.d_model=8. Settings are flags here"),
        (["--block_size=8"], "--block_size cannot be honoured: say --seq-length"),
        (["--seed", "1", ""], "Unknown argument ''. It is empty, as a variable in quotes"),
        (["--bf16", "true"], "Unknown argument true. --bf16 takes no value."),
        (["true", "--seed", "1", "true", "--bf16"], "Unknown argument true. See --help"),
        (["--bf16=true"], "^--bf16/--no-bf16 takes no value, got 'true'"),
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


@pytest.mark.parametrize(
    "words", ["eval ? text", "generate ?", "report ?", "convert ? a", "convert a ?", "upcycle ? a",
              "finetune ? --task mnli --train-data a --valid-data a", "--load ?"],
)  # fmt: skip
def test_an_empty_name_is_not_the_current_folder(words, tmp_path, monkeypatch, capsys):
    """As `mb-train eval "$RUN"` says where the variable is not set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a")
    assert main(["" if word == "?" else word for word in words.split()]) == 2
    assert "got nothing" in capsys.readouterr().err


def test_a_list_that_is_given_twice_is_told():
    """Data paths above all: `mb-data` joins its inputs."""
    twice = parse(["--data-path", "1", "a", "--seed", "1", "--data-path=b", "--seed", "2"])
    assert twice.values["data_path"] == ["b"]
    assert twice.notes == ("given more than once, and the last time counts: --data-path",)
    assert parse(["--data-path", "a", "b", "--seed", "1", "--seed", "2"]).notes == ()


def test_shares_that_are_no_numbers_are_refused_at_once():
    run = ["--recipe", "dmoe-46m", "--split"]
    for typed in ("abc", "98;2", "1,2,3,4", "0,0,0"):
        with pytest.raises(ValueError, match=rf"--split '{typed}': expected one to three shares"):
            resolve(parse([*run, typed]))
    assert resolve(parse([*run, "'99,1,0'"])).split == "'99,1,0'"


def test_a_run_folder_without_a_flag_is_one_to_go_on_from(tmp_path):
    typed = [str(tmp_path), "--train-iters", "9"]
    for content, says in (
        ("config.json", f"Expected a checkpoint in {tmp_path}, found none. It is one of Hugging F"),
        ("latest_checkpointed_iteration.txt", "Expected .* to hold an iteration, got ''"),
        ("run.json", f"To go on with the run in this folder: --load {tmp_path}"),
    ):
        (tmp_path / content).touch()
        with pytest.raises(UsageError, match=f"Unknown argument {tmp_path}. {says}"):
            parse(typed)


def test_a_value_of_several_words_may_begin_like_a_flag():
    assert parse(["--wandb-exp-name", "-a b"]).values == {"wandb_exp_name": "-a b"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hiden_size = 3", "Unknown key 'hiden_size' in .* The nearest is hidden_size"),
        ("hidden_size = 'x'", "run.toml: Expected --hidden-size to be int, got 'x'"),
        ("bf16 = 1", "run.toml: Expected --bf16 to be bool, got 1"),
        ("hidden_size = = 3", "is not TOML"),
        ("data_path = " + "[" * 100_000, "is not TOML"),
        ("[a]\nlr = 1\n[b]\nlr = 2", "Expected lr once in .*, got it twice"),
        ("rampup_batch_size = ['a']", "to be a list of int, got"),
        (f"lr = {10**400}", "run.toml: Expected --lr to fit 64 bits, got 1000"),
        ("recipe = 3", "Expected recipe in .* to be a name, got 3"),
    ],
    ids=["unknown", "kind", "bool", "syntax", "depth", "twice", "list", "size", "recipe"],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, says):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_toml(str(file))


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
        "no effect without --tokenizer-type TikTokenizer or NullTokenizer: --vocab-size",
    ]
    words = (
        "--save-interval 9 --async-save --no-save-optim --profile-step-end 20 "
        "--pipeline-schedule gpipe --use-checkpoint-opt_param-scheduler"
    )
    command = parse([*RUN, *words.split()])
    assert without_effect(command, resolve(command)) == [
        "no effect without --save: --save-interval, --async-save, --no-save-optim",
        "no effect without --load: --use-checkpoint-opt-param-scheduler",
        "no effect without --pipeline-model-parallel-size above 1: --pipeline-schedule",
        "no effect without --profile: --profile-step-end",
    ]
    command = parse([*RUN, "--moe-router-topk", "2", "--moe-expert-capacity-factor", "0"])
    assert without_effect(command, resolve(command)) == [  # not of defaults that these bring
        "no effect without --moe-num-experts: --moe-top-k",
    ]
    command = parse([*RUN, "--sft", "--eod-mask-loss", "--data-path", "chats"])
    assert without_effect(command, resolve(command)) == [  # of conversations answers alone count
        "no effect without --sft left out: --eod-mask-loss",
    ]
    words = "--save a --save-interval 0 --async-save --log-timers-to-tensorboard"
    command = parse([*RUN, *words.split(), "--no-log-loss-scale-to-tensorboard"])
    assert without_effect(command, resolve(command)) == [
        "no effect without --save-interval other than 0: --async-save",
        "no effect without --tensorboard-dir or --wandb-project: "
        "--log-loss-scale-to-tensorboard, --log-timers-to-tensorboard",
    ]
    for there in (["--tensorboard-dir", "b"], ["--wandb-project", "b"]):
        command = parse(
            [*RUN, "--log-timers-to-tensorboard", "--save", "a", "--async-save", *there]
        )
        assert without_effect(command, resolve(command)) == []


def test_the_plain_balancing_loss_replaces_another_of_a_run():
    loaded = {"moe_balance_over": "sequence", "moe_num_experts": 4}
    line = parse([*RUN, "--moe-router-load-balancing-type", "aux_loss"])
    assert resolve(line, loaded).moe_balance_over == "micro_batch"


def test_what_has_no_effect_beside_another_setting_is_said():
    scale = "--initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 500 --hysteresis 4"
    words = (
        f"--fp16 --loss-scale 128 {scale} --train-data-path a --split 98,2,0 --eval-iters 0 "
        "--eval-interval 50 --lr-decay-style constant --min-lr 1e-5 --lr-warmup-init 1e-6 "
        "--weight-decay 0.1 --weight-decay-incr-style linear --start-weight-decay 0 "
        "--end-weight-decay 0.1 --moe-num-experts 4 --moe-router-group-score-top 1"
    )
    command = parse([*RUN, *words.split()])
    assert without_effect(command, resolve(command)) == [
        "no effect without --moe-router-group-topk: --moe-router-group-score-top",
        "no effect without --weight-decay-incr-style constant: --weight-decay",
        "no effect without --lr-decay-style linear or cosine or inverse-square-root or WSD: "
        "--min-lr",
        "no effect without --lr-warmup-fraction or --lr-warmup-iters or --lr-warmup-samples: "
        "--lr-warmup-init",
        "no effect without --loss-scale left out: --initial-loss-scale, --min-loss-scale, "
        "--loss-scale-window, --hysteresis",
        "no effect without --eval-iters other than 0: --eval-interval",
        "no effect without --train-data-path left out: --split",
    ]
    words = "--moe-num-experts 4 --moe-row-policy budget --moe-row-budget 3 --moe-dispatcher"
    command = parse([*RUN, *words.split(), "all_to_all", "--moe-a2a-overlap-degree=2"])
    assert without_effect(command, resolve(command)) == [
        "no effect without --moe-dispatcher auto or all_gather or peer: --moe-row-policy, "
        "--moe-row-budget"
    ]
    command = parse([*RUN, *words.split(), "all_gather", "--moe-a2a-overlap-degree=2"])
    assert without_effect(command, resolve(command)) == [
        "no effect without --moe-dispatcher auto or all_to_all or peer: --moe-a2a-overlap-degree"
    ]
    words = f"--fp16 {scale} --split 98,2,0 --eval-interval 50 --min-lr 1e-5 --lr-warmup-init 1e-6"
    command = parse([*RUN, *words.split(), "--lr-warmup-iters=1", "--weight-decay=0.1"])
    assert without_effect(command, resolve(command)) == []
    ends, falling = (
        "--decoupled-min-lr 1e-6 --decoupled-lr",
        "linear or cosine or inverse-square-root",
    )
    for style, rates, lacks in (
        ("constant", f"{ends} 1e-3", [f"--lr-decay-style {falling} or WSD"]),
        ("constant", "--decoupled-min-lr 1e-6", ["--decoupled-lr"]),
        ("cosine", f"{ends} 1e-3", []),
    ):
        command = parse([*RUN, "--lr-decay-style", style, *rates.split()])
        found = [f"no effect without {way}: --decoupled-min-lr" for way in lacks]
        assert without_effect(command, resolve(command)) == found
    by_part = parse([*RUN, "--per-split-data-args-path=parts.json", "--split=98,2,0"])
    assert without_effect(by_part, resolve(by_part)) == [
        "no effect without --per-split-data-args-path left out: --split"
    ]
    words = "--vocab-file v --merge-file m --tokenizer-model t --data-cache-path c"
    command = parse([*RUN, "--tokenizer-type=HuggingFaceTokenizer", *words.split()])
    assert without_effect(command, resolve(command)) == [
        "no effect without --tokenizer-type left out or GPT2BPETokenizer or BertWordPieceLowerCase "
        "or BertWordPieceCase: --vocab-file",
        "no effect without --tokenizer-type left out or GPT2BPETokenizer: --merge-file",
    ]
    with pytest.raises(ValueError, match="Expected --tokenizer-type with --vocab-file and"):
        resolve(parse([*RUN, *words.split()]))
    command = parse([*RUN, "--hysteresis=4"])
    assert without_effect(command, resolve(command)) == ["no effect without --fp16: --hysteresis"]


def test_what_a_field_needs_is_there():
    named = {f.name: f for f in fields(TrainConfig)}
    needs = [spec(f).needs for f in named.values() if spec(f).needs]
    for names, *values in itertools.chain(*(n if isinstance(n, list) else [n] for n in needs)):
        ranges = [value for value in values if isinstance(value, Bounds)]
        for name in names if isinstance(names, tuple) else (names,):
            assert {*values} - {*ranges} <= {*spec(named[name]).choices}
            assert values or not named[name].default


def test_a_schedule_of_the_checkpoint_can_overrule_the_one_typed():
    loaded = {"lr": 0.5, "min_lr": 0.1, "clip_grad": 2.0}
    line = parse([*RUN, "--clip-grad", "3", "--use-checkpoint-opt_param-scheduler"])
    config = resolve(line, loaded)
    assert (config.lr, config.min_lr, config.clip_grad) == (0.5, 0.1, 3.0)
    longer = ["--train-iters", "200", "--weight-decay", "0.3"]
    del loaded["min_lr"]
    for length, decay in ({}, "100 steps"), ({"lr_decay_iters": 1}, "1 step"):
        started = {**loaded, "train_iters": 100, "weight_decay": 0.2, **length}
        line = parse([*RUN, *longer, "--use-checkpoint-opt_param-scheduler"])
        config = resolve(line, started)
        assert (config.decay_length, config.weight_decay) == (decay, 0.2)
        assert (config.train_iters, resolve(parse([*RUN, *longer]), started).weight_decay) == (
            200, 0.3,
        )  # fmt: skip


@pytest.mark.parametrize("without", ["--finetune", "--no-load-optim"])
def test_without_the_optimizers_state_the_schedule_typed_counts(without):
    words = ["--load", "a", "--lr", "0.4", "--use-checkpoint-opt_param-scheduler", without]
    line = parse([*RUN, *words])
    config = resolve(line, {"lr": 0.5, "min_lr": 0.1, "train_iters": 10})
    assert (config.lr, config.lr_decay_iters) == (0.4, None)
    assert without_effect(line, config) == [
        f"no effect without {without} left out: --use-checkpoint-opt-param-scheduler"
    ]


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


def test_a_weight_decay_typed_alone_ends_the_schedule_of_another():
    loaded = {
        "weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2,
    }  # fmt: skip
    config = resolve(parse([*RUN, "--weight-decay", "0.3"]), loaded)
    assert (config.weight_decay_incr_style, config.end_weight_decay) == ("constant", None)


@pytest.mark.parametrize("recipe", ["quickstart", "bert-110m", "t5-220m"])
def test_the_decay_of_a_recipe_is_as_long_as_the_training_asked_for(recipe):
    config = resolve(parse(["--recipe", recipe, "--train-iters", "1000"]))
    assert config.decay_length == "1,000 steps"
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
    earlier = loaded | recipe("dense-46m") | command.values
    config = resolve(parse(typed.split()), earlier)
    assert {name: getattr(config, name) for name in wanted} == wanted
    file.write_text(to_toml(TrainConfig(**earlier)))  # and of a file's, such as a run's own
    config = resolve(parse(["--config", str(file), *typed.split()]))
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
            {"position_embedding_type": "rope", "use_rope_scaling": True},
            "--rope-type yarn --rotary-scaling-factor 2",
            {"rope_scaling": ("yarn", 2.0, 4096, 32.0, 1.0, 1.0, 0.0, True)},
        ),
        (
            {"position_embedding_type": "rope", "rope_type": "yarn", "rotary_scaling_factor": 2.0},
            "--use-rope-scaling",
            {"rope_scaling": ("llama3", 8.0)},
        ),
        (
            {"position_embedding_type": "rope", "group_query_attention": True},
            "--multi-latent-attention",
            {"group_query_attention": False},
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


def test_a_file_can_turn_off_what_a_recipe_has(tmp_path):
    """TOML has no null: what says none on the command line says it there."""
    file, recompute = tmp_path / "run.toml", 'recompute_granularity = "full"\n'
    file.write_text('recipe = "quickstart"\nmoe_num_experts = 0\nwandb_project = ""\n' + recompute)
    config = resolve(parse(["--config", str(file)]))
    assert config.moe_num_experts is config.wandb_project is None
    assert config == resolve(parse(["--moe-num-experts=0", "--recompute-granularity=full"]))
    file.write_text('recompute_granularity = "none"\n')
    words = [*RUN, "--config", str(file)]
    config = resolve(parse(words), {"recompute_granularity": "full"})
    assert config.recompute_granularity is None
    file.write_text("moe_num_experts = false\n")
    with pytest.raises(UsageError, match="--moe-num-experts to be int, got False"):
        read_toml(str(file))


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
        return [value] if typing.get_origin(kind) is list else value, [str(value)]
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        values = [kind(n) for n in range(1, 1 + (about.count or 2))]
        return values, list(map(str, values))
    value = kind("0.5") if kind is float else kind("7")
    return value, [str(value)]


ALSO_SAID = {
    "--moe-router-topk": {"moe_renormalize": True},
    "--hybrid-layer-pattern": {"num_layers": 1}, "--hybrid-override-pattern": {"num_layers": 1},
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("f", fields(TrainConfig), ids=lambda f: f.name)
def test_every_field_can_be_typed_and_written_to_a_file(tmp_path, f):
    value, words = sample(f, value_types(TrainConfig)[f.name])
    for flag in (flag_name(f.name), *spec(f).also):
        if value is False:
            flag = "--no-" + flag[2:]
        assert parse([flag, *words]).values == {f.name: value} | ALSO_SAID.get(flag, {})
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
