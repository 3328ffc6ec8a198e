"""Rates of a run against published log lines and against the formulas' corners."""

import math
from dataclasses import replace

import pytest
from mb_train.assembly.layout import check_schedule, parallel_dims
from mb_train.config import TrainConfig
from mb_train.config.recipes import RECIPES, recipe
from mb_train.schedule import BatchSizes, build_schedule, train_iterations, train_samples

RUN = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 8,
    "micro_batch_size": 8, "global_batch_size": 512, "train_iters": 2000, "lr": 6e-4,
}  # fmt: skip


def schedule(**change):
    config = TrainConfig(**{**RUN, **change})
    return build_schedule(config, config.batch_size(1))


def test_cosine_reproduces_the_rates_of_a_published_run():
    # AMD's ROCm post of Megatron-LM, GPT 125M: 2000 steps of 512, warm-up 1 %, 6e-4 to 6e-5.
    rates = schedule(min_lr=6e-5, lr_decay_style="cosine", lr_warmup_fraction=0.01)
    logged = {100: "5.978E-04", 1000: "3.343E-04", 2000: "6.000E-05"}
    assert {i: f"{rates.lr(512 * i):.3E}" for i in logged} == logged


def test_skipped_steps_hold_the_rates_back():
    # The same post, MoE 125M in fp16: the scale falls from 2^32 to 2^15 in 18 skipped steps.
    rates = schedule(lr=1.5e-4, min_lr=1e-5, lr_decay_style="cosine", lr_warmup_fraction=0.01)
    logged = {200: "1.477E-04", 1100: "7.202E-05", 2000: "1.003E-05"}
    assert {i: f"{rates.lr(512 * (i - 18)):.3E}" for i in logged} == logged


def test_warm_up_is_linear_from_zero():
    rates = schedule(lr_warmup_iters=4, lr_decay_style="constant")
    assert [rates.lr(512 * i) for i in range(6)] == pytest.approx(
        [0, 1.5e-4, 3e-4, 4.5e-4, 6e-4, 6e-4]
    )


@pytest.mark.parametrize(
    ("style", "halfway", "after"),
    [
        ("linear", 3.5e-4, 1e-4),
        ("cosine", 3.5e-4, 1e-4),
        ("constant", 6e-4, 6e-4),
        ("inverse-square-root", 6e-4 * math.sqrt(10 / 105), 1e-4),
    ],
)
def test_decay(style, halfway, after):
    rates = schedule(lr_decay_style=style, min_lr=1e-4, lr_warmup_iters=10, lr_decay_iters=200)
    assert rates.lr(512 * 105) == pytest.approx(halfway)
    assert rates.lr(512 * 201) == pytest.approx(after)


def test_the_end_of_a_decay_is_still_in_it_and_no_warm_up_is_none():
    rates = schedule(
        lr_decay_style="inverse-square-root", min_lr=1e-5, lr_warmup_iters=10, lr_decay_iters=200
    )
    assert rates.lr(512 * 200) == pytest.approx(6e-4 * math.sqrt(10 / 200))
    at_once = schedule(lr_decay_style="inverse-square-root")
    assert [at_once.lr(n) for n in (0, 1, 4)] == pytest.approx([6e-4, 6e-4, 3e-4])


@pytest.mark.parametrize(
    ("style", "halfway"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", math.sqrt(2) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_a_stable_rate_decays_at_the_end(style, halfway):
    rates = schedule(
        lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=40, min_lr=1e-4,
        lr_warmup_iters=10, lr_warmup_init=2e-4, lr_decay_iters=200,
    )  # fmt: skip
    course = {0: 2e-4, 5: 4e-4, 10: 6e-4, 100: 6e-4, 160: 6e-4, 180: 1e-4 + halfway * 5e-4}
    course |= {200: 1e-4, 201: 1e-4}
    assert [rates.lr(512 * i) for i in course] == pytest.approx(list(course.values()))


def test_a_stable_rate_may_have_no_decay():
    """Which another run makes, from its checkpoints."""
    rates = schedule(lr_decay_style="WSD", lr_wsd_decay_iters=0, min_lr=1e-4, lr_decay_iters=200)
    assert [rates.lr(512 * i) for i in (0, 100, 200, 201)] == [6e-4, 6e-4, 6e-4, 1e-4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters with --lr-decay-style WSD, got none"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_samples": 4}, "got --lr-wsd-decay-samples"),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init of at most --lr 0.0006, got 1.0"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 300, "lr_decay_iters": 200},
            "--lr-wsd-decay-iters .* of at most the decay",
        ),
    ],
)
def test_a_decay_at_the_end_is_said_in_full(change, said):
    with pytest.raises(ValueError, match=said):
        schedule(**change)


def test_sample_based_settings():
    rates = schedule(
        train_iters=None, train_samples=5120, lr_decay_samples=1000, lr_warmup_samples=100
    )
    assert (rates.warmup, rates.decay, rates.weight_decay_length) == (100, 1000, 5120)
    assert rates.lr(50) == pytest.approx(3e-4)
    rates = schedule(
        train_iters=None, train_samples=5120, lr_decay_style="WSD", lr_wsd_decay_samples=1000
    )
    assert [rates.lr(n) for n in (4120, 5120)] == [6e-4, 0]
    assert rates.lr(4620) == pytest.approx(6e-4 * (math.sqrt(2) - 1))  # exponential


