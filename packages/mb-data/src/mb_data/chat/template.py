"""The template that a chat model's conversations are written with, as its folder has it.

``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``, is a program in Jinja2
that makes one text of a list of messages. It is a stranger's: it runs in Jinja's sandbox, where it
can reach no file and change nothing. What such templates count on beside Jinja itself
(``raise_exception``, ``strftime_now``, ``{% generation %}``, ``tojson`` that escapes nothing,
``break`` and ``continue``, the special tokens by their roles) is here as in transformers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mb_data.untrusted import json_of

Message = Mapping[str, Any]

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """Makes texts of conversations.

    Args:
        source: the template.
        variables: what it may use beside the messages, special tokens among it.
        name: where it is from, for errors.

    Raises:
        ValueError: it is no template.
        ModuleNotFoundError: Jinja2 is not installed.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._variables = dict(variables)
        jinja2 = _jinja2(name)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{name}: not a chat template: {error}") from error
        self._wrong = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError)

    @classmethod
    def from_folder(cls, folder: Path, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
        """That of a tokenizer's folder, with `variables` beside its special tokens.

        Raises:
            ValueError: there is none, or it is no template.
        """
        config, said = folder / CONFIG, {}
        if config.is_file():
            try:
                said = json_of(config.read_bytes())
            except ValueError as error:
                raise ValueError(f"{config}: damaged: {error}") from error
        file, source = folder / TEMPLATE, None
        if file.is_file():
            source = file.read_text(encoding="utf-8")
        elif isinstance(said, dict):
            source, file = said.get("chat_template"), config
            if isinstance(source, list):  # several, by name
                named = {one.get("name"): one.get("template") for one in source}
                source = named.get("default")
        if not isinstance(source, str):
            raise ValueError(
                f"{folder}: no chat template; expected {TEMPLATE}, or a default one in {CONFIG}: "
                "take the folder of a chat model, or put a template there"
            )
        return cls(source, {**_special_tokens(said), **(variables or {})}, str(file))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; with what an answer stands behind, if it is to be followed
        by one.

        Raises:
            ValueError: the template refuses these messages, or fails over them.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except self._wrong as error:
            raise ValueError(f"the chat template refuses it: {error}") from error


def _special_tokens(said: Any) -> dict[str, str]:
    """By role, as ``bos_token``, those that a tokenizer_config.json names."""
    found = {}
    for role, value in said.items() if isinstance(said, dict) else ():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(text, str):
            found[role] = text
    return found


def _jinja2(name: str) -> Any:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} needs Jinja2: pip install 'mb-data[chat]'", name="jinja2"
        ) from error
    return jinja2


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` to ``{% endgeneration %}``: what is between, as it is."""

        tags = {"generation"}  # noqa: RUF012, Jinja's own convention

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    given: Any = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(given)
    return environment
