"""Choosing tokens, and text from a trained run."""

import itertools
import json
import math
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mb_data
import numpy as np
import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.inference import going_on
from mb_train.inference.decoding import Next, Sampling, choose, continue_tokens
from mb_train.inference.generate import Generator, text_behind
from mb_train.loading import hold_as_used, load_trained
from mb_train.models.cache import KVCache
from mb_train.models.gpt import GPT
from mb_train.models.unfilled import unfilled
from mb_train.tasks.architecture import transformer_config

SCORES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]).log()


def drawn(sampling, times=400):
    """How often each token is, of one row drawn again and again."""
    generator = torch.Generator().manual_seed(1)
    return Counter(choose(SCORES[None], sampling, [generator])[0] for _ in range(times))


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {1}),
        (Sampling(temperature=1e-300), {1}),
        (Sampling(top_p=1e-300), {1}),
        (Sampling(top_k=1), {1}),
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_p=0.39), {1}),
        (Sampling(top_p=0.41), {1, 3}),
        (Sampling(top_p=0.75), {1, 3, 4}),
        (Sampling(top_k=3, top_p=0.8), {1, 3}),
        (Sampling(), {0, 1, 2, 3, 4}),
    ],
    ids=repr,
)
def test_only_the_kept_tokens_are_drawn(sampling, possible):
    assert set(drawn(sampling)) == possible


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_numbers_are_refused(temperature):
    """One is enough, and a model whose scores overflow has no likeliest token either."""
    for bad in (torch.nan, torch.inf):
        scores = torch.where(torch.arange(5) == 3, bad, SCORES)
        two = torch.stack([SCORES, scores])
        with pytest.raises(ValueError, match="not numbers"):
            choose(two, Sampling(temperature=temperature), [torch.Generator()] * 2)


def test_draws_follow_the_probabilities():
    counts = drawn(Sampling(top_k=2), times=7000)
    assert counts[1] / 7000 == pytest.approx(4 / 7, abs=0.02)
    cold = drawn(Sampling(top_k=2, temperature=0.5), times=7000)
    assert cold[1] / 7000 == pytest.approx(16 / 25, abs=0.02)


def test_a_rounding_of_the_scores_does_not_change_what_is_drawn():
    scores = torch.zeros(500)
    rounded = scores + 1e-7 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        one, other = (
            choose(found[None], Sampling(), [torch.Generator().manual_seed(seed)])
            for found in (scores, rounded)
        )
        assert one == other


def test_rows_draw_by_themselves():
    """As alone, whatever is beside them: each with its own kept tokens and its own generator."""
    rows, sampling = (
        torch.randn(5, 40, generator=torch.Generator().manual_seed(0)),
        Sampling(top_p=0.7),
    )
    seeded = [torch.Generator().manual_seed(seed) for seed in range(5)]
    together = [choose(rows, sampling, seeded) for _ in range(30)]
    for row, alone in enumerate(rows):
        generator = torch.Generator().manual_seed(row)
        drawn = [choose(alone[None], sampling, [generator])[0] for _ in range(30)]
        assert drawn == [step[row] for step in together]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": 2**63}],
    ids=repr,
)
def test_wrong_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected"):
        Sampling(**wrong)


SIZES = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 4,
    "micro_batch_size": 1, "train_iters": 1, "lr": 1.0, "moe_num_experts": 2,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip


def small_model(**fields):
    torch.manual_seed(0)
    return GPT(transformer_config(TrainConfig(**SIZES | fields), 32)).eval()


def first(steps, count=10**6):
    """The tokens of the first steps."""
    taken = zip(range(count), steps, strict=False)
    return [[None if drawn is None else drawn.token for drawn in step] for _, step in taken]


def test_greedy_tokens_are_the_likeliest_and_padding_is_never_chosen():
    model = small_model()
    with torch.no_grad():
        model.embedding.tokens.weight[20:] *= 100  # the padded rows would win
    stream = continue_tokens(model, [[3, 1]], Sampling(temperature=0), vocab_size=20, context=4)
    tokens = [3, 1]
    for (token,) in first(stream, 6):
        logits = model.logits(torch.tensor([tokens[-4:]]))[0, -1, :20]
        assert token == logits.argmax()
        tokens.append(token)


