"""The completions interface, asked as a client would."""

import asyncio
import importlib
import json
import math
import random
import socket
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mb_data import load_tokenizer
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.inference.completions import Answer, Request, Told
from mb_train.inference.decoding import Likelihood, Sampling
from mb_train.inference.generate import Completion, Generator
from mb_train.inference.service import Service

pytest.importorskip("httpx")
testclient = pytest.importorskip("starlette.testclient")
pytest.importorskip("uvicorn")
served = importlib.import_module("mb_train.inference.serve")
application, serve = served.application, served.serve


class Letters:
    """A token is a letter; the last one ends a document."""

    vocab_size, eod, prepend_bos = 128, 127, False

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))


class Alphabet(torch.nn.Module):
    """Finds the next letter of the alphabet likeliest, by one in 16 of the one before."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.computes = 0

    def logits(self, tokens_BS, *, at_B=None):
        self.computes += 1
        if (tokens_BS == ord("!")).any():
            shape = tokens_BS.shape if at_B is None else at_B.shape
            return torch.full((*shape, 128), float("nan"))
        logits_BSV = torch.nn.functional.one_hot(tokens_BS + 1, 128) * 4.0
        return logits_BSV if at_B is None else logits_BSV[torch.arange(len(at_B)), at_B]


def made_of(model, tokenizer):
    """A generator that computes one prompt at a time, in a context of 16 letters."""
    config = TrainConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, seq_length=16, micro_batch_size=1,
        train_iters=1, lr=1.0, moe_num_experts=2, moe_capacity_factor=1.0,
    )  # fmt: skip
    checkpoint = Path("run") / "iter_0000001"
    return Generator(
        SimpleNamespace(model=model, tokenizer=tokenizer, config=config, checkpoint=checkpoint)
    )


@pytest.fixture(scope="module")
def generator():
    return made_of(Alphabet(), Letters())


@pytest.fixture
def client(generator):
    return testclient.TestClient(application(generator, "run"))


def ask(client, **body):
    """The choices of a greedy answer, and the answer."""
    answer = client.post("/v1/completions", json={"temperature": 0} | body).json()
    return answer["choices"], answer


def streamed(client, **body):
    """The parts of a greedy answer."""
    body = {"temperature": 0, "stream": True} | body
    response = client.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion(client):
    (choice,), answer = ask(client, prompt="abc", max_tokens=2)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "run"
    assert choice == {"text": "de", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_several_prompts_and_echo(client):
    body = {"prompt": ["ab", [99], "~"], "n": 2, "best_of": 2, "echo": True, "max_tokens": 2}
    choices, _ = ask(client, **body)
    assert [c["text"] for c in choices] == ["abcd", "abcd", "cde", "cde", "~", "~"]
    assert [c["finish_reason"] for c in choices] == [*["length"] * 4, *["stop"] * 2]


def test_copies_of_a_prompt_are_continued_differently(client):
    body = {"prompt": "a", "n": 4, "temperature": 4.0, "seed": 3, "max_tokens": 8}
    texts = [choice["text"] for choice in ask(client, **body)[0]]
    assert len(set(texts)) == 4
    assert [choice["text"] for choice in ask(client, **body)[0]] == texts
    first, _ = ask(client, **body | {"n": 1})
    assert first[0]["text"] == texts[0]
    body = {"prompt": ["a"] * 3, "temperature": 4.0, "max_tokens": 8}
    random.seed(1)  # of seeds that are not given: one in six draws the letter that is no number
    assert len({choice["text"] for choice in ask(client, **body)[0]}) == 3
    assert len({choice["text"] for choice in ask(client, **body, seed=3)[0]}) == 1


def test_a_stream(client):
    usage = {"stream_options": {"include_usage": True}}
    *parts, last = streamed(client, prompt=["ab", "x"], max_tokens=4, echo=True, **usage)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    texts, reasons = ["", ""], [None, None]
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert len({part["id"] for part in (*parts, last)}) == 1
    assert texts == ["abcdef", "xyz{|"]
    assert reasons == ["length", "length"]


@pytest.mark.parametrize("echo", [False, True])
def test_likelihoods(client, echo):
    body = {"prompt": "ab", "max_tokens": 6, "stop": "ef", "logprobs": 1, "echo": echo}
    (choice,), answer = ask(client, **body)
    letters = [*(["a", "b"] if echo else []), "c", "d"]
    assert choice["text"] == "".join(letters)
    assert answer["usage"]["completion_tokens"] == 4  # a stop word's are computed, and not told
    sure = 4 - math.log(math.exp(4) + 127)
    told = choice["logprobs"]
    asked = 1 if echo else 0  # of a first token there is nothing to say
    assert told["tokens"] == letters
    assert told["text_offset"] == list(range(len(letters)))
    assert told["token_logprobs"][asked:] == pytest.approx([sure] * (len(letters) - asked))
    assert told["top_logprobs"][asked:] == [
        {letter: pytest.approx(sure)} for letter in letters[asked:]
    ]
    if echo:
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    parts = [part["choices"][0]["logprobs"] for part in streamed(client, **body)]
    joined = {name: [one for part in parts for one in part[name]] for name in told}
    assert joined == told


def test_tokens_are_told_with_their_text(client):
    """Of a character all that it is made of; in a stream none that a stop word may cut off yet."""
    tokenizer = load_tokenizer("gpt2")
    answer = Answer(SimpleNamespace(logprobs=0), "run", tokenizer)
    tokens = tokenizer.encode("a\N{SNOWMAN} b")

    def told(count, text, reason):
        one = Completion(text, tokens[:count], finish_reason=reason, likelihoods=[None] * count)
        return len(answer.told(Told([], [], []), one).tokens)

    assert told(3, "a\N{SNOWMAN}", "stop") == 3  # by the end of a document
    assert told(4, "a\N{SNOWMAN}", "stop") == 3
    assert told(4, "", "stop") == 0
    assert told(2, "a\N{REPLACEMENT CHARACTER}", "length") == 2
    assert told(2, "a", None) == 1
    assert told(4, "a\N{SNOWMAN} ", None) == 3
    body = {"prompt": "a", "max_tokens": 6, "stop": ["bx", "cd"], "logprobs": 0}
    (choice,), _ = ask(client, **body)
    parts = [part["choices"][0]["logprobs"]["tokens"] for part in streamed(client, **body)]
    assert choice["logprobs"]["tokens"] == [token for part in parts for token in part] == ["b"]


def test_spaces_that_a_tokenizer_says_between_words_alone(generator, monkeypatch):
    monkeypatch.setattr(generator, "tokenizer", load_tokenizer("null:127"))
    client = testclient.TestClient(application(generator, "run"))
    body = {"prompt": "5 6", "max_tokens": 4, "logprobs": 0, "stop": " 9"}
    for echo, said in ((False, [" 7", " 8"]), (True, ["5", " 6", " 7", " 8"])):
        (choice,), _ = ask(client, **body, echo=echo)
        parts = [part["choices"][0] for part in streamed(client, **body, echo=echo)]
        assert choice["text"] == "".join(part["text"] for part in parts) == "".join(said)
        told = choice["logprobs"]
        assert told["tokens"] == [t for part in parts for t in part["logprobs"]["tokens"]] == said
        assert told["text_offset"] == [len("".join(said[:place])) for place in range(len(said))]
        assert [*told["top_logprobs"][-1]] == [" 8"]
    # What it takes together stays apart in the text, and before the offsets of what is new.
    body |= {"prompt": "  5  6 ", "echo": True}
    (choice,), _ = ask(client, **body)
    told = [part["choices"][0]["logprobs"]["text_offset"] for part in streamed(client, **body)]
    assert choice["text"] == "  5  6  7 8"
    assert (
        choice["logprobs"]["text_offset"] == [one for part in told for one in part] == [0, 1, 7, 9]
    )


def test_likelihoods_of_a_long_text_decode_each_token_a_few_times():
    tokenizer, decoded = load_tokenizer("gpt2"), []
    counting = SimpleNamespace(decode=lambda tokens: decoded.append(len(tokens)) or of(tokens))
    of, text = tokenizer.decode, "a \N{GRINNING FACE} and \N{EURO SIGN} " * 100
    tokens = tokenizer.encode(text)
    answer = Answer(SimpleNamespace(logprobs=0), "run", counting)
    told = answer.choice(0, text, None, Told(tokens, [None] * len(tokens), []))["logprobs"]
    # The pieces of a character stand where it does.
    begun = [of(tokens[:at]).rstrip("\N{REPLACEMENT CHARACTER}") for at in range(len(tokens))]
    assert told["text_offset"] == [*map(len, begun)]
    assert sum(decoded) < 50 * len(tokens)
    pieces = [token for token in range(256) if of([token]) == "\N{REPLACEMENT CHARACTER}"][:3]
    told = answer.choice(0, "", None, Told([*pieces, 64], [None] * 4, []))["logprobs"]
    assert told["text_offset"] == [0, 1, 2, 3]  # of no character, each is seen as one
    # Streamed, in whole characters and behind other tokens.
    told = Told(tokens[:60], [None] * 60, tokens[-5:])
    whole = answer.choice(0, "", None, told)["logprobs"]
    ends = [at for at in range(61) if not of(tokens[:at]).endswith("\N{REPLACEMENT CHARACTER}")]
    parts = [
        answer.choice(0, "", None, told._replace(tokens=tokens[:end]), begin)["logprobs"]
        for begin, end in pairwise(ends)
    ]
    joined = {name: [one for part in parts for one in part[name]] for name in whole}
    assert joined == {name: all_of[: ends[-1]] for name, all_of in whole.items()}


def test_offsets_behind_a_prompt_that_ends_within_a_character():
    """The answer's text has its piece, which was echoed, and behind it the whole character."""
    tokenizer = load_tokenizer("gpt2")
    tokens = tokenizer.encode("a\N{SNOWMAN} b c")  # the character takes two
    answer = Answer(SimpleNamespace(logprobs=0), "run", tokenizer)
    echo = Told(tokens[:2], [None] * 2, [], 2, tokenizer.decode(tokens[:2]))
    one = Completion("\N{SNOWMAN} b c", tokens[2:], None, [None] * 3, "length")
    told = answer.told(echo, one)
    offsets = answer.choice(0, "", "length", told)["logprobs"]["text_offset"]
    assert offsets == [0, 1, 2, 3, 5]  # in "a", a piece, "\N{SNOWMAN} b c"
    for said in (2, 3, 4):
        streamed = answer.choice(0, "", "length", told, said)["logprobs"]["text_offset"]
        assert streamed == offsets[said:]


