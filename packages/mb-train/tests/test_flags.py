"""The command line: every field is a flag, layers win in order, mistakes name the nearest flag."""

from dataclasses import fields

import pytest
from mb_train.config import TrainConfig, flag_name
from mb_train.flags import SETTLED, UsageError, build_parser, parse, read_toml, resolve, to_toml
from mb_train.recipes import recipe

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
        (["--vocab-file", "none.json"], "Expected --vocab-file to be a file, got 'none.json'"),
        (["--tokenizer-type", "Bert"], "Expected --tokenizer-type GPT2BPETokenizer, got 'Bert'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises(UsageError, match=says):
        parse(arguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hiden_size = 3", "Unknown key 'hiden_size' in .* The nearest is hidden_size"),
        ("hidden_size = 'x'", "Expected hidden_size in .* to be int, got 'x'"),
        ("bf16 = 1", "Expected bf16 in .* to be bool, got 1"),
        ("hidden_size = = 3", "is not TOML"),
    ],
    ids=["unknown", "kind", "bool", "syntax"],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, says):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_toml(str(file))


def test_settled_flags_are_answered():
    arguments = []
    for name, (count, _) in SETTLED.items():
        arguments += [name, *["local"] * count]
    notes = parse(arguments).notes
    assert [note.split(":")[0] for note in notes] == list(SETTLED)


@pytest.mark.parametrize("name", ["quickstart", "dmoe-760m"])
def test_the_printed_configuration_reads_back(tmp_path, name):
    config = resolve(parse(["--recipe", name, "--data-path", "0.3", "a b", "0.7", "c"]))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert resolve(parse(["--config", str(file)])) == config


def test_a_megablocks_script_is_accepted_verbatim(tmp_path):
    vocab, merges = tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"
    vocab.write_text("{}")
    merges.write_text("")
    script = f"""
        --moe-num-experts=64 --moe-loss-weight=0.1 --moe-top-k=1
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
        --max-position-embeddings 1024 --micro-batch-size 32 --global-batch-size 512
        --train-iters 20000 --lr-decay-iters 20000 --lr 0.0006 --min-lr 0.00006
        --lr-decay-style cosine --lr-warmup-fraction 0.01 --clip-grad 1.0 --init-method-std 0.01
        --data-path 1.0 pile/01 1.0 pile/02 --vocab-file {vocab} --merge-file {merges}
        --make-vocab-size-divisible-by 1024 --split 969,30,1 --bf16 --DDP-impl local
        --moe-expert-model-parallelism --no-async-tensor-model-parallel-allreduce
        --use-flash-attn --save-interval 2000 --save out --eval-iters 100 --log-interval 100
        --eval-interval 1000"""
    command = parse(script.split())
    assert len(command.notes) == 4
    wanted = recipe("dmoe-125m") | {"save": "out", "lr_decay_iters": 20000, "min_lr": 6e-5}
    wanted |= {"compile": False}
    wanted |= {"data_path": ["1.0", "pile/01", "1.0", "pile/02"], "tokenizer": str(vocab)}
    assert resolve(command) == TrainConfig(**wanted)