def test_attention_of_any_length_needs_no_plan(monkeypatch):
    """And what a caller computes between two tokens may be cuDNN's again."""
    allowed = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(*args, **options):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    stream = continue_tokens(small_model(), [[3, 1]], Sampling(), vocab_size=20, context=4)
    for _ in range(6):  # from the cache, and beyond the context
        next(stream)
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert allowed == [False] * 6


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_prompt_does_not_depend_on_its_neighbours(positions):
    model = small_model(position_embedding_type=positions)
    prompts = [[3], [5, 6, 7, 8, 9], [1, 2]]
    options = {"vocab_size": 30, "context": 4}
    sampling = Sampling(seed=5)
    together = first(continue_tokens(model, prompts, sampling, **options), 7)
    for row, prompt in enumerate(prompts):
        alone = first(continue_tokens(model, [prompt], sampling, **options), 7)
        assert [step[row] for step in together] == [step[0] for step in alone]


def test_the_end_of_a_document_ends_its_prompt_alone():
    model, prompts = small_model(), [[token] for token in range(6)]
    options = {"vocab_size": 4, "context": 4}  # few: the end comes soon
    endless = first(continue_tokens(model, prompts, Sampling(), **options), 40)
    ended = first(continue_tokens(model, prompts, Sampling(), ends=[2, 1], **options))
    for row in range(len(prompts)):
        tokens = [step[row] for step in endless]
        until = tokens[: min(tokens.index(end) for end in (2, 1)) + 1]
        assert [step[row] for step in ended if step[row] is not None] == until


KINDS = {
    "gpt2": {"moe_num_experts": None},
    "dmoe": {},
    "qwen3": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "moe_top_k": 2,
        "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 16,
    },
    "olmoe": {
        "position_embedding_type": "rope", "qk_layernorm": True, "qk_layernorm_over": "width",
        "moe_renormalize": True, "moe_top_k": 2,
    },
    "dbrx": {
        "position_embedding_type": "rope", "normalization": "LayerNorm-without-bias",
        "swiglu": True, "group_query_attention": True, "num_query_groups": 2, "clip_qkv": 0.1,
        "moe_renormalize": True, "moe_top_k": 2, "add_bias_linear": False,
    },
    "deepseek": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4, "v_head_dim": 14, "qk_layernorm": True, "moe_first_k_dense": 1,
        "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16,
        "mscale_all_dim": 1.0,
    },
    "phimoe": {
        "position_embedding_type": "rope", "swiglu": True, "group_query_attention": True,
        "num_query_groups": 2, "head_bias": True, "rope_type": "longrope",
        "rotary_factors": [1.0, 1.5, 2.0, 4.0], "mscale": 1.2, "moe_router_type": "sparsemixer",
        "moe_top_k": 2,
    },
    "llama-4": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "group_query_attention": True, "num_query_groups": 2, "qk_l2_norm": True,
        "no_rope_freq": 3, "moe_layers": [0, 1, 0], "moe_router_score_function": "sigmoid",
        "moe_weights_on_input": True, "moe_shared_expert_intermediate_size": 16,
        "add_bias_linear": False,
    },
    "trinity": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True,
        "norm_placement": "both", "attention_output_gate": True, "window_size": 8,
        "window_attn_skip_freq": 2, "no_rope_freq": 2,
    },
    "turns-of-two-kinds": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True,
        "qk_layernorm_over": "turned-head", "window_size": 8, "window_attn_skip_freq": 2,
        "rotary_base_local": 20.0,
    },
    "qwen3-next": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True,
        "attention_output_gate": True, "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    },
    "granite": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0,
        "attention_scale": 0.7, "moe_top_k": 2, "moe_renormalize": True,
    },
    "granite-4": {
        "position_embedding_type": "none", "normalization": "RMSNorm", "swiglu": True,
        "num_layers": 5, "hybrid_layer_pattern": "ME*-M", "mamba_head_dim": 8,
        "mamba_num_groups": 2, "mamba_state_dim": 6, "residual_multiplier": 0.3,
    },
    "lfm2": {
        "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
        "num_layers": 6, "hybrid_layer_pattern": "S-*ESE", "qk_layernorm": True,
    },
    "after-norm": {"apply_residual_connection_post_layernorm": True},
    "norms of outputs": {"norm_placement": "output"},
    "norms in both places": {"norm_placement": "both"},
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_from_the_cache_are_those_of_the_whole_text(kind):
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 80}
    model = small_model(**sizes | {"moe_num_experts": 4} | KINDS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(32, (n,), generator=generator).tolist() for n in (70, 1, 9, 66)]
    cache, done, before = KVCache(4, torch.device("cpu")), [0, 0, 0, 0], [0, 1, 2, 3]
    # What it holds grows beyond 64 places; rows end.
    for new in ([30, 1, 4, 30], [38, 0, 5, 36], [1, 0, 0, 0], [1, 0, 0, 0]):
        here = [row for row in before if new[row]]
        cache.keep(torch.tensor([place for place, row in enumerate(before) if new[row]]))
        before = here
        parts = [rows[row][done[row] : done[row] + new[row]] for row in here]
        counts = torch.tensor([len(part) for part in parts])
        padded = torch.tensor([part + [7] * (int(counts.max()) - len(part)) for part in parts])
        with torch.no_grad():
            cache.reserve(padded.shape[1])
            got_BV = model.go_on(padded, counts, cache)
        for row, got_V in zip(here, got_BV, strict=True):
            done[row] += new[row]
            with torch.no_grad():
                expected_V = model.logits(torch.tensor([rows[row][: done[row]]]))[0, -1]
            torch.testing.assert_close(got_V, expected_V, rtol=1e-4, atol=1e-4)
    assert done == [70, 1, 9, 66]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "deepseek", "qwen3-next"])
