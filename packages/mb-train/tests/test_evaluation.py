"""Zero-shot tasks against a slow reference: one token at a time, the whole context each time."""

import fnmatch
import json
import math
import os
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.inference.evaluation import EvalOptions, detokenized, task_of
from mb_train.inference.harness import harness_model, tasks_of
from mb_train.inference.scoring import Window, continuation, rolling, score
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

CONTEXT = 8


class Words:
    """A tokenizer of words: each a number by its letters; a space before changes it."""

    eod, prepend_bos = 0, False

    def encode(self, text):
        return [1 + sum(map(ord, piece)) % 30 for piece in text.split()]


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    config = TrainConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=CONTEXT, micro_batch_size=1,
        train_iters=1, lr=1.0, init_method_std=0.5, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    model = GPT(transformer_config(config, 32)).eval()
    return SimpleNamespace(model=model, config=config, tokenizer=Words())


def log_prob(trained, before, token):
    with torch.no_grad():
        logits = trained.model.logits(torch.tensor([before[-CONTEXT:]]))[0, -1]
    return float(logits.double().log_softmax(0)[token]), int(logits.argmax()) == token


def test_windows_score_every_token_but_the_first_once():
    for length in range(30):
        tokens = list(range(100, 100 + length))
        for stride in range(1, CONTEXT + 1):
            windows = rolling(tokens, CONTEXT, stride)
            assert all(len(w.tokens) <= CONTEXT + 1 and w.scored >= 1 for w in windows)
            assert [t for w in windows for t in w.tokens[-w.scored :]] == tokens[1:]
            assert all(w.scored <= stride for w in windows[1:])
    for wrong in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match="Expected a stride of 1 to"):
            rolling([1, 2], CONTEXT, wrong)


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_scores_are_those_of_one_token_at_a_time(trained, batch_size):
    generator = torch.Generator().manual_seed(3)
    windows = []
    for length in (2, 9, 5, 9, 3, 7):
        tokens = torch.randint(0, 32, (length,), generator=generator).tolist()
        windows.append(Window(tokens, min(length - 1, 3)))
    greedy = list(windows[1].tokens[:4])
    for _ in range(2):  # one that greedy decoding gives
        greedy.append(int(trained.model.logits(torch.tensor([greedy]))[0, -1].argmax()))
    windows.append(Window(greedy, 2))
    found = score(trained.model, windows, batch_size=batch_size)
    for window, one in zip(windows, found, strict=True):
        steps = [
            log_prob(trained, window.tokens[:at], window.tokens[at])
            for at in range(len(window.tokens) - window.scored, len(window.tokens))
        ]
        assert one.log_prob == pytest.approx(sum(p for p, _ in steps), abs=1e-4)
        assert one.greedy == all(hit for _, hit in steps)
    assert found[-1].greedy


def test_experts_with_a_capacity_see_one_window_at_a_time():
    torch.manual_seed(0)
    config = TrainConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=CONTEXT, micro_batch_size=1,
        train_iters=1, lr=1.0, init_method_std=0.5, attention_dropout=0.0, hidden_dropout=0.0,
        moe_num_experts=4, moe_capacity_factor=1,
    )  # fmt: skip
    model = GPT(transformer_config(config, 32)).eval()
    windows = [Window(torch.randint(1, 32, (length,)).tolist(), 2) for length in (9, 5, 3, 7)]
    alone = [score(model, [window], batch_size=1)[0] for window in windows]
    assert score(model, windows, batch_size=4) == alone


def test_a_continuation_keeps_what_fits_before_it():
    assert continuation(range(20), [5, 6], CONTEXT) == Window([*range(13, 20), 5, 6], 2)
    assert continuation([1], [5], CONTEXT) == Window([1, 5], 1)
    for before, tokens in (([], [1]), ([1], []), ([1], range(9))):
        with pytest.raises(ValueError, match="Expected"):
            continuation(before, tokens, CONTEXT)


def lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("strict", [False, True])
def test_lambada_counts_last_words_that_are_right(trained, tmp_path, strict):
    letters = [chr(letter) for letter in range(97, 122)]
    words = {Words().encode(letter)[0]: letter for letter in letters}
    texts = ["a b c d e", "x y", " ".join("abcdefghijk")]
    for start in ("b c", "m n o"):  # go on with what the model thinks, if a word of ours says it
        likeliest = int(trained.model.logits(torch.tensor([Words().encode(start)]))[0, -1].argmax())
        texts.append(f"{start} {words.get(likeliest, 'q')}")
    right = 0
    for text in texts:
        *before, last = Words().encode(text)
        right += log_prob(trained, before, last)[1]
    path = lines(tmp_path / "lambada.jsonl", *texts)
    found = task_of("lambada")(trained, path, EvalOptions(strict=strict, batch_size=2))
    assert found["correct"] == right >= 1
    assert found["accuracy"] == right / len(texts)
    assert found["examples"] == len(texts)