def test_of_pieces_that_look_alike_the_likeliest_is_told():
    tokenizer = load_tokenizer("gpt2")
    first, second, third = [n for n in range(256) if tokenizer.decode([n]) == "\ufffd"][:3]
    found = Likelihood(-1.0, {second: -0.5, third: -3.0})
    answer = Answer(SimpleNamespace(logprobs=2), "run", tokenizer)
    (top,) = answer.choice(0, "", None, Told([first], [found], []))["logprobs"]["top_logprobs"]
    assert top == {"\ufffd": -0.5}


def test_a_text_begins_as_documents_do(generator, monkeypatch):
    """It is told of no token that the client did not send; of the first one it can be told more."""
    for name, value in (("prepend_bos", True), ("bos", ord("a"))):
        monkeypatch.setattr(generator.tokenizer, name, value, raising=False)
    assert generator.tokens_of("") == [ord("a")]
    client = testclient.TestClient(application(generator, "run"))
    for prompt, begun in (("bc", 1), ([98, 99], 0)):
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
        (choice,), answer = ask(client, **body)
        told = choice["logprobs"]
        assert choice["text"] == "".join(told["tokens"]) == "bcd"
        assert told["text_offset"] == [0, 1, 2]
        assert (told["token_logprobs"][0] is not None) == begun
        assert answer["usage"]["prompt_tokens"] == 2 + begun