def test_the_cache_changes_no_token(kind):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 12}
    model = small_model(**sizes | {"moe_num_experts": 4} | KINDS[kind])
    prompts = [[3], [5, 6, 7, 8, 9], [1, 2]]
    ended = 0
    for seed in range(3):  # beyond the context, and with rows that end
        options = {"vocab_size": 30, "context": 12, "ends": range(0, 30, 5) if seed else [4]}
        options["seeds"] = range(seed, seed + 3)  # of one seed they would end together
        how = Sampling(seed=seed, temperature=2.0)
        plain = first(continue_tokens(model, prompts, how, **options, cached=False), 20)
        assert first(continue_tokens(model, prompts, how, **options), 20) == plain
        ended += sum(None in step for step in plain[:7])
    assert ended  # while the others go on from the cache


PROMPTS = [[3], [5, 6, 7, 8, 9], [1, 2]]


def scores_of_steps(model, ends=()):
    """Of up to 70 greedy tokens, beyond a cache's first room."""
    how = {"vocab_size": 30, "context": 96, "ends": ends}
    steps = continue_tokens(model, PROMPTS, Sampling(temperature=0), **how)
    taken = [step for _, step in zip(range(70), steps, strict=False)]
    return [[None if one is None else one.logits_V for one in step] for step in taken]


def small_model_of(kind):
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 96}
    return small_model(**sizes | {"moe_num_experts": 4} | KINDS[kind])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "deepseek", "phimoe", "qwen3-next", "granite-4"])
def test_passes_that_would_be_replayed_are_the_same(kind, monkeypatch):
    """Where there are no graphs, what one would hold is computed when it would be replayed."""
    model, captures = small_model_of(kind), []

    def captured(run):
        captures.append(run)
        return run

    for ends in ((), range(9, 21, 3)):
        plain = scores_of_steps(model, ends)
        captures.clear()
        with monkeypatch.context() as patched:
            patched.setattr(going_on, "can_be_captured", lambda *_: True)
            patched.setattr(going_on, "captured", captured)
            again = scores_of_steps(model, ends)
        for step, other in zip(plain, again, strict=True):
            assert [one is None for one in step] == [one is None for one in other]
            for scores_V, same_V in zip(step, other, strict=True):
                assert scores_V is None or torch.equal(scores_V, same_V)
        # One for the first 64 places, one beyond; fewer rows have one of their own.
        assert len(captures) == 2 if not ends else captures