class Spaced(Words):
    """Puts a space before a text, as SentencePiece does, and has a token for a space alone."""

    def encode(self, text):
        return [1 + len(piece) % 30 for piece in f" {text}".split(" ")[1:]]


def test_a_last_word_is_encoded_as_it_stands_in_its_text(trained, tmp_path):
    spaced = SimpleNamespace(**vars(trained) | {"tokenizer": Spaced()})
    path = lines(tmp_path / "lambada.jsonl", "abc de fghi")
    found = [task_of("lambada")(spaced, path, EvalOptions(strict=strict)) for strict in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["loss"] == pytest.approx(-log_prob(trained, [4, 3], 5)[0], abs=1e-5)


def test_a_strict_last_word_is_all_of_its_tokens(trained, tmp_path):
    letters = SimpleNamespace(encode=lambda text: [ord(c) % 31 for c in text], prepend_bos=False)
    model = SimpleNamespace(**vars(trained) | {"tokenizer": letters})
    path = lines(tmp_path / "lambada.jsonl", "ab cd", "fg  h ")
    words = [(letters.encode("ab"), letters.encode(" cd")), (letters.encode("fg"), [1, 11])]
    total = 0.0
    for before, tokens in words:
        for token in tokens:
            total -= log_prob(trained, before, token)[0]
            before = [*before, token]
    found = task_of("lambada")(model, path, EvalOptions(strict=True))
    assert found["loss"] == pytest.approx(total / 5, abs=1e-5)
    path = lines(path, "ab cd", "fgh")
    total = -sum(
        log_prob(trained, letters.encode(before), letters.encode(last)[0])[0]
        for before, last in (("ab c", "d"), ("fg", "h"))
    )
    found = task_of("lambada")(model, path, EvalOptions())
    assert found["loss"] == pytest.approx(total / 2, abs=1e-5)
    for text, encode in (("alone", letters.encode), ("two words", lambda _: [])):
        path.write_text(text)
        model.tokenizer = SimpleNamespace(encode=encode, prepend_bos=False)
        with pytest.raises(ValueError, match=r"two words and two tokens in .*, got fewer"):
            task_of("wikitext")(model, path, EvalOptions())


def test_texts_begin_as_documents_do(trained, tmp_path, harness):
    begun = Words()
    begun.prepend_bos, begun.bos = True, 29
    model = SimpleNamespace(**vars(trained) | {"tokenizer": begun})
    path = lines(tmp_path / "text.jsonl", "a b", "x")
    total = sum(
        log_prob(trained, [29, *Words().encode(before)], Words().encode(token)[0])[0]
        for before, token in (("", "a"), ("a", "b"), ("", "x"))
    )
    found = task_of("perplexity")(model, path, EvalOptions())
    assert (found["loss"], found["tokens"]) == (pytest.approx(-total / 3, abs=1e-5), 3)
    path = lines(tmp_path / "lambada.jsonl", "a b")
    expected = pytest.approx(
        -log_prob(trained, [29, *Words().encode("a")], Words().encode("b")[0])[0]
    )
    for strict in (False, True):
        assert task_of("lambada")(model, path, EvalOptions(strict=strict))["loss"] == expected
    (tmp_path / "wiki.txt").write_text("a b")
    assert task_of("wikitext")(model, tmp_path / "wiki.txt", EvalOptions())["tokens"] == 3
    asked = harness_model(model)
    (rolled,) = asked.loglikelihood_rolling([SimpleNamespace(args=("a b",))])
    pairs = [SimpleNamespace(args=pair) for pair in (("", "a"), ("a", " b"))]
    parts = [found for found, _ in asked.loglikelihood(pairs)]
    assert rolled == pytest.approx(sum(parts), abs=1e-5)
    assert parts[1] == pytest.approx(
        log_prob(trained, [29, *Words().encode("a")], Words().encode("b")[0])[0], abs=1e-5
    )


def test_wikitext_by_megatrons_formula(trained, tmp_path):
    text = " = A heading = \n some words , and more words @-@ of it . \n the end " * 4
    path = tmp_path / "wiki.test.tokens"
    path.write_text(text)
    tokens = Words().encode(detokenized(text))
    loss = -log_prob(trained, tokens[:1], tokens[1])[0]
    for at in range(2, len(tokens)):  # windows move by 1: each token sees all that fits
        loss -= log_prob(trained, tokens[max(0, at - CONTEXT) : at], tokens[at])[0]
    found = task_of("wikitext")(trained, path, EvalOptions(stride=1))
    mean = loss / (len(tokens) - 1)
    words = len(text.strip().split(" "))
    assert found["loss"] == pytest.approx(mean, abs=1e-4)
    assert found["ppl"] == pytest.approx(math.exp(mean), rel=1e-3)
    adjusted = math.exp(loss / (words - 1))
    assert found["adjusted_ppl"] == pytest.approx(adjusted, rel=1e-3)


def test_words_are_joined_again():
    cut = ' = = Title = = \n He ( a " b @-@ c " ) had 3 @,@ 000 of it , it \'s 5 @.@ 2 ; yes . \n'
    whole = ' == Title ==\nHe (a "b-c") had 3,000 of it, it\'s 5.2; yes.\n'
    assert detokenized(cut) == whole
    # As Megatron-LM's replacements leave it, one after the other.
    cut = " King , Jr . , said ? ! ( ) . ; ' so ' ( [ a ] ( b ) ) \n = = = = = A \n . . . 5 \xb0 C "
    whole = " King, Jr., said ?! () .;'so' ([a] ( b) )\n===== A\n. .. 5\xb0C "
    assert detokenized(cut) == whole
    cut = "( a ) \n = = = = B = = = = \n = = = C = = = \n"
    assert detokenized(cut) == "(a)\n==== B ====\n=== C ===\n"


def test_perplexity_of_texts_each_for_itself(trained, tmp_path):
    texts = ["a b c d e f g h i j k", "one", "x y"]
    total, scored = 0.0, 0
    for text in texts:
        tokens = [Words().eod, *Words().encode(text)]  # behind the end of another, as in training
        for at in range(1, len(tokens)):
            total -= log_prob(trained, tokens[max(0, at - CONTEXT) : at], tokens[at])[0]
            scored += 1
    path = lines(tmp_path / "texts.jsonl", *texts)
    found = task_of("perplexity")(trained, path, EvalOptions(stride=1))
    assert found["loss"] == pytest.approx(total / scored, abs=1e-4)
    size = sum(map(len, texts))
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, abs=1e-4)
    assert (found["tokens"], found["bytes"]) == (scored, size)
    plain = tmp_path / "text.txt"
    plain.write_text(texts[0])
    first = task_of("perplexity")(trained, lines(tmp_path / "one.jsonl", texts[0]), EvalOptions())
    assert task_of("perplexity")(trained, plain, EvalOptions()) == first
    plain.write_text(texts[0], encoding="utf-8-sig")  # with a mark before it
    assert task_of("perplexity")(trained, plain, EvalOptions()) == first
    plain.write_bytes(b"a b\r\n\rc\r\n")  # ends of lines are part of a text
    assert task_of("perplexity")(trained, plain, EvalOptions())["bytes"] == 9
    path = lines(tmp_path / "empty.jsonl", "", texts[0], " ")
    assert task_of("perplexity")(trained, path, EvalOptions()) == first
    for name in ("one.ndjson", "one.JSONL"):  # what preprocessing takes for JSON Lines
        path = lines(tmp_path / name, texts[0])
        assert task_of("perplexity")(trained, path, EvalOptions()) == first