def test_a_text_is_scored(client):
    choices, _ = ask(client, prompt=["ac", ""], max_tokens=0, logprobs=2, echo=True)
    unlikely = -math.log(math.exp(4) + 127)
    told = choices[0]["logprobs"]
    assert choices[0]["text"] == "ac"
    assert told["token_logprobs"] == [None, pytest.approx(unlikely)]
    assert told["top_logprobs"][1].keys() >= {"b", "c"}
    assert choices[1]["logprobs"]["tokens"] == []


def test_an_end_is_told_behind_the_text(client):
    """Who asks for one token beside a text, to score that, takes the last for that one."""
    body = {"prompt": "}~", "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,), answer = ask(client, **body)
    told, sure = choice["logprobs"], 4 - math.log(math.exp(4) + 127)
    assert (choice["text"], choice["finish_reason"]) == ("}~", "stop")
    assert told["tokens"] == ["}", "~", "\x7f"]
    assert told["token_logprobs"] == [None, *[pytest.approx(sure)] * 2]
    assert told["text_offset"] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 0
    parts = [part["choices"][0] for part in streamed(client, **body)]
    assert [part["logprobs"]["tokens"] for part in parts] == [["}", "~"], ["\x7f"]]
    assert "".join(part["text"] for part in parts) == "}~"


def test_a_tokenizer_does_not_remember_all_texts_of_a_server(client, generator, monkeypatch):
    """gigatoken keeps each word that it meets: ids and other noise would fill the memory."""
    forgotten = []
    monkeypatch.setattr(Letters, "forget", lambda _: forgotten.append(1), raising=False)
    monkeypatch.setattr("mb_train.inference.generate.REMEMBERED", 10)
    monkeypatch.setattr(generator, "_letters", 0)
    answers = [ask(client, prompt=prompt, max_tokens=1)[0] for prompt in ["abcd"] * 6]
    assert [choice["text"] for (choice,) in answers] == ["e"] * 6
    assert len(forgotten) == 2


def test_the_model_is_named(client):
    (about,) = client.get("/v1/models").json()["data"]
    assert about["id"] == "run"
    assert client.get("/v1/models/run").json() == about
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_model_is_not_answered_for(client, path):
    response = client.post(path, json={"model": "walk", "prompt": "a", "max_tokens": 1})
    assert response.status_code == 404
    wrong = response.json()["error"]
    assert "the model 'run' or none, got 'walk'" in wrong["message"]
    assert wrong["code"] == "model_not_found"
    for named in ("run", None, ""):
        assert ask(client, model=named, prompt="a", max_tokens=1)[0][0]["text"] == "b"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "a JSON object"),
        ({"prompt": 3}, "prompt to be a text"),
        ({"prompt": [[97], [True]]}, "prompt to be a text, tokens"),
        ({"prompt": [97, "b"]}, "prompt to be a text, tokens"),
        ({"prompt": [128]}, "tokens in [0, 128), got 128"),
        ({"prompt": "a" * 17, "echo": True, "max_tokens": 0}, "at most 16 tokens"),
        ({"prompt": ["a", "aaa"], "max_tokens": 14}, "at most 16 tokens together"),
        ({"max_tokens": 10**9}, "got 1 and 1000000000"),
        ({"prompt": ["a"] * 129}, "1 to 128 completions, got 129"),
        ({"prompt": []}, "1 to 128"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens to be a whole number"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature to be a number"),
        ({"temperature": 10**400}, "temperature to be a number, got one of 401 digits"),
        ({"top_p": 0}, "top-p"),
        ({"top_k": -1}, "top-k"),
        ({"n": 0}, "n of at least 1, got 0"),
        ({"stop": [""]}, "not empty"),
        ({"stop": 3}, "stop to be a text or a list of texts"),
        ({"stop": ["a", 3]}, "stop to be a text or a list of texts"),
        ({"logprobs": 21}, "logprobs of at least 0 and at most 20, got 21"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"suffix": "b"}, "suffix is not supported"),
        ({"stream": "false"}, "stream to be true or false, got 'false'"),
        ({"stream_options": 1}, "stream_options"),
        ({"wings": 2}, "Unknown parameter 'wings'"),
    ],
    ids=str,
)
def test_a_wrong_request_is_answered_with_400(client, body, says):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v1/models/a/walk", 404, "the model 'run' or none, got 'a/walk'"),
        ("POST", "/v1/embeddings", 404, "POST /v1/completions, POST /v1/chat/completions, GET /v1"),
        ("GET", "/v1/completions", 405, "got GET /v1/completions"),
    ],
)
def test_what_is_not_there_is_said_in_json(client, method, path, status, says):
    response = client.request(method, path)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 10**6], ids=["cut", "bytes", "deep"])
