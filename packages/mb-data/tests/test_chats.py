"""Conversations: their texts beside transformers', and which of their tokens are learned."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from chat_helpers import CHATML, THINKING, TWO_ANSWERS, chat_folder, chats
from mb_data import ChatTokenizer, IndexedDataset, build_conversation_datasets, preprocess_chats
from mb_data.chat import tokens
from mb_data.chat.conversation import Conversation, conversation_of
from mb_data.maintenance import decode, inspect, merge, shuffle, validate
from mb_data.samples.conversations import LEARNED, READ, Conversations
from tokenizers import Tokenizer, processors


def messages(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.fixture
def folder(tmp_path):
    return chat_folder(tmp_path / "model")


def learned_texts(dataset, tokenizer, document):
    """The text of each sequence that is learned."""
    return [
        tokenizer.decode(dataset[i].tolist(), skip_special_tokens=False)
        for i in dataset.document(document)
        if dataset.modes[i] == LEARNED
    ]


def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_tokens_are_transformers(folder, tmp_path):
    tokenizer = theirs(folder)
    source = chats(tmp_path / "in.jsonl", TWO_ANSWERS, TWO_ANSWERS[:3])
    summary = preprocess_chats(source, tmp_path / "out", tokenizer=folder)
    dataset = IndexedDataset(summary.output)
    assert dataset.num_documents == summary.documents == summary.conversations == 2
    for document, pairs in enumerate((TWO_ANSWERS, TWO_ANSWERS[:3])):
        expected = tokenizer.apply_chat_template(messages(*pairs), return_dict=False)
        found = np.concatenate([dataset[i] for i in dataset.document(document)])
        assert found.tolist() == expected
    assert learned_texts(dataset, tokenizer, 0) == [
        "It is four.\n<|im_end|>",
        "\nSeven é.<|im_end|>",
    ]
    assert learned_texts(dataset, tokenizer, 1) == ["It is four.\n<|im_end|>"]
    assert summary.tokens == len(dataset.tokens)
    assert summary.longest == max(
        sum(len(dataset[i]) for i in dataset.document(d)) for d in range(2)
    )
    assert summary.learned == sum(dataset.sizes[dataset.modes == LEARNED])
    by_mode = {READ: summary.tokens - summary.learned, LEARNED: summary.learned}
    assert inspect(summary.output).tokens_by_mode == by_mode
    assert not validate(summary.output)
    chat = ChatTokenizer(folder)
    for asked in (2, 4):
        so_far = messages(*TWO_ANSWERS[:asked])
        prompt = tokenizer.apply_chat_template(
            so_far, add_generation_prompt=True, return_dict=False
        )
        assert chat.prompt(so_far) == prompt
    # What is learned stands behind just what an answer is asked for with.
    asked = chat.prompt(messages(*TWO_ANSWERS[:2]))
    whole = np.concatenate([dataset[i] for i in dataset.document(0)]).tolist()
    assert whole[: len(asked)] == asked
    assert dataset.sizes[0] == len(asked)


def test_a_token_across_the_border_is_not_learned():
    offsets = [(0, 3), (3, 5), (5, 7), (6, 9), (9, 9), (9, 12), (12, 14), (14, 15)]
    found = tokens._learned(offsets, [(4, 9), (12, 14)])
    assert found.tolist() == [False, False, True, True, False, False, True, False]
    assert tokens._learned([(0, 2), (2, 3)], [(0, 3)]).tolist() == [False, True]
    assert tokens._learned([], [(0, 3)]).tolist() == []


def test_spaces_of_an_answer_are_learned(folder, tmp_path):
    """Also by a tokenizer that takes them off the places of its tokens, as GPT-NeoX's does."""
    file = folder / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.save(str(file))
    source = chats(tmp_path / "in.jsonl", [("user", "a  b"), ("assistant", "  if a:\n    b  ")])
    dataset = IndexedDataset(preprocess_chats(source, tmp_path / "out", tokenizer=folder).output)
    tokenizer = theirs(folder)
    assert learned_texts(dataset, tokenizer, 0) == ["  if a:\n    b  <|im_end|>"]
    said = [
        {"role": "user", "content": "a  b"},
        {"role": "assistant", "content": "  if a:\n    b  "},
    ]
    whole = tokenizer.apply_chat_template(said, return_dict=False)
    assert np.concatenate([dataset[i] for i in dataset.document(0)]).tolist() == whole