@pytest.mark.parametrize(
    ("style", "quarter", "halfway"),
    [
        ("constant", 0.01, 0.01),
        ("linear", 0.1, 0.2),
        ("cosine", 0.2 - 0.2 * math.sqrt(0.5), 0.2),
    ],
)
def test_weight_decay(style, quarter, halfway):
    ends = {} if style == "constant" else {"start_weight_decay": 0.0, "end_weight_decay": 0.4}
    rates = schedule(weight_decay_incr_style=style, **ends)
    assert rates.weight_decay(512 * 500) == pytest.approx(quarter)
    assert rates.weight_decay(512 * 1000) == pytest.approx(halfway)
    wanted = tuple(ends.values()) or (0.01, 0.01)
    assert (rates.weight_decay(0), rates.weight_decay(512 * 9999)) == pytest.approx(wanted)


def test_a_weight_decay_may_rise_for_longer_or_shorter_than_the_run():
    ends = {"start_weight_decay": 0.2, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"}
    rates = schedule(**ends, weight_decay_incr_iters=4000)
    assert rates.weight_decay(512 * 1000) == pytest.approx(0.25)
    samples = {"train_iters": None, "train_samples": 5120, "weight_decay_incr_samples": 1000}
    assert schedule(**ends, **samples).weight_decay(1000) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="in the unit of --train-iters, got --weight-decay-incr-s"):
        schedule(**ends, weight_decay_incr_samples=1000)


def test_a_warm_up_as_long_as_the_decay_is_refused():
    with pytest.raises(ValueError, match=r"than the decay, got 1024000.*--lr-warmup-iters"):
        schedule(lr_warmup_iters=2000)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_tried_for_a_few_steps(name):
    rates = schedule(**recipe(name) | {"train_iters": 24})
    assert rates.decay == rates.weight_decay_length
    assert rates.warmup < rates.weight_decay_length / 10


def test_the_batch_grows_as_in_megatron():
    # GPT-3's script: from 16 by 16 to 1536 over 5,859,375 samples.
    config = TrainConfig(
        **RUN | {"train_iters": None, "global_batch_size": 1536, "micro_batch_size": 1},
        train_samples=146_484_375, rampup_batch_size=[16, 16, 5_859_375],
    )  # fmt: skip
    sizes = BatchSizes(config, 1536)
    # After every 5859375 / 95 = 61677.6 samples.
    assert [sizes.size(n) for n in (0, 61_677, 61_678, 5_859_374, 5_859_375)] == [
        16, 16, 32, 1520, 1536,
    ]  # fmt: skip
    iterations = consumed = 0
    while consumed <= 5_859_375:  # Megatron's own count
        consumed += sizes.size(consumed)
        iterations += 1
    iterations += (146_484_375 - consumed) // 1536
    assert train_iterations(config, sizes) == iterations
    assert train_samples(config, 1536) == 146_484_375


@pytest.mark.parametrize("samples", [4, 5, 18, 100, 101])
def test_a_ramp_up_longer_than_the_run_ends_with_whole_steps(samples):
    config = TrainConfig(
        **RUN | {"train_iters": None, "global_batch_size": 16, "micro_batch_size": 4},
        train_samples=samples, rampup_batch_size=[4, 4, 60],
    )  # fmt: skip
    sizes = BatchSizes(config, 16, step=4)
    steps = consumed = 0
    while consumed + sizes.size(consumed) <= samples:
        consumed += sizes.size(consumed)
        steps += 1
    assert train_iterations(config, sizes) == steps


@pytest.mark.parametrize(("rampup", "first"), [(None, 16), ([4, 4, 60], 4)])
def test_samples_that_fill_no_batch_are_refused(rampup, first):
    run = RUN | {"train_iters": None, "global_batch_size": 16, "micro_batch_size": 4}
    config = TrainConfig(**run, train_samples=first - 1, rampup_batch_size=rampup)
    sizes = BatchSizes(config, 16)
    with pytest.raises(ValueError, match=f"samples of at least {first}, .* got {first - 1}"):
        train_iterations(config, sizes)
    assert train_iterations(config, sizes, iteration=3, consumed_samples=first) == 3


@pytest.mark.parametrize(
    ("rampup", "step", "says"),
    [
        ([4, 4, 60], 8, "multiple of micro batch x data-parallel ranks = 8, got 4"),
        ([4, 5, 60], 1, "no multiple of the increment 5"),
        ([32, 4, 60], 1, "not below the start"),
    ],
)
def test_a_ramp_up_that_does_not_fit_is_refused(rampup, step, says):
    config = TrainConfig(
        **RUN | {"train_iters": None, "global_batch_size": 16}, train_samples=100,
        rampup_batch_size=rampup,
    )  # fmt: skip
    with pytest.raises(ValueError, match=says):
        BatchSizes(config, 16, step=step)


def test_a_ramp_up_that_an_interleaved_pipeline_cannot_run_is_refused():
    run = RUN | {"num_layers": 4, "train_iters": None, "global_batch_size": 48}
    config = TrainConfig(
        **run, train_samples=100, rampup_batch_size=[32, 8, 60], pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=1,
    )  # fmt: skip
    sizes = BatchSizes(config, 48, step=8)
    numbers = list(map(sizes.micro_batches, sizes.all))
    assert numbers == [4, 5, 6]
    with pytest.raises(ValueError, match="got 5 and --pipeline-model-parallel-size = 2"):
        check_schedule(config, numbers)
    check_schedule(replace(config, num_layers_per_virtual_pipeline_stage=0), numbers)


def test_a_retriever_with_one_block_at_a_time_is_refused():
    """Its loss is 0 whatever it says, and it would not learn."""
    config = TrainConfig(**RUN | {"model": "ict", "micro_batch_size": 1})
    assert parallel_dims(config, 2).data == 2  # which have each other's
    alone = replace(config, tensor_model_parallel_size=2, num_attention_heads=2)
    for of_run, ranks in (config, 1), (alone, 2):
        with pytest.raises(ValueError, match=r"micro-batch-size of at least 2 with --model ict.*1"):
            parallel_dims(of_run, ranks)