def test_what_cannot_be_captured_is_launched(monkeypatch):
    model, tried = small_model_of("dmoe"), []

    def captured(run):
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = scores_of_steps(model)
    monkeypatch.setattr(going_on, "can_be_captured", lambda *_: True)
    monkeypatch.setattr(going_on, "captured", captured)
    with pytest.warns(UserWarning, match="kernel by kernel, which is slower: operation not"):
        again = scores_of_steps(model)
    assert len(tried) == 1
    for step, other in zip(plain, again, strict=True):
        assert torch.equal(torch.stack(step), torch.stack(other))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [*KINDS, "fp32 residual", "biases"])
def test_weights_held_as_they_are_used_give_the_same_scores(kind):
    """To the bit, in the dtype that they are cast to before each use."""
    more = {
        "fp32 residual": {"fp32_residual_connection": True},
        "biases": {"moe_mlp_bias": True},
    }
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24}
    fields = sizes | {"moe_num_experts": 4} | (KINDS | more)[kind]
    model = small_model(**fields)
    model = GPT(model.config, compute_dtype=torch.bfloat16).eval()
    tokens_BS = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0))
    with unfilled():
        held = GPT(model.config, compute_dtype=torch.bfloat16).eval()
    hold_as_used(held, torch.bfloat16)
    held.to_empty(device="cpu").load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(held.logits(tokens_BS), model.logits(tokens_BS))
    halves = {name for name, p in held.named_parameters() if p.dtype == torch.bfloat16}
    of_experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert halves > of_experts
    assert not any("router" in name or "norm" in name for name in halves)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_passes_are_the_same(kind, dtype, monkeypatch):
    model = small_model_of(kind)
    model = GPT(model.config, compute_dtype=dtype).eval().cuda()
    replayed = scores_of_steps(model)
    assert going_on.can_be_captured(model, torch.device("cuda"))
    monkeypatch.setattr(going_on, "can_be_captured", lambda *_: False)
    for step, other in zip(replayed, scores_of_steps(model), strict=True):
        torch.testing.assert_close(torch.stack(step), torch.stack(other), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [torch.cuda.synchronize, lambda: torch.ones(1).cuda().item()])
