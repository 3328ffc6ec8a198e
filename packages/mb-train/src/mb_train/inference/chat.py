"""OpenAI's chat completions: a request is one for a completion of what the template makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mb_train.inference.completions import Answer, Request, Told, check_parameters

if TYPE_CHECKING:
    from mb_data import Tokenizer

_LIMITS = ("max_completion_tokens", "max_tokens")
_SHARED = ("temperature", "top_p", "top_k", "n", "stop", "stream", "stream_options", "seed")
_REFUSED = (
    "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty",
    "response_format", "tool_choice", "functions", "function_call",
)  # fmt: skip


def chat_request(
    body: Any, asked: Callable[[Sequence[Any], Sequence[Any] | None], list[int]], context: int
) -> Request:
    """Read a request's body.

    Args:
        asked: the tokens that an answer to messages, with these tools, stands behind.
        context: tokens that the model sees; an answer may fill it unless the request says less.

    Raises:
        ValueError: says what was expected.
    """
    check_parameters(body, ("messages", "tools", *_LIMITS, *_SHARED), _REFUSED)
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ValueError("Expected messages to be a list of one message at least.")
    if not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages):
        raise ValueError("Expected each of messages to be an object with role and content.")
    if tools is not None and not isinstance(tools, list):
        raise ValueError("Expected tools to be a list.")
    prompt = asked([_of_one_text(i, one) for i, one in enumerate(messages)], tools or None)
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    if limit is None:
        limit = max(context - len(prompt), 1)
    shared = {name: body[name] for name in _SHARED if name in body}
    return Request.of_json({"prompt": prompt, "max_tokens": limit, **shared})


def _of_one_text(place: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its parts of text as lines of one, for a template takes a text.

    Raises:
        ValueError: it is something else, or nothing where it is no assistant's, which may call
            tools instead: a template would write how Python shows it.
    """
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return message
    parts = content if isinstance(content, list) else [None]
    found = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) != len(found):
        raise ValueError(
            f"Expected the content of message {place} to be a text, or parts of type text alone."
        )
    return {**message, "content": "\n".join(texts)}


class ChatAnswer(Answer):
    """Parts of the answer to a request for a chat completion."""

    def __init__(self, request: Request, name: str, tokenizer: Tokenizer) -> None:
        super().__init__(request, name, tokenizer)
        self._parts = request.stream
        self._heading["id"] = f"chat{self._heading['id']}"
        self._heading["object"] = f"chat.completion{'.chunk' * self._parts}"

    def choice(
        self, index: int, text: str, reason: str | None, told: Told, said: int = 0
    ) -> dict[str, Any]:
        """A choice: a message, or what is new of it where its first `said` tokens were sent."""
        role = {} if said else {"role": "assistant"}
        where = "delta" if self._parts else "message"
        return {"index": index, where: {**role, "content": text}, "finish_reason": reason}