def test_what_is_no_json(client, content):
    response = client.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_number_that_is_none(client):
    response = client.post("/v1/completions", content=b'{"prompt": "a", "temperature": NaN}')
    assert response.status_code == 400
    assert "temperature to be a number, got nan" in response.json()["error"]["message"]


def test_a_prompt_of_several_choices_is_scored_once(client, generator):
    before = generator.model.computes
    body = {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 0, "logprobs": 0, "echo": True}
    choices, answer = ask(client, **body)
    assert [c["text"] for c in choices] == ["ab"] * 3 + ["cd"] * 3
    assert generator.model.computes - before == 2
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_request_waits_for_the_last_step_of_a_client_that_went_away(generator):
    class Slow(Alphabet):
        """Says how many threads are in it at once, and stays until it is let go."""

        def __init__(self):
            super().__init__()
            self.entered, self.go = threading.Event(), threading.Event()
            self.inside, self.most = 0, 0

        def logits(self, tokens_BS, *, at_B=None):
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.entered.set()
            self.go.wait()
            self.inside -= 1
            return super().logits(tokens_BS, at_B=at_B)

    slow = made_of(Slow(), Letters())

    async def clients():
        service = Service(slow, "run")
        body = {"prompt": "a", "max_tokens": 8}
        first, second = [await service.understand(body) for _ in range(2)]
        gone = asyncio.ensure_future(anext(service.events(first)))
        await asyncio.to_thread(slow.model.entered.wait)
        gone.cancel()
        next_one = asyncio.ensure_future(anext(service.events(second)))
        await asyncio.sleep(0.1)
        slow.model.go.set()
        assert "data" in await next_one

    asyncio.run(clients())
    assert slow.model.most == 1


