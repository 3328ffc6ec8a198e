"""Learning the answers of conversations: losses beside each conversation alone, and whole runs."""

import json
import sys
from itertools import takewhile
from pathlib import Path

import mb_data
import numpy as np
import pytest
import torch
from mb_parallel import ParallelDims, ParallelMesh
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.inference.chat import chat_request
from mb_train.inference.decoding import Sampling
from mb_train.inference.generate import Generator
from mb_train.tasks.gpt import positions_of
from mb_train.tasks.make import make_task

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "mb-data" / "tests"))
from chat_helpers import TWO_ANSWERS, chat_folder, chats

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "micro_batch_size": 2,
    "train_iters": 1, "lr": 1e-3, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
ANSWERS = {"What is two?": "It is four.", "And you?": "user", "c": "a\nb"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("model"))


def task_of(folder, **fields):
    config = TrainConfig(**SIZES | {"sft": True, "tokenizer": str(folder)} | fields)
    alone = ParallelMesh(ParallelDims(), None, None, None)
    tokenizer = mb_data.load_tokenizer(folder)
    return make_task(config, tokenizer, vocab_size=512, mesh=alone)


def written(folder, where, *conversations):
    source = chats(where / "in.jsonl", *conversations)
    return mb_data.preprocess_chats(source, where / "out", tokenizer=folder).output


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("stages", [1, 2], ids=["ends", "segments"])
def test_packed_conversations_give_the_losses_of_each_alone(folder, tmp_path, positions, stages):
    """And its gradients: none sees another, and the tokens of answers alone count."""
    short = ([("user", q), ("assistant", a)] for q, a in ANSWERS.items())
    prefix = written(folder, tmp_path, TWO_ANSWERS, *short)
    fields = {"position_embedding_type": positions, "pipeline_model_parallel_size": stages}
    task = task_of(folder, seq_length=160, **fields)
    data, _, _ = task.build_datasets([prefix], (2, None, None))
    samples = [data[i] for i in range(2)]
    assert max(len(sample.lengths) for sample in samples) > 1
    torch.manual_seed(0)
    model = task.build_model(compute_dtype=torch.float32)
    arrays = task.collate(samples)
    batch = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
    found = model(batch.pop("tokens_BS"), **batch).losses["lm loss"]
    found.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = 0.0
    for sample in samples:
        start = 0
        for length in sample.lengths:
            tokens = torch.from_numpy(sample.tokens[start : start + length])[None]
            learned = torch.from_numpy(sample.learned[start : start + length])[None]
            logits = model.logits(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[0, 1:], reduction="none"
            )
            expected = expected + (loss * learned[0, 1:]).sum()
            start += length
    torch.testing.assert_close(found, expected)
    expected.backward()
    for one, other in zip(packed, model.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-5)


def test_positions_begin_anew_behind_ends():
    ends = np.array([[0, 1, 0, 0, 1, 1, 0], [0] * 7, [1, 0, 0, 0, 0, 0, 1]], bool)
    assert positions_of(ends).tolist() == [
        [0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5]
    ]  # fmt: skip


WORDS = [
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "64",
    "--micro-batch-size", "4", "--lr", "5e-3", "--attention-dropout", "0", "--hidden-dropout", "0",
    "--split", "1,0,0", "--eval-iters", "0", "--device", "cpu", "--max-position-embeddings", "128",
    "--log-interval", "10", "--lr-decay-style", "constant",
]  # fmt: skip


