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
from mb_data.words import missing_package

Message = Mapping[str, Any]

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
# In place of a template for tools that has a file of its own, of which a run's folder has no copy.
FOR_TOOLS = "additional_chat_templates/tool_use.jinja"
_NOT_READ = (
    "{{ raise_exception('the one for tools, " + FOR_TOOLS + ", is not read: put both into the list "
    "chat_template of " + CONFIG + ", each with a name (default, tool_use) and template') }}"
)
# Names of what an assistant thought: templates look under the first, gpt-oss's under the second.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


# What every text is made of; all else that a template may use is a variable.
_RENDERED = ("messages", "tools", "documents", "add_generation_prompt")


class ChatTemplate:
    """Makes texts of conversations.

    Args:
        source: the template.
        variables: what it may use beside the messages, special tokens among it.
        name: where it is from, for errors.
        for_tools: another for conversations with tools; None: the same.

    Raises:
        ValueError: it is no template, or a variable is what it is rendered with.
        ModuleNotFoundError: Jinja2 is not installed.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        name: str,
        *,
        for_tools: str | None = None,
    ) -> None:
        self.name = name
        self._variables = dict(variables)
        for own in _RENDERED:
            if own in variables:
                raise ValueError(
                    f"template variables: {own} is of each conversation itself; leave it out"
                )
        jinja2 = _jinja2(name)
        try:
            environment = _environment()
            self._template = self._for_tools = environment.from_string(source)
            if for_tools is not None:
                self._for_tools = environment.from_string(for_tools)
        except jinja2.TemplateError as error:
            raise ValueError(f"{name}: not a chat template: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
        """That of a tokenizer's folder, with `variables` beside its special tokens.

        Raises:
            ValueError: there is none, or it is no template.
        """
        config = folder / CONFIG
        said = _object(config)
        # Older folders have a file of them, which comes first there.
        mapped = {} if "added_tokens_decoder" in said else _object(folder / SPECIAL_TOKENS)
        file, source, for_tools = folder / TEMPLATE, None, None
        if file.is_file():
            source = file.read_text(encoding="utf-8")
            for_tools = _NOT_READ if (folder / FOR_TOOLS).is_file() else None
        else:
            source, file = said.get("chat_template"), config
            if isinstance(source, list):  # several, by name
                named = {one.get("name"): one.get("template") for one in source}
                source, for_tools = named.get("default"), named.get("tool_use")
        if not isinstance(source, str):
            raise ValueError(
                f"{folder}: no chat template; expected {TEMPLATE}, or a default one in {CONFIG}: "
                "take the folder of a chat model, or put a template there"
            )
        given = {**_special_tokens(said), **_special_tokens(mapped), **(variables or {})}
        return cls(source, given, str(file), for_tools=for_tools)

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
        template = self._template if tools is None else self._for_tools
        try:
            return template.render(
                messages=[_with_thoughts(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a stranger's program, which fails with whatever it likes
            said = str(error) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {said}") from error


def _with_thoughts(message: Message) -> Message:
    """The message with its thoughts where templates look for them."""
    found = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _object(file: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing without one."""
    try:
        found = json_of(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file}: damaged: {error}") from error
    return found if isinstance(found, dict) else {}


def _special_tokens(said: Mapping[str, Any]) -> dict[str, str]:
    """By role, as ``bos_token``, those that a file names."""
    found = {}
    for role, value in said.items():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(text, str):
            found[role] = text
    return found


def _jinja2(name: str) -> Any:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise missing_package("jinja2", f"{name} needs Jinja2", "chat") from error
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