def test_answers_without_an_end_are_told_of(tmp_path):
    """As GLM's, which end where the next turn begins."""
    template = """{% for m in messages %}<|im_start|>{{ m.role + m.content }}{% endfor %}
    {%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
    folder = chat_folder(tmp_path / "model", template)
    source = chats(tmp_path / "in.jsonl", TWO_ANSWERS)
    with pytest.warns(RuntimeWarning, match=r"config\.json puts no special token .* 2 of 2 doc"):
        each = preprocess_chats(source, tmp_path / "out", tokenizer=folder, turns="each")
    assert learned_texts(IndexedDataset(each.output), theirs(folder), 0) == ["It is four."]
    assert ChatTokenizer(folder).end() is None
    folder = chat_folder(tmp_path / "other")
    assert ChatTokenizer(folder).end() == theirs(folder).convert_tokens_to_ids("<|im_end|>")


def test_tools_that_are_left_out_are_told_of(folder, tmp_path):
    asked = messages(("user", "a"), ("assistant", "b"))
    with_tools = conversation_of({"m": asked, "tools": [{"name": "add"}]}, "m")
    with pytest.raises(ValueError, match="the chat template leaves out the tools; take"):
        ChatTokenizer(folder).texts(with_tools, "all")
    assert ChatTokenizer(folder).texts(conversation_of({"m": asked, "tools": []}, "m"), "all")
    knowing = chat_folder(tmp_path / "other", "{{ (tools or []) | tojson }}" + CHATML)
    (text,) = ChatTokenizer(knowing).texts(with_tools, "all")
    assert text.text.startswith('[{"name": "add"}]<|im_start|>user')


def test_a_message_that_is_left_out_is_told_of(tmp_path):
    """Unless the template writes it, or refuses to do without."""
    pairs = [("user", "a"), ("observation", "b"), ("assistant", "c")]
    knowing = CHATML.replace(
        "for message in messages", "for message in messages if message.role in known"
    )
    chat = ChatTokenizer(chat_folder(tmp_path / "model", knowing), {"known": ["user", "assistant"]})
    with pytest.raises(ValueError, match="leaves out message 1, of the role 'observation'; say"):
        chat.texts(Conversation(messages(*pairs)), "all")
    chat = ChatTokenizer(tmp_path / "model", {"known": ["user", "observation", "assistant"]})
    assert "<|im_start|>observation\nb" in chat.texts(Conversation(messages(*pairs)), "all")[0].text
    found = "messages | selectattr('role', 'equalto', 'observation') | list"
    asking = knowing + "{% if not (" + found + ") %}{{ raise_exception('none') }}{% endif %}"
    chat = ChatTokenizer(chat_folder(tmp_path / "other", asking), {"known": ["user", "assistant"]})
    assert "observation" not in chat.texts(Conversation(messages(*pairs)), "all")[0].text


def test_each_and_last(tmp_path):
    folder = chat_folder(tmp_path / "model", THINKING)
    tokenizer = theirs(folder)
    pairs = [
        ("user", "one"), ("assistant", "hm</think>two"),
        ("user", "three"), ("assistant", "ah</think>four"), ("user", "unanswered"),
    ]  # fmt: skip
    source = chats(tmp_path / "in.jsonl", pairs)
    with pytest.raises(ValueError, match=r"line 1: .*writes message 1 otherwise.*--turns"):
        preprocess_chats(source, tmp_path / "out", tokenizer=folder)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == []
    each = preprocess_chats(source, tmp_path / "each", tokenizer=folder, turns="each")
    dataset = IndexedDataset(each.output)
    assert (each.conversations, each.documents) == (1, 2)
    texts = ["hm</think>two<|im_end|>", "ah</think>four<|im_end|>"]
    assert [learned_texts(dataset, tokenizer, d) for d in (0, 1)] == [texts[:1], texts[1:]]
    for document, stop in enumerate((2, 4)):
        found = np.concatenate([dataset[i] for i in dataset.document(document)])
        expected = tokenizer.apply_chat_template(messages(*pairs[:stop]), return_dict=False)
        assert found.tolist() == expected
    last = preprocess_chats(source, tmp_path / "last", tokenizer=folder, turns="last")
    dataset = IndexedDataset(last.output)
    assert last.documents == 1
    assert learned_texts(dataset, tokenizer, 0) == texts[1:]


@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_answers_of_weight_0_are_not_learned(folder, tmp_path, names):
    """As OpenAI's files mark what is to be read alone."""
    answers = [("assistant", "two", 0), ("assistant", "four", 1), ("assistant", "six", 0)]
    line = [dict(zip((*names, "weight"), one, strict=True)) for one in answers]
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"messages": [{**line[0], "weight": None}, *line]})
    )
    tokenizer = theirs(folder)
    for turns, texts in (("all", ["two", "four"]), ("last", ["four"])):
        summary = preprocess_chats(
            tmp_path / "in.jsonl", tmp_path / turns, tokenizer=folder, turns=turns
        )
        found = learned_texts(IndexedDataset(summary.output), tokenizer, 0)
        assert found == [f"{text}<|im_end|>" for text in texts]
    each = preprocess_chats(
        tmp_path / "in.jsonl", tmp_path / "each", tokenizer=folder, turns="each"
    )
    assert each.documents == 2


