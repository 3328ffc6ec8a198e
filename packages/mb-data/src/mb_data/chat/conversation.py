"""From a line of a file to a conversation, and to the parts of its text that are learned.

What is learned are answers: turns of the role ``assistant``, with the token that ends them, but for
those of ``"weight": 0``. Where an answer lies in the text is found by rendering: the conversation
before it with what an answer stands behind, and with the answer. The difference is what the model
is to write there by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mb_data.chat.template import TEMPLATE, ChatTemplate, Message
from mb_data.text.parse import ARRAY_TO_LINES

ASSISTANT = "assistant"
# Roles that every template knows. Many leave out a message of another, without a word.
_KNOWN = ("system", "user", ASSISTANT, "tool")
TURNS = ("all", "each", "last")
# Names of roles in the files that began with ShareGPT, which have from and value.
_SHARED = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT}


class Conversation(NamedTuple):
    """Messages, and the tools that the assistant was told of."""

    messages: list[Message]
    tools: Sequence[Any] | None = None


class Written(NamedTuple):
    """A conversation's text, and the places [first, behind) of what is learned of it, in order."""

    text: str
    learned: list[tuple[int, int]]


def conversation_of(record: Any, key: str) -> Conversation:
    """That of a line's object: a list of messages under ``key``, with role and content (or from and
    value), and perhaps ``tools`` beside it.

    Raises:
        ValueError: says what is wrong with it.
    """
    if not isinstance(record, dict):
        hint = f"; {ARRAY_TO_LINES}" if isinstance(record, list) else ""
        raise ValueError(f"expected a JSON object, got {type(record).__name__}{hint}")
    if key not in record:
        raise ValueError(f"no key {key!r}; the keys are {', '.join(record) or 'none'}")
    found, tools = record[key], record.get("tools")
    if not isinstance(found, list) or not found:
        raise ValueError(f"the value of {key!r} must be a list of messages")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools must be a list, got {type(tools).__name__}")
    messages = [_message(one, place) for place, one in enumerate(found)]
    if not any(map(_is_learned, messages)):
        raise ValueError(
            f"no message of the role {ASSISTANT!r}, or only such of weight 0, so that nothing is "
            "to be learned"
        )
    return Conversation(messages, tools or None)


def _message(found: Any, place: int) -> Message:
    if isinstance(found, dict) and {"from", "value"} <= found.keys():
        role, weight = found["from"], found.get("weight")
        role = _SHARED.get(role, role) if isinstance(role, str) else role
        found = {"role": role, "content": found["value"], "weight": weight}
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise ValueError(f"message {place} must be an object with role and content")
    if found.get("weight") not in (None, 0, 1):
        raise ValueError(f"message {place}: weight must be 0 or 1, got {found['weight']!r}")
    # Files of servers' answers say null for what a message has not.
    return {name: value for name, value in found.items() if value is not None or name == "content"}


def _is_learned(message: Message) -> bool:
    """An answer, unless it says of itself that it is none to learn, as OpenAI's files do."""
    return message["role"] == ASSISTANT and message.get("weight", 1) != 0


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a message or a tool, those of its calls and of its parts, and names in them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from texts_in(name)
            yield from texts_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_in(one)


def write(conversation: Conversation, template: ChatTemplate, turns: str) -> list[Written]:
    """The texts that are made of a conversation.

    Args:
        turns: "all": one text, in which all answers are learned; "each": a text up to each answer,
            in which that one is; "last": a text up to the last answer, in which it is.

    Raises:
        ValueError: the template refuses it, or leaves out a message of a role of its own, or the
            tools; with "all", it writes an answer otherwise where a turn follows it.
    """
    messages, tools = conversation
    _check_nothing_is_lost(conversation, template)

    def answered(place: int) -> tuple[str, int]:
        """The text up to the answer at `place` and with it, and where in it the answer begins."""
        before = template.render(messages[:place], tools=tools, add_generation_prompt=True)
        text = template.render(messages[: place + 1], tools=tools)
        if not text.startswith(before):
            raise ValueError(
                f"the chat template does not begin message {place} with what it has an answer "
                "begin with (add_generation_prompt), so that the model would not learn to answer "
                f"there; give the tokenizer's folder a {TEMPLATE} that does"
            )
        return text, len(before)

    answers = [place for place, one in enumerate(messages) if _is_learned(one)]
    texts = [answered(place) for place in (answers[-1:] if turns == "last" else answers)]
    if turns != "all":
        return [_written(text, [(first, len(text))]) for text, first in texts]
    whole, _ = texts[-1]
    for place, (text, _) in zip(answers, texts, strict=True):
        if not whole.startswith(text):
            raise ValueError(
                f"{template.name} writes message {place} otherwise once another follows it, so "
                "that not all answers of one text are what the model would write; learn --turns "
                "each in a text of its own, or --turns last"
            )
    return [_written(whole, [(first, len(text)) for text, first in texts])]


def _check_nothing_is_lost(conversation: Conversation, template: ChatTemplate) -> None:
    messages, tools = conversation
    if tools and _same(template, conversation, Conversation(messages)):
        raise ValueError(
            "the chat template leaves out the tools; take them out of the line, or give the "
            f"tokenizer's folder a {TEMPLATE} that writes them"
        )
    for place, one in enumerate(messages):
        without = Conversation(messages[:place] + messages[place + 1 :], tools)
        if one["role"] not in _KNOWN and _same(template, conversation, without):
            raise ValueError(
                f"the chat template leaves out message {place}, of the role {one['role']!r}; say "
                f"{', '.join(_KNOWN)}, or a role that it knows"
            )


def _same(template: ChatTemplate, conversation: Conversation, less: Conversation) -> bool:
    """Whether the template makes the same text of a conversation and of less than it."""
    whole = template.render(conversation.messages, tools=conversation.tools)
    try:
        return whole == template.render(less.messages, tools=less.tools)
    except ValueError:  # it misses something
        return False


def _written(text: str, learned: list[tuple[int, int]]) -> Written:
    """Without the line end behind an answer's last token, which nobody waits for."""
    stripped = [(first, first + len(text[first:stop].rstrip())) for first, stop in learned]
    found = [(first, stop) for first, stop in stripped if first < stop]
    if not found:
        raise ValueError("its answers are empty, so that nothing is to be learned")
    return Written(text, found)