def test_a_pass_that_waits_for_the_gpu_is_launched(waits, monkeypatch):
    """What was captured of it is let go: the same scores, and later captures succeed."""
    model = small_model_of("dmoe").cuda()
    plain, go_on = scores_of_steps(model), model.go_on

    def waiting(*arguments):
        waits()
        return go_on(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(model, "go_on", waiting)
        with pytest.warns(UserWarning, match="kernel by kernel, which is slower"):
            again = scores_of_steps(model)
    for scores in (again, scores_of_steps(model)):
        for step, other in zip(plain, scores, strict=True):
            torch.testing.assert_close(torch.stack(step), torch.stack(other), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_threads_write_what_each_would_alone():
    """Each of them captures its own passes, while others launch, draw and replay theirs."""
    model = small_model_of("dmoe").cuda()

    def tokens(seed):
        sampling = Sampling(top_k=5, seed=seed)
        steps = continue_tokens(model, [[1, 2], [3]], sampling, vocab_size=30, context=90)
        return [[one.token for one in step] for step in itertools.islice(steps, 60)]

    alone = [tokens(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as threads, warnings.catch_warnings(action="error"):
        assert list(threads.map(tokens, range(12))) == alone


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("generate")
    with mb_data.IndexedDatasetBuilder(folder / "text", np.uint16) as builder:
        for document in np.random.default_rng(0).integers(50256, size=(40, 200)):
            builder.add_document(document.astype(np.uint16))
    arguments = "--train-iters 2 --eval-iters 0 --hidden-size 32 --ffn-hidden-size 32 --device cpu"
    data = ["--data-path", str(folder / "text"), "--save", str(folder / "run")]
    assert main(["--recipe", "quickstart", *data, *arguments.split()]) == 0
    return folder / "run"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_are_read_as_they_are_held(run, device):
    """Rounded on the way, so that there never is more of them than that."""
    plain, held = (
        load_trained(run, device, torch.bfloat16, held_as_used=how).model for how in (False, True)
    )
    hold_as_used(plain, torch.bfloat16)
    want, got = plain.state_dict(), held.state_dict()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert {tensor.dtype for tensor in got.values()} == {torch.float32, torch.bfloat16}


def test_text_from_a_run(run, capsys):
    words = ["generate", str(run), "--prompt", "def f(", "--max-new-tokens", "5", "--device", "cpu"]
    capsys.readouterr()
    assert main([*words, "--top-k", "5", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def f(")
    assert len(first) > len("def f(")
    assert main([*words, "--top-k", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


def test_text_moves_no_random_numbers_of_the_callers(run):
    before = torch.get_rng_state()
    generator = Generator.of_run(run, "cpu")
    generator.complete(["def f("], Sampling(top_k=5), max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_prompts_go_on_together_unless_one_takes_the_others_places(run, capacity):
    trained = load_trained(run, "cpu")
    config = replace(trained.config, moe_capacity_factor=capacity)
    generator = Generator(replace(trained, config=config))
    steps = generator.stream([[0, 7], "a"], Sampling(), max_new_tokens=2, likeliest=1)
    told = list(steps)  # what was told is no longer changed
    lengths = [[(len(one.tokens), len(one.likelihoods)) for one in step] for step in told]
    together, apart = [(1, 1), (2, 2)], [[(1, 1), (0, 0)], [(2, 2), (0, 0)]]
    expected = [[n, n] for n in together]
    if capacity:
        expected = apart + [[(2, 2), n] for n in together]
    assert lengths == expected


def test_several_prompts_print_what_each_would(run, capsys):
    words = ["--max-new-tokens", "4", "--device", "cpu", "--seed", "2"]
    alone = []
    for prompt in ("def f(", "x"):
        capsys.readouterr()
        assert main(["generate", str(run), "--prompt", prompt, *words]) == 0
        alone.append(capsys.readouterr().out)
    assert main(["generate", str(run), "--prompt", "def f(", "--prompt", "x", *words]) == 0
    assert capsys.readouterr().out == f"{alone[0]}\n{alone[1]}\n"


def test_words_stand_anywhere_among_the_flags(run, tmp_path, capsys):
    file, how = tmp_path / "text", ["--task", "perplexity", "--device", "cpu"]
    file.write_text("one two three")
    told = set()
    capsys.readouterr()
    for words in ([run, file, *how], [run, *how, file], [*how, run, "--stride", 3, file]):
        assert main(["eval", *map(str, words)]) == 0
        told.add(capsys.readouterr().out.splitlines()[-1])
    (line,) = told
    assert json.loads(line)["loss"] == pytest.approx(math.log(50257), abs=1)


class Letters:
    """A tokenizer of letters; 31 ends a document."""

    eod, vocab_size, prepend_bos = 31, 32, False

    def encode(self, text):
        return [ord(letter) - 96 for letter in text]

    def decode(self, tokens):
        return "".join(chr(token + 96) for token in tokens)


@pytest.fixture
def spelling(monkeypatch):
    """A generator that goes on through the alphabet, and ends a document after "z"."""
    import mb_train.inference.generate as module

    config = TrainConfig(**SIZES)
    checkpoint = Path("run") / "iter_0000001"
    generator = Generator(
        SimpleNamespace(model=None, tokenizer=Letters(), config=config, checkpoint=checkpoint)
    )

    def alphabet(model, prompts, sampling, *, ends, **_):
        (eod,) = ends
        last = [prompt[-1] for prompt in prompts]
        while any(token is not None for token in last):
            last = [
                None if token in (None, eod) else token + 1 if token < 26 else eod for token in last
            ]
            yield [None if token is None else Next(token, None) for token in last]

    monkeypatch.setattr(module, "continue_tokens", alphabet)
    return generator


def test_why_a_completion_ends(spelling):
    with pytest.raises(ValueError, match="--max-new-tokens of at least 0, got -1"):
        spelling.complete(["a"], Sampling(), max_new_tokens=-1)
    ends = spelling.complete(["a", "x"], Sampling(), max_new_tokens=4)
    assert [(c.text, c.finish_reason) for c in ends] == [("bcde", "length"), ("yz", "stop")]
    ends = spelling.complete(["a", "c"], Sampling(), max_new_tokens=9, stop=["ef", "k"])
    assert [(c.text, c.finish_reason) for c in ends] == [("bcd", "stop"), ("d", "stop")]


def test_what_may_begin_a_stop_word_is_held_back(spelling):
    steps = spelling.stream(["a"], Sampling(), max_new_tokens=5, stop=["cdx", "dez"])
    kept = [step[0] for step in steps]
    assert [completion.text for completion in kept] == ["b", "b", "b", "bc", "bcdef"]
    assert [len(completion.tokens) for completion in kept] == [1, 2, 3, 4, 5]


def test_the_space_behind_a_prompt_is_said(spelling):
    """A decoder of words says none before the first that it gets."""
    spelling.tokenizer = mb_data.load_tokenizer("null:31")
    spelling.ends = frozenset([spelling.tokenizer.eod])
    prompts, stop = ["7", "9 2", "24"], [" 6"]
    found = spelling.complete(prompts, Sampling(), max_new_tokens=9, stop=stop)
    assert [c.text for c in found] == [" 8 9 10 11 12 13 14 15 16", " 3 4 5", " 25 26"]


def test_a_character_that_a_prompt_begins_is_said_whole():
    tokenizer = mb_data.load_tokenizer("gpt2")
    ids = tokenizer.encode("a\N{SNOWMAN}\N{SNOWMAN}b")
    texts = [text_behind(tokenizer, ids[:cut], ids[cut:]) for cut in range(len(ids) + 1)]
    assert [text.count("\N{SNOWMAN}") for text in texts] == [2, 2, 2, 1, 1, 0, 0]
    assert all(text in ("", "b") or text.startswith("\N{SNOWMAN}") for text in texts[1:])


def test_a_prompt_beyond_the_context_is_told(run, capsys):
    words = ["generate", str(run), "--max-new-tokens", "1", "--prompt", " a" * 65]
    with pytest.warns(UserWarning, match="has 65 tokens, of which the model sees the last 64, its"):
        assert main(words) == 0
    capsys.readouterr()
    with warnings.catch_warnings(action="error"):
        assert main([*words[:-1], " a" * 64]) == 0


def test_wrong_input_is_one_line(run, tmp_path, capsys):
    capsys.readouterr()
    for words, says in (
        ([str(tmp_path)], "Expected a checkpoint in"),
        ([str(run), "--top-p", "2"], "Expected top-p in (0, 1], got 2.0"),
        ([str(run), "--tpo-k", "2"], "Unknown argument --tpo-k. The nearest is --top-k."),
        ([str(run), "--max-tokens=2"], "Unknown argument --max-tokens. The nearest is --max-new-"),
        ([str(run), "more"], "Unknown argument more. A text to continue stands behind --prompt."),
        ([str(run), ""], "Unknown argument ''. A text to continue stands"),
        ([str(run), "--max-new-tokens", "-1"], "--max-new-tokens of at least 0, got -1"),
        ([str(run), "--prompt", "a\udcff"], "a text of valid Unicode, got '\\udcff' in it"),
        ([str(run), "--temp", "2"], "Unknown argument --temp. The nearest is --temperature."),
    ):
        assert main(["generate", "--prompt", "a", *words]) == 2
        said = capsys.readouterr()
        assert says in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""