def test_wrong_input_is_said(trained, tmp_path):
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"text": "a b"}\n{"words": 3}\n')
    with pytest.raises(ValueError, match=r'line 2: expected JSON with a "text"'):
        task_of("lambada")(trained, path, EvalOptions())
    for wrong in ('{"text": "a \\ud800 b"}\n', "[" * 10**5):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r'line 1: expected JSON with a "text"'):
            task_of("perplexity")(trained, path, EvalOptions())
    path.write_bytes(b"a b \xff")
    for task in ("lambada", "wikitext", "perplexity"):
        with pytest.raises(ValueError, match=r"wrong\.jsonl to be text in UTF-8"):
            task_of(task)(trained, path, EvalOptions())
    without = SimpleNamespace(
        **vars(trained) | {"tokenizer": SimpleNamespace(encode=lambda _: [], prepend_bos=False)}
    )
    for model, text in ((trained, "alone"), (without, "what a vocabulary leaves out")):
        with pytest.raises(ValueError, match="line 1: expected a word and text before it"):
            task_of("lambada")(model, lines(path, text), EvalOptions())
    for encode, said in (
        (lambda text: [1] * len(text), f"of at most {CONTEXT} tokens, the model's context, got 14"),
        (lambda text: [1], "and text before it"),  # a last word of which nothing is left
    ):
        letters = SimpleNamespace(
            **vars(trained) | {"tokenizer": SimpleNamespace(encode=encode, prepend_bos=False)}
        )
        path.write_text('\n{"text": "a bbbbbbbbbbbbb"}\n')
        with pytest.raises(ValueError, match=f"line 2: expected a .*word .*{said}"):
            task_of("lambada")(letters, path, EvalOptions(strict=True))
    with pytest.raises(ValueError, match="Expected a task of lambada, wikitext, perplexity"):
        task_of("hellaswag")
    with pytest.raises(ValueError, match="Expected a batch of at least 1, got 0"):
        EvalOptions(batch_size=0)
    path.write_text("")
    for task in ("lambada", "wikitext", "perplexity"):
        with pytest.raises(ValueError, match=r"holds no text|at least two"):
            task_of(task)(trained, path, EvalOptions())