def test_other_forms(folder, tmp_path):
    shared = {
        "conversations": [
            {"from": "human", "value": "one"}, {"from": "gpt", "value": "two"},
        ]
    }  # fmt: skip
    plain = messages(("user", "one"), ("assistant", "two"))
    assert conversation_of(shared, "conversations") == Conversation(plain)
    source = tmp_path / "in.jsonl"
    source.write_text("\ufeff" + json.dumps(shared) + "\n\n")
    summary = preprocess_chats(source, tmp_path / "a", tokenizer=folder, key="conversations")
    assert summary.output.endswith("a_conversations_document")
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"messages": [plain, plain], "tools": [[], None], "n": [1, 2]})
    parquet.write_table(table, tmp_path / "in.parquet")
    rows = preprocess_chats(tmp_path / "in.parquet", tmp_path / "b", tokenizer=folder)
    assert rows.documents == 2
    assert np.array_equal(
        IndexedDataset(rows.output).tokens, np.tile(IndexedDataset(summary.output).tokens, 2)
    )


def test_parquet_gives_no_call_the_arguments_of_others(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    template = """{{ tools | tojson }}{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content if one.content is not none else one.tool_calls | tojson }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    folder = chat_folder(tmp_path / "model", template)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [{"arguments": arguments}]},
            ],
            "tools": [{"name": "f", "parameters": {name: {"type": "b"} for name in arguments}}],
        }
        for arguments in ({"city": "b"}, {"content": "c", "n": 2})
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    lines, same = (
        IndexedDataset(preprocess_chats(tmp_path / name, tmp_path / name, tokenizer=folder).output)
        for name in ("in.jsonl", "in.parquet")
    )
    assert np.array_equal(same.tokens, lines.tokens)
    assert np.array_equal(same.modes, lines.modes)


DEEP = "{% macro walk(x) %}{{ walk(x.a) if x.a else x }}{% endmacro %}{{ walk(tools[0]) if tools }}"


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (DEEP, {"tools": [json.loads('{"a": ' * 500 + "1" + "}" * 500)]}),
        ("{{ tools[0] | dictsort if tools }}", {"tools": [[1]]}),  # its items, which it has not
        ("{{ 'a' | truncate(tools[0]) if tools }}", {"tools": [1]}),
        ("{{ 'a' * tools[0] if tools }}", {"tools": [1 << 62]}),
    ],
    ids=["deep", "type", "assertion", "memory"],
)
def test_what_a_template_fails_over_is_a_bad_line(tmp_path, template, more):
    """It ended the run, whatever was said of bad lines."""
    folder = chat_folder(tmp_path / "model", template + CHATML)
    source = chats(tmp_path / "in.jsonl", TWO_ANSWERS)
    good = json.loads(source.read_text())
    source.write_text(f"{json.dumps(good)}\n{json.dumps({**good, **more})}\n")
    summary = preprocess_chats(source, tmp_path / "out", tokenizer=folder, on_error="skip")
    assert (summary.conversations, summary.bad_lines) == (1, 1)
    found = (tmp_path / "out_skipped.txt").read_text()
    assert "in.jsonl, line 2: the chat template refuses it: " in found


def test_tools_and_variables_reach_the_template(tmp_path):
    template = "{{ tools | tojson if tools else '' }}{{ mood }}{{ bos_token }}" + CHATML
    folder = chat_folder(tmp_path / "model", template, bos_token="<|endoftext|>")
    chat = ChatTokenizer(folder, {"mood": "glad"})
    found = chat.prompt(messages(("user", "a")), [{"name": "<é>"}])
    text = theirs(folder).decode(found)
    assert text.startswith('[{"name": "<é>"}]glad<|endoftext|><|im_start|>user\na<|im_end|>')
    with pytest.raises(ValueError, match="template variables: tools is of each conversation itse"):
        ChatTokenizer(folder, {"mood": "glad", "tools": []})  # each line was bad


@pytest.mark.parametrize("more", [{}, {"added_tokens_decoder": {}}], ids=["older", "newer"])
def test_special_tokens_of_older_folders(tmp_path, more):
    """Their special_tokens_map.json says them, and says it first."""
    template = "{{ bos_token }}" + CHATML.replace("'<|im_end|>'", "eos_token")
    folder = chat_folder(tmp_path / "model", template, **more)
    named = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_start|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    asked = messages(("user", "a"))
    how = {"add_generation_prompt": True, "return_dict": False}
    expected = theirs(folder).apply_chat_template(asked, **how)
    assert ChatTokenizer(folder).prompt(asked) == expected


def test_a_template_for_tools(tmp_path):
    """Of several by name; one that has a file of its own is refused, where it is asked for."""
    named = [("default", CHATML), ("other", "?"), ("tool_use", "{{ tools | tojson }}" + CHATML)]
    folder = chat_folder(
        tmp_path / "model", [{"name": name, "template": text} for name, text in named]
    )
    asked, tools = messages(("user", "a")), [{"name": "add"}]
    chat, how = ChatTokenizer(folder), {"add_generation_prompt": True, "return_dict": False}
    for given in (None, tools):
        expected = theirs(folder).apply_chat_template(asked, tools=given, **how)
        assert chat.prompt(asked, given) == expected
    assert chat.prompt(asked, tools) != chat.prompt(asked)
    (folder / "chat_template.jinja").write_text(CHATML)
    further = folder / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("{{ tools | tojson }}" + CHATML)
    alone = ChatTokenizer(folder)
    assert alone.prompt(asked) == chat.prompt(asked)
    with pytest.raises(ValueError, match=r"tool_use\.jinja, is not read: put both"):
        alone.prompt(asked, tools)


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_thoughts_are_found_under_any_of_their_names(tmp_path, given, read):
    template = CHATML.replace("message.content", f"(message.{read} or '') + message.content")
    chat = ChatTokenizer(chat_folder(tmp_path / "model", template))
    answer = {"role": "assistant", "content": "four", given: "two and two: "}
    (text,) = chat.texts(Conversation([*messages(("user", "a")), answer]), "all")
    assert text.text.endswith("<|im_start|>assistant\ntwo and two: four<|im_end|>\n")


def test_a_template_of_its_own_file_and_generation_blocks(tmp_path):
    folder = chat_folder(tmp_path / "model")
    marked = CHATML.replace("message.content", "'' }}{% generation %}{{ message.content")
    marked = marked.replace("+ '<|im_end|>'", "}}{% endgeneration %}{{ '<|im_end|>'")
    (folder / "chat_template.jinja").write_text(marked)
    one = messages(("user", "a"), ("assistant", "b"))
    assert ChatTokenizer(folder).template.render(one) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "expected a JSON object, got list; of a JSON array make lines: jq"),
        ('{"text": "a"}', "no key 'messages'; the keys are text"),
        ('{"messages": []}', "must be a list of messages"),
        ('{"messages": ["a"]}', "message 0 must be an object with role and content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the role 'assistant'"),
        (
            '{"messages": [{"role": "assistant", "content": "a<|im_end|>b"}]}',
            "message 0 holds '<|im_end|>', a special token",
        ),
        ('{"messages": [{"role": "assistant", "content": 3}]}', "the chat template refuses it"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}',
            "or only such of weight 0, so that nothing",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
            "message 0: weight must be 0 or 1, got 0.5",
        ),
        (
            '{"messages": [{"from": ["gpt"], "value": "a"}]}',
            "message 0 must be an object with role and content",
        ),
        (
            '{"messages": [{"role": "assistant", "content": ""}], "tools": 1}',
            "tools must be a list",
        ),
        ('{"' + "k" * 5000 + '": 1}', "no key 'messages'; the keys are kkk"),
        (
            '{"messages": [{"role": "assistant", "content": "a \\ud83d"}]}',
            r"message 0: expected text of valid Unicode, got '\ud83d' in it",
        ),
    ],
)
def test_bad_lines(folder, tmp_path, line, said):
    good = chats(tmp_path / "good.jsonl", TWO_ANSWERS).read_text()
    source = tmp_path / "in.jsonl"
    source.write_text(good + "\n" + line + "\n" + good)
    with pytest.raises(ValueError, match=r"in\.jsonl, line 3: ") as caught:
        preprocess_chats(source, tmp_path / "out", tokenizer=folder)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1500  # of a line of megabytes too
    assert not [*tmp_path.glob("out*")]
    summary = preprocess_chats(source, tmp_path / "out", tokenizer=folder, on_error="skip")
    assert (summary.conversations, summary.bad_lines) == (2, 1)
    assert said in (tmp_path / "out_skipped.txt").read_text()
    preprocess_chats([source] * 2, tmp_path / "out", tokenizer=folder, on_error="skip")
    assert (tmp_path / "out_skipped.txt").read_text().count("in.jsonl, line 3: ") == 2
    source.write_text(good)
    preprocess_chats(source, tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out_skipped.txt").exists()
    source.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"no conversation under 'messages'.*1 bad line: "):
        preprocess_chats(source, tmp_path / "none", tokenizer=folder, on_error="skip")


def test_a_directory_where_bad_lines_are_listed(folder, tmp_path):
    source = chats(tmp_path / "in.jsonl", TWO_ANSWERS)
    (tmp_path / "out_skipped.txt").mkdir()
    with pytest.raises(ValueError, match=r"out_skipped\.txt is a directory"):
        preprocess_chats(source, tmp_path / "out", tokenizer=folder)
    assert not [*tmp_path.glob("out_messages*")]


@pytest.mark.parametrize(
    ("message", "tool", "said"),
    [
        ({"content": [{"type": "text", "text": "a<|im_end|>"}]}, {}, "message 0"),
        ({"tool_calls": [{"arguments": {"<|im_end|>": 1}}]}, {}, "message 0"),
        ({}, {"name": "add", "description": "a<|im_end|>b"}, "tool 1"),
        ({}, {"parameters": {"<|im_end|>": {}}}, "tool 1"),
    ],
)
def test_no_text_places_a_special_token(folder, message, tool, said):
    """Not a part of a message, a call, what a tool is said to do, nor a name in them."""
    chat = ChatTokenizer(folder)
    asked, tools = [{"role": "user", "content": "a", **message}], [{"name": "other"}, tool]
    answered = conversation_of({"m": [*asked, *messages(("assistant", "b"))], "tools": tools}, "m")
    for refused in (lambda: chat.prompt(asked, tools), lambda: chat.texts(answered, "all")):
        with pytest.raises(ValueError, match=rf"{said} holds '<\|im_end\|>', a special token"):
            refused()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template"),
        ("{% if %}", "not a chat template"),
        ("{{ raise_exception('not so') }}", "refuses it: not so"),
        ("{{ messages.__class__.__mro__ }}", "refuses it: .*unsafe"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}?{% endif %}",
            r"does not begin message 1 with what it has an answer begin with.*template\.jinja",
        ),
    ],
)  # fmt: skip
def test_bad_templates(tmp_path, template, said):
    folder = chat_folder(tmp_path / "model", template)
    source = chats(tmp_path / "in.jsonl", [("user", "a"), ("assistant", "b")])
    with pytest.raises(ValueError, match=said):
        preprocess_chats(source, tmp_path / "out", tokenizer=folder)


def test_a_folder_without_a_tokenizer(tmp_path):
    source = chats(tmp_path / "in.jsonl", TWO_ANSWERS)
    for name in ("gpt2", tmp_path):
        with pytest.raises(ValueError, match=r"expected a folder with tokenizer\.json"):
            preprocess_chats(source, tmp_path / "out", tokenizer=name)


def written(folder, tmp_path, count=40, seed=0):
    """A dataset of conversations of many lengths."""
    rng = np.random.default_rng(seed)
    pairs = [
        [("user", "a" * int(rng.integers(1, 60))), ("assistant", "b" * int(rng.integers(1, 80)))]
        * int(rng.integers(1, 3))
        for _ in range(count)
    ]
    source = chats(tmp_path / "many.jsonl", *pairs)
    return preprocess_chats(source, tmp_path / "many", tokenizer=folder).output


@pytest.mark.parametrize("seq_length", [31, 63, 200])
def test_samples(folder, tmp_path, seq_length):
    prefix = written(folder, tmp_path)
    indexed = IndexedDataset(prefix)
    how = {"seq_length": seq_length, "split": "90,10,0", "num_samples": (70, 3, None)}
    with pytest.warns(RuntimeWarning, match="36 conversations are longer than a sample of") as said:
        parts = build_conversation_datasets(prefix, eod=0, seed=5, **how)
    train, valid, test = parts
    assert test is None
    assert len(valid) >= 3
    assert len(train) >= 70
    documents = [np.concatenate([indexed[i] for i in indexed.document(d)]) for d in range(40)]
    learned = [
        np.concatenate([np.full(indexed.sizes[i], indexed.modes[i]) for i in indexed.document(d)])
        for d in range(40)
    ]
    met = []
    for index in range(len(train)):
        sample, places = train[index], train.documents_of(index)
        assert sample.tokens.shape == sample.learned.shape == (seq_length + 1,)
        assert len(places) == len(sample.lengths)
        at = 0
        for (name, document), length in zip(places, sample.lengths, strict=True):
            assert name == prefix
            assert length == min(len(documents[document]), seq_length + 1)
            piece = slice(at, at + length)
            assert np.array_equal(sample.tokens[piece], documents[document][:length])
            expected = learned[document][:length].astype(bool)
            expected[0] = False
            assert np.array_equal(sample.learned[piece], expected)
            met.append(document)
            at += length
        assert (sample.tokens[at:] == 0).all()
        assert not sample.learned[at:].any()
    taught = {d for d in range(36) if learned[d][1 : seq_length + 1].any()}
    assert set(met) == taught
    assert f"{36 - len(taught)} have no answer before that and are left out" in str(said[0].message)
    again = pickle.loads(pickle.dumps(train))
    assert np.array_equal(again[7].tokens, train[7].tokens)


def test_samples_without_room_for_any_answer(folder, tmp_path):
    prefix, how = written(folder, tmp_path), {"eod": 0, "split": "1", "num_samples": (9, 0, 0)}
    with (
        pytest.raises(ValueError, match="none of 40 conversations has an answer within a sample"),
        pytest.warns(RuntimeWarning, match="40 of 40 .*; 40 have no answer before that"),
    ):
        build_conversation_datasets(prefix, seq_length=4, seed=1, **how)


def test_what_is_no_conversation(folder, tmp_path):
    import mb_data

    (tmp_path / "t.txt").write_text("a line\n")
    plain = mb_data.preprocess(tmp_path / "t.txt", tmp_path / "plain").outputs[0]
    parts = {"seed": 1, "split": "1", "num_samples": (1, None, None)}
    with pytest.raises(ValueError, match=r"no conversations: .* `mb-data chats`"):
        build_conversation_datasets(plain, eod=0, seq_length=8, **parts)
    prefix = written(folder, tmp_path)
    bert = mb_data.load_tokenizer("bert-base-uncased", num_extra_ids=5)
    for build, more in (  # of which the sequences are documents, or sentences
        (mb_data.build_gpt_datasets, {"seq_length": 8}),
        (mb_data.build_bert_datasets, {"seq_length": 12, "tokenizer": bert}),
        (mb_data.build_ict_datasets, {"seq_length": 8, "tokenizer": bert, "titles_prefix": None}),
        (
            mb_data.build_t5_datasets,
            {"encoder_seq_length": 9, "decoder_seq_length": 9, "tokenizer": bert},
        ),
    ):
        with pytest.raises(ValueError, match=r"holds conversations.*--sft"):
            build(prefix, **parts, **more)


def test_maintenance_keeps_what_is_learned(folder, tmp_path):
    prefix = written(folder, tmp_path, count=6)
    merge([prefix, prefix], tmp_path / "both")
    both, one = IndexedDataset(tmp_path / "both"), IndexedDataset(prefix)
    assert np.array_equal(both.modes, np.tile(one.modes, 2))
    shuffle(prefix, tmp_path / "mixed", seed=3)
    mixed = Conversations(IndexedDataset(tmp_path / "mixed"), 10_000)
    plain = Conversations(one, 10_000)
    everything = lambda it: sorted(  # noqa: E731
        (it.get(d, 0, it.sizes[d]).tolist(), it.learned(d, it.sizes[d]).tolist())
        for d in range(len(it))
    )
    assert everything(mixed) == everything(plain)
    from mb_data import load_tokenizer

    assert decode(prefix, 0, load_tokenizer(folder)).startswith("<|im_start|>user\na")
    assert {*one.modes.tolist()} == {READ, LEARNED}


def test_command(folder, tmp_path):
    source = chats(tmp_path / "in.jsonl", TWO_ANSWERS, [("user", "x")])
    words = ["chats", "--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", folder]
    run = lambda *more: subprocess.run(  # noqa: E731
        [sys.executable, "-m", "mb_data", *map(str, words), *more], capture_output=True, text=True
    )
    failed = run()
    assert failed.returncode == 2
    assert "in.jsonl, line 2: no message of the role" in failed.stderr
    done = run("--on-error", "skip", "--template-variables", '{"a": 1}', "--turns", "last")
    assert done.returncode == 0, done.stderr
    assert "1 conversation in 1 document, " in done.stdout
    assert "1 bad line skipped" in done.stdout
    assert run("--template-variables", "[1]").returncode == 2