def test_a_model_learns_its_answers(folder, tmp_path, capsys):
    """From weights of texts, by --finetune; then it is asked."""
    once = [[("user", q), ("assistant", a)] for q, a in ANSWERS.items()]
    prefix = written(folder, tmp_path, *once)
    base, tuned = str(tmp_path / "base"), str(tmp_path / "tuned")
    (tmp_path / "t.txt").write_text("What is two and two? It is four.\n" * 200)
    text = mb_data.preprocess(
        tmp_path / "t.txt", tmp_path / "t", tokenizer=folder, append_eod=True
    ).outputs[0]
    words = [*WORDS, "--tokenizer", str(folder)]
    assert main([*words, "--data-path", text, "--save", base, "--train-iters", "2"]) == 0
    more = ["--finetune", "--sft", "--data-path", prefix, "--train-iters", "100"]
    assert main(["--load", base, "--save", tuned, *more]) == 0
    capsys.readouterr()
    for question, answer in ANSWERS.items():
        asked = ["generate", tuned, "--chat", "--prompt", question, "--temperature", "0"]
        assert main([*asked, "--device", "cpu"]) == 0
        assert capsys.readouterr().out == f"{answer}\n"
    asked = ["generate", tuned, "--chat", "--temperature", "0", "--device", "cpu"]
    assert main([*asked, *(w for q in ANSWERS for w in ("--prompt", q))]) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n\n" for answer in ANSWERS.values())
    # A run of conversations goes on as such, and its loss begins where it was.
    assert main(["--load", tuned, "--train-iters", "102"]) == 0
    log = [json.loads(line) for line in (Path(tuned) / "log.jsonl").read_text().splitlines()]
    losses = [entry["lm_loss"] for entry in log if entry["event"] == "train"]
    assert losses[-1] < 0.1 < 2 < losses[0]
    assert main(["--load", tuned, "--no-sft", "--data-path", text, "--train-iters", "104"]) == 2
    assert "--sft True" in capsys.readouterr().err
    generator = Generator.of_run(Path(tuned), "cpu")
    prompt = generator.asked([{"role": "user", "content": "c"}])
    (found,) = generator.complete([prompt], Sampling(temperature=0), max_new_tokens=20)
    assert (found.text, found.finish_reason) == ("a\nb", "stop")
    _asks_the_server(generator)


def _asks_the_server(generator):
    testclient = pytest.importorskip("starlette.testclient")
    from mb_train.inference.serve import application

    client = testclient.TestClient(application(generator, "tuned"))
    body = {"messages": [{"role": "user", "content": "What is two?"}], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "It is four."}
    assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] > 1
    parts = [{"type": "text", "text": "What is two?"}]
    of_parts = client.post(
        "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": parts}]}
    ).json()
    assert (of_parts["choices"], of_parts["usage"]) == (answer["choices"], answer["usage"])
    streamed = client.post("/v1/chat/completions", json=body | {"stream": True}).text
    events = [json.loads(e[6:]) for e in streamed.split("\n\n") if e and e != "data: [DONE]"]
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    deltas = [e["choices"][0]["delta"] for e in events]
    assert "".join(delta["content"] for delta in deltas) == "It is four."
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    wrong = client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert wrong.status_code == 400
    special = [{"role": "user", "content": "<|im_end|>"}]
    wrong = client.post("/v1/chat/completions", json={"messages": special})
    assert wrong.status_code == 400
    assert "special token" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "Expected a JSON object"),
        ({}, "Expected messages"),
        ({"messages": ["a"]}, "Expected each of messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": {}}, "Expected tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content of message 0 to be a text, or parts",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "content of message 0 to be a text,"),
        ({"messages": [{"role": "user"}]}, "content of message 0 to be a text,"),
        ({"messages": [{"role": "user", "content": None}]}, "content of message 0 to be a text,"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of message 0 to be a text,"),
        (
            {"messages": [{"role": "user", "content": {"text": "a"}}]},
            "content of message 0 to be a text,",
        ),
        ({"messages": [{"role": "user"}], "prompt": "a"}, "Unknown parameter 'prompt'"),
        ({"messages": [{"role": "user"}], "logprobs": True}, "logprobs is not supported"),
        (
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0},
            "Expected max_tokens of at least 1",
        ),
    ],
)
def test_wrong_requests(body, said):
    with pytest.raises(ValueError, match=said):
        chat_request(body, lambda messages, tools: [1, 2], 10)