def test_a_client_that_does_not_read_holds_up_no_other(generator):
    async def clients():
        service = Service(generator, "run")
        body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
        first, second = [await service.understand(body) for _ in range(2)]
        unread = service.events(first)
        assert '"b"' in await anext(unread)
        for events in (service.events(second), unread):
            said = [event async for event in events]
            assert said[-1] == "data: [DONE]\n\n"
            assert '"length"' in said[-2]

    asyncio.run(asyncio.wait_for(clients(), 60))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_texts_become_tokens_and_tokens_texts_beside_the_event_loop(generator, stream):
    """Long ones, and those of many choices with likelihoods, take seconds."""
    threads = {"encode": set(), "decode": set()}

    class Told(Letters):
        def encode(self, text):
            threads["encode"].add(threading.current_thread())
            return super().encode(text)

        def decode(self, tokens):
            threads["decode"].add(threading.current_thread())
            return super().decode(tokens)

    async def answered():
        service = Service(made_of(Alphabet(), Told()), "run")
        body = {"prompt": "ab", "max_tokens": 8}
        body |= {"temperature": 0, "stop": "e", "n": 2, "logprobs": 2, "echo": True}
        asked = await service.understand(body)
        if stream:
            return "".join([event async for event in service.events(asked)])
        return json.dumps(await service.whole(asked, gone=lambda: asyncio.sleep(0, False)))

    assert '"finish_reason": "stop"' in asyncio.run(answered())
    for which in threads.values():
        assert len(which) == 1
        assert threading.current_thread() not in which


