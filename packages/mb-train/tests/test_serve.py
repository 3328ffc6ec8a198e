"""The completions interface, asked as a client would."""

import json
import socket

import pytest
from mb_train.generate import Completion
from mb_train.serve import Request, application, serve

pytest.importorskip("httpx")
testclient = pytest.importorskip("starlette.testclient")


class Echo:
    """Continues a prompt with its letters turned round, one at a time."""

    class tokenizer:  # noqa: N801
        @staticmethod
        def encode(text):
            return list(text)

    def stream(self, prompts, sampling, *, max_new_tokens, stop=()):
        if "nan" in prompts:
            raise ValueError("scores are not numbers")
        for length in range(1, max_new_tokens + 1):
            found = []
            for prompt in prompts:
                whole = prompt[::-1]
                text = whole[:length]
                ended = "stop" if len(whole) <= length else None
                if length == max_new_tokens and ended is None:
                    ended = "length"
                found.append(Completion(text, list(text), ended))
            yield found
            if all(one.finish_reason for one in found):
                return


@pytest.fixture
def client():
    return testclient.TestClient(application(Echo(), "run"))


def test_a_completion(client):
    answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "run"
    choice = {"text": "cb", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [choice]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_several_prompts_and_echo(client):
    body = {"prompt": ["ab", "c"], "n": 2, "echo": True, "max_tokens": 5}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [c["text"] for c in choices] == ["abba", "abba", "cc", "cc"]
    assert {c["finish_reason"] for c in choices} == {"stop"}


def test_a_stream(client):
    body = {"prompt": ["ab", "cde"], "stream": True, "max_tokens": 3}
    response = client.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    texts, reasons = ["", ""], [None, None]
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert len({json.loads(line)["id"] for line in lines}) == 1
    assert texts == ["ba", "edc"]
    assert reasons == ["stop", "stop"]


def test_the_model_is_named(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "run"
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "a JSON object"),
        ({"prompt": 3}, "prompt to be a text"),
        ({"prompt": ["a"] * 129}, "1 to 128 completions, got 129"),
        ({"prompt": []}, "1 to 128"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens to be a number"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature to be a number"),
        ({"top_p": 0}, "top-p"),
        ({"stop": [""]}, "not empty"),
        ({"logprobs": 3}, "logprobs is not supported"),
        ({"wings": 2}, "Unknown parameter 'wings'"),
    ],
    ids=str,
)
def test_a_wrong_request_is_answered_with_400(client, body, says):
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_what_is_no_json(client):
    assert client.post("/v1/completions", content=b"{").status_code == 400


def test_a_model_that_has_diverged(client):
    response = client.post("/v1/completions", json={"prompt": "nan"})
    assert response.status_code == 500
    assert "not numbers" in response.json()["error"]["message"]


def test_defaults_are_openais():
    request = Request.of_json({"prompt": "a"})
    assert (request.max_tokens, request.sampling.temperature) == (16, 1.0)
    assert (request.stop, request.stream, request.echo) == ((), False, False)


def test_a_place_that_cannot_be_listened_at_is_said():
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for where, says in (
            ({"host": "127.0.0.1", "port": port}, f"--port {port}: Address already in use"),
            ({"host": "127.0.0.1", "port": 70_000}, "--port 70000: .* must be 0-65535"),
            ({"host": "no such host", "port": 0}, "Cannot listen at --host no such host"),
        ):
            with pytest.raises(ValueError, match=says):
                serve(Echo(), "a", **where)