def test_a_model_that_has_diverged_is_said(trained, tmp_path):
    model = GPT(trained.model.config).eval()
    with torch.no_grad():
        model.stack.norm.weight.fill_(torch.nan)
    broken = SimpleNamespace(model=model, config=trained.config, tokenizer=Words())
    with pytest.raises(ValueError, match="not numbers"):
        task_of("lambada")(broken, lines(tmp_path / "a.jsonl", "a b"), EvalOptions())
    # Of one text among several, too: here that which reaches a place without a number.
    model.load_state_dict(trained.model.state_dict())
    with torch.no_grad():
        model.embedding.positions.weight[2].fill_(torch.nan)
    with pytest.raises(ValueError, match="not numbers"):
        score(model, [Window([1, 2], 1), Window([1, 2, 3, 4], 1)], batch_size=1)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--strict"], "--strict with --task perplexity"),
        (["--task", "lambada", "--stride", "8"], "--stride with --task lambada"),
        (["--task", "wikitext", "--include", "."], "--include with --task wikitext"),
        (["--task", "lm_eval:mine", "--stride", "8"], "file with --task lm_eval:mine"),
    ],
)
def test_what_has_no_effect_on_a_task_is_refused(words, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mb_train.inference.harness.tasks_of", lambda names, include: print)
    path = lines(tmp_path / "text.jsonl", "a b")
    assert main(["eval", str(tmp_path), str(path), *words]) == 2
    assert f"Expected no {flag}, on which it has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["hellaswag", "lm_eval:hellaswag", "lambada", "lambada no-file"])
def test_a_task_is_judged_before_the_model_is_read(task, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    assert main(["eval", "no such run", "--task", *task.split()]) == 2
    assert "no such run" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="has no such pipes")
def test_a_pipe_is_opened_once(trained, tmp_path, monkeypatch, capsys):
    pipe, opened, open_path = tmp_path / "pipe", [], Path.open
    os.mkfifo(pipe)

    def once(path, *how, **more):
        assert path not in opened, "what was in it is lost, and nobody writes into it any more"
        opened.append(path)
        return open_path(path, *how, **more)

    def write():
        with open(pipe, "w") as file:
            file.write("a b c d e f")

    found = SimpleNamespace(**vars(trained), saved=SimpleNamespace(iteration=3))
    monkeypatch.setattr("mb_train.loading.load_trained", lambda *_, **how: found)
    monkeypatch.setattr(Path, "open", once)
    threading.Thread(target=write, daemon=True).start()
    assert main(["eval", "run", str(pipe), "--task", "wikitext"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["original_tokens"] == 6


@pytest.fixture
def harness(monkeypatch):
    """The one class of lm_eval that is subclassed, as it is there."""
    module = types.ModuleType("lm_eval.api.model")
    module.LM = type("LM", (), {"__init__": lambda self: None})
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)


def test_the_harness_gets_its_log_likelihoods(trained, harness):
    model = harness_model(trained, batch_size=2)
    pairs = [("a b", " c d"), ("", "x y"), ("m n ", "o")]
    found = model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    for (before, after), (total, greedy) in zip(pairs, found, strict=True):
        tokens = Words().encode(before) or [0]
        expected = []
        for token in Words().encode(after):
            expected.append(log_prob(trained, tokens, token))
            tokens.append(token)
        assert total == pytest.approx(sum(p for p, _ in expected), abs=1e-4)
        assert greedy == all(hit for _, hit in expected)
    (rolled,) = model.loglikelihood_rolling([SimpleNamespace(args=("x y",))])
    assert rolled == pytest.approx(found[1][0], abs=1e-4)
    long = " ".join("abcdefghijkl")  # of which the model sees the end
    ((total, _),) = model.loglikelihood([SimpleNamespace(args=("m", f" {long}"))])
    window = Words().encode(long)[-CONTEXT - 1 :]
    expected = [log_prob(trained, window[:at], window[at])[0] for at in range(1, len(window))]
    assert total == pytest.approx(sum(expected), abs=1e-4)


def test_the_harness_gets_the_continuations_that_a_task_describes(trained, harness):
    """Many tokens, drawn or not, and another draw each time that the same is asked for."""
    decode = {"decode": lambda _, tokens: "".join(chr(64 + token) for token in tokens)}
    words = type("Letters", (Words,), decode | {"vocab_size": 32})()
    run = {"tokenizer": words, "checkpoint": Path("run/iter_1")}
    model = harness_model(SimpleNamespace(**vars(trained) | run))

    def asked(times=1, **options):
        requests = [SimpleNamespace(args=("a b", {"until": [], **options}))] * times
        return model.generate_until(requests)

    (greedy,) = asked(max_gen_toks=6)
    for length in ("max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert asked(2, **{length: 6}, do_sample=False, temperature=0.7) == [greedy, greedy]
    short = greedy[: greedy.index(greedy[3])]
    for until in (greedy[3], ["no such", greedy[3]]):
        assert asked(max_gen_toks=6, until=until) == [short]
    assert asked(max_gen_toks=6, until=["", greedy[3]]) == [short]  # an empty one ends nothing
    drawn = asked(8, max_gen_toks=6, do_sample=True, temperature=2.0)
    assert len(set(drawn)) > 4
    assert drawn == asked(8, max_gen_toks=6, temperature=2.0, num_beams=1)
    for alone in ({"top_k": 1}, {"top_p": 1e-9}):
        assert asked(3, max_gen_toks=6, do_sample=True, temperature=2.0, **alone) == [greedy] * 3
    with pytest.raises(ValueError, match=r"Expected generation_kwargs of until, .* got num_beams"):
        asked(num_beams=4)


def test_a_pattern_is_all_tasks_that_it_matches(trained, harness, monkeypatch):
    class TaskManager:
        def __init__(self, include_path):
            pass

        def match_tasks(self, names):
            return [task for name in names for task in fnmatch.filter(["arc_a", "arc_b"], name)]

    def simple_evaluate(model, tasks, task_manager):
        return {"results": {task: {"acc,none": 0.5} for task in tasks}}

    modules = {"lm_eval": simple_evaluate, "lm_eval.tasks": TaskManager}
    for name, attribute in modules.items():
        module = types.ModuleType(name)
        setattr(module, attribute.__name__, attribute)
        monkeypatch.setitem(sys.modules, name, module)
    measured = tasks_of(["arc_*"])(trained, batch_size=8)
    assert measured == {"arc_a acc": 0.5, "arc_b acc": 0.5}
    with pytest.raises(ValueError, match=r"tasks that lm_eval knows, got wino\*"):
        tasks_of(["arc_*", "wino*"])


def test_the_harness_itself_runs_a_task_of_ones_own(trained, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="not installed: it brings some 40 packages")
    from mb_train.inference import harness

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [{"q": "a b", "choices": ["c d", "e"], "gold": 0}] * 3
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "mine.yaml").write_text(f"""
        task: mine
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {data}}}}}
        test_split: test
        output_type: multiple_choice
        doc_to_text: "{{{{q}}}}"
        doc_to_target: gold
        doc_to_choice: "{{{{choices}}}}"
        metric_list: [{{metric: acc}}]
    """)
    found = harness.tasks_of(["mine"], include=tmp_path)(trained, batch_size=8)
    assert found["mine acc"] in (0.0, 1.0)  # the same question three times
    with pytest.raises(ValueError, match="tasks that lm_eval knows, got nobodys"):
        harness.tasks_of(["mine", "nobodys"], include=tmp_path)


def test_without_the_harness_it_is_said(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ValueError, match="pip install lm_eval"):
        harness_model(trained)