def test_a_request_of_too_many_bytes_is_refused(client, monkeypatch):
    monkeypatch.setattr(served, "MOST_BYTES", 100)
    response = client.post("/v1/completions", content=b" " * 101)
    assert response.status_code == 413
    assert "Expected a request of at most 100 bytes, got 101" in response.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success


def test_what_serving_needs_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "mb_train.inference.serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "nowhere"]) == 2
    said = "Expected the uvicorn package to serve with, found none. Install it"
    assert said in capsys.readouterr().err


def test_the_name_that_a_model_goes_by(monkeypatch, tmp_path):
    names = []
    monkeypatch.setattr(served, "serve", lambda _, name, **where: names.append(name))
    monkeypatch.setattr(Generator, "of_run", lambda run, device: None)
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    for words in ([], ["--served-model-name", "a/b"], ["--served-model-name", "a\udcff"]):
        assert main(["serve", ".", *words]) == 0
    assert names == ["small", "a/b", "a\\udcff"]


@pytest.mark.parametrize("flag", ["--host", "--served-model-name"])
def test_a_variable_that_is_not_set_is_no_host_and_no_name(flag, monkeypatch, capsys):
    """As a host it would be all addresses of this machine."""
    monkeypatch.setattr(Generator, "of_run", lambda run, device: pytest.fail("loaded"))
    assert main(["serve", "run", flag, ""]) == 2
    assert f"Argument {flag}: expected a name, got nothing" in capsys.readouterr().err


def test_a_model_that_has_diverged(client):
    response = client.post("/v1/completions", json={"prompt": "!", "max_tokens": 1})
    assert response.status_code == 500
    assert "not numbers" in response.json()["error"]["message"]


def test_a_request_too_large_for_the_gpu_is_said_and_the_next_answered(
    client, generator, monkeypatch
):
    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    body = {"prompt": "abc", "max_tokens": 2, "temperature": 0}
    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "logits", too_large)
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 500
        said = "Not enough memory for this request: CUDA out of memory. "
        assert said in response.json()["error"]["message"]
        assert said in client.post("/v1/completions", json=body | {"stream": True}).text
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "de"


def test_scores_of_a_prompt_that_are_no_numbers(client):
    body = {"prompt": "a!b", "max_tokens": 0, "echo": True, "logprobs": 0}
    for stream in (False, True):
        response = client.post("/v1/completions", json=body | {"stream": stream})
        assert response.status_code >= 400
        assert "the run has diverged" in response.json()["error"]["message"]


def test_defaults_are_openais():
    """Of what is not given, or null."""
    for body in ({"prompt": None}, {}):
        assert Request.of_json(body).prompts == [""]
    request = Request.of_json({"prompt": "a"} | dict.fromkeys(["max_tokens", "stop", "echo"]))
    assert (request.max_tokens, request.sampling.temperature) == (16, 1.0)
    assert (request.stop, request.stream, request.echo, request.logprobs) == (
        (),
        False,
        False,
        None,
    )


def test_what_is_given_is_taken():
    drawn = {"temperature": 2, "top_p": 0.5, "top_k": 3}
    request = Request.of_json({"prompt": ["a", [98]], "n": 2, "seed": 5} | drawn)
    assert request.seeds == [5, 6, 5, 6]
    assert request.sampling == Sampling(temperature=2.0, top_p=0.5, top_k=3)
    most = Request.of_json({"prompt": ["a"] * 64, "n": 2, "logprobs": 20})
    assert (len(most.seeds), most.logprobs) == (128, 20)


def test_a_place_that_cannot_be_listened_at_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for where, says in (
            ({"host": "127.0.0.1", "port": port}, f"--port {port}: Address already in use"),
            ({"host": "127.0.0.1", "port": 70_000}, "--port 70000: .* must be 0-65535"),
            ({"host": "no such host", "port": 0}, "Cannot listen at --host no such host"),
        ):
            with pytest.raises(ValueError, match=says):
                serve(None, "a", **where)


def test_a_client_that_leaves_before_its_request_is_whole(generator):
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
        "query_string": b"",
    }  # fmt: skip
    asyncio.run(application(generator, "run")(scope, receive, send))