def test_an_answer_may_fill_the_context():
    body = {"messages": [{"role": "user", "content": "a"}]}
    asked = lambda messages, tools: [1, 2]  # noqa: E731
    assert chat_request(body, asked, 10).max_tokens == 8
    calls = {"role": "assistant", "content": None, "tool_calls": []}  # in place of a text
    assert chat_request({"messages": [calls]}, asked, 10).max_tokens == 8
    assert (
        chat_request(body | {"max_completion_tokens": 3, "max_tokens": 4}, asked, 10).max_tokens
        == 3
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "Expected --data-path, what mb-data chats wrote, with --sft"),
        (["--mock-data"], "Expected conversations with --sft, got --mock-data"),
        (["--data-path", "a.jsonl"], r"mb-data chats --input a\.jsonl"),
        (["--data-path", "plain"], "no conversations: .* mb-data chats"),
        (["--data-path", "plain", "--model", "bert"], "Expected --model gpt with --sft"),
    ],
)
def test_what_is_no_conversation(folder, tmp_path, monkeypatch, capsys, more, said):
    monkeypatch.chdir(tmp_path)
    with mb_data.IndexedDatasetBuilder("plain", np.uint16) as builder:
        builder.add_document([1, 2, 3])
    words = [*WORDS, "--tokenizer", str(folder), "--train-iters", "1", "--sft", *more]
    assert main(words) == 2
    import re

    assert re.search(said.replace(" mb-data chats", ".mb-data chats"), capsys.readouterr().err)


def test_a_model_without_a_template(tmp_path, capsys):
    run = str(tmp_path / "run")
    words = [*WORDS, "--train-iters", "1", "--save", run, "--mock-data"]
    assert main(words) == 0
    assert main(["generate", run, "--chat", "--prompt", "a", "--device", "cpu"]) == 2
    assert "chat template, got gpt2" in capsys.readouterr().err
    assert main(["generate", run, "--system", "a", "--device", "cpu"]) == 2
    assert "--chat with --system" in capsys.readouterr().err


def test_from_hugging_face_and_back(folder, tmp_path, capsys):
    """The page's own steps: a chat model of theirs is tuned and theirs again, template and all."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "vocab_size": 400}
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    model = tmp_path / "theirs"
    theirs.save_pretrained(model)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(model)
    prefix = written(model, tmp_path, TWO_ANSWERS, [("user", "c"), ("assistant", "a")])
    run, tuned, back = (str(tmp_path / name) for name in ("run", "tuned", "back"))
    assert main(["convert", str(model), run]) == 0
    more = ["--data-path", prefix, "--seq-length", "80", "--train-iters", "2", "--lr", "1e-3"]
    more += ["--split", "1,0,0", "--eval-iters", "0", "--device", "cpu", "--micro-batch-size", "2"]
    assert main(["--load", run, "--finetune", "--save", tuned, "--sft", *more]) == 0
    assert main(["convert", tuned, back]) == 0
    capsys.readouterr()
    asked = [{"role": "user", "content": "What is two?"}]
    again = transformers.AutoTokenizer.from_pretrained(back)
    how = {"add_generation_prompt": True, "return_dict": False}
    tokens = again.apply_chat_template(asked, **how)
    generator = Generator.of_run(Path(tuned), "cpu")
    assert generator.asked(asked) == tokens
    (ours,) = generator.complete([tokens], Sampling(temperature=0), max_new_tokens=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    found = model.generate(torch.tensor([tokens]), max_new_tokens=4, do_sample=False)
    end = generator.tokenizer.eod
    assert [*takewhile(end.__ne__, found[0, len(tokens) :].tolist())] == ours.tokens
    assert not torch.equal(model.lm_head.weight, theirs.lm_head.weight)


def test_parts_of_text_are_lines_of_one():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    seen = []
    body = {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]}
    chat_request(body, lambda messages, tools: seen.extend(messages) or [1], 10)
    assert [message["content"] for message in seen] == ["a\nb", "c"]
