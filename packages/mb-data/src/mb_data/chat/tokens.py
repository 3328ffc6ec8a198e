"""A conversation's tokens, and which of them are learned.

Whole texts are encoded by the tokenizers library, special tokens and all, as transformers does it:
where a template's words meet a message's, one token may hold of both. A message or a tool that
names a special token itself is refused: it would be that token, and could end a turn that has not
ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.chat.conversation import ASSISTANT, Conversation, Written, texts_in, write
from mb_data.chat.template import ChatTemplate, Message
from mb_data.untrusted import json_of
from mb_data.words import missing_package

FILE = "tokenizer.json"
# JSON can say half of a letter beyond 16 bits; no library takes it.
_HALF = re.compile("[\\ud800-\\udfff]")


class Encoded(NamedTuple):
    """tokens [n], and whether each is learned [n]."""

    tokens: npt.NDArray[np.int64]
    learned: npt.NDArray[np.bool_]


class ChatTokenizer:
    """Template and tokenizer of a chat model's folder.

    Args:
        folder: with a tokenizer.json and a chat template; or the path of that tokenizer.json.
        variables: of the template, as ``{"enable_thinking": False}``.

    Raises:
        ValueError: a file that is missing, or is not what it should be.
        ModuleNotFoundError: Jinja2 or tokenizers is not installed.
    """

    def __init__(self, folder: str | Path, variables: Mapping[str, Any] | None = None) -> None:
        file = Path(folder)
        if file.name != FILE:
            file = file / FILE
        if not file.is_file():
            raise ValueError(
                f"{folder}: expected a folder with {FILE} and a chat template, as that of a chat "
                "model from Hugging Face"
            )
        self.template = ChatTemplate.from_folder(file.parent, variables)
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            wanted = f"{file} needs the tokenizers library"
            raise missing_package("tokenizers", wanted, "chat") from error
        try:
            described = json_of(file.read_bytes())
            # It places special tokens, which the template does here, and may take spaces off the
            # places of tokens (GPT-NeoX's, OLMoE's): those of spaces alone would be nowhere.
            described["post_processor"] = None
            self._library = Tokenizer.from_str(json.dumps(described))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file}: not a tokenizer.json: {error}") from error
        self._library.no_truncation()
        self._library.no_padding()
        added = json.loads(self._library.to_str())["added_tokens"]
        special = [token["content"] for token in added if token["special"]]
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The tokens that an answer to these messages stands behind.

        Raises:
            ValueError: the template refuses them, or one holds a special token or is no Unicode.
        """
        self._check(messages, tools)
        text = self.template.render(messages, tools=tools, add_generation_prompt=True)
        return self._library.encode(text, add_special_tokens=False).ids

    def end(self) -> int | None:
        """The special token that an answer ends with; None if the template lets none end it."""
        asked: list[Message] = [{"role": "user", "content": "a"}]
        try:
            texts = self.texts(Conversation([*asked, {"role": ASSISTANT, "content": "b"}]), "last")
        except ValueError:  # it wants other messages
            return None
        (encoded,) = self.encode(texts)
        return self.end_of(encoded)

    def end_of(self, encoded: Encoded) -> int | None:
        """The special token that is learned last; None if another token is, or none."""
        for token in encoded.tokens[encoded.learned][-1:].tolist():
            if self._special.fullmatch(self._library.id_to_token(token) or ""):
                return token
        return None

    def texts(self, conversation: Conversation, turns: str) -> list[Written]:
        """See ``conversation.write``, for messages and tools without special tokens.

        Raises:
            ValueError: see there; a message or a tool holds a special token, or is no Unicode.
        """
        self._check(*conversation)
        return write(conversation, self.template, turns)

    def encode(self, texts: Sequence[Written]) -> list[Encoded]:
        """Tokens of texts; learned are those that begin within what is learned."""
        encodings = self._library.encode_batch(
            [one.text for one in texts], add_special_tokens=False
        )
        return [
            Encoded(np.array(encoding.ids, np.int64), _learned(encoding.offsets, one.learned))
            for encoding, one in zip(encodings, texts, strict=True)
        ]

    def _check(self, messages: Iterable[Message], tools: Iterable[Any] | None) -> None:
        for kind, of_kind in (("message", messages), ("tool", tools or ())):
            for place, one in enumerate(of_kind):
                for text in texts_in(one):
                    if found := _HALF.search(text):
                        raise ValueError(
                            f"{kind} {place}: expected text of valid Unicode, got {found[0]!r} in "
                            "it, half of a surrogate pair"
                        )
                    if found := self._special.search(text):
                        raise ValueError(
                            f"{kind} {place} holds {found[0]!r}, a special token of the tokenizer: "
                            "the template alone may place that; take it out of the text"
                        )


def _learned(
    offsets: Sequence[tuple[int, int]], learned: Sequence[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Of tokens at these places of a text, which are learned.

    One across the border before an answer is not: the model is given what is before it. The first
    of a text never is, for nothing stands before it.
    """
    places = np.array(offsets, np.int64).reshape(-1, 2)
    first = np.array([start for start, _ in learned], np.int64)
    stop = np.array([end for _, end in learned], np.int64)
    of = np.searchsorted(first, places[:, 0], side="right") - 1
    found = (of >= 0) & (places[:, 1] > places[:, 0])
    found &= places[:, 0] < stop[np.maximum(of, 0)]
    found[:1] = False
    return found
