"""Chat templates: render conversations as the text that a model is trained on.

A template is written in Jinja, from a file that may come from others. It runs in Jinja's sandbox for untrusted
templates, as in transformers: it sees the messages and the names of special tokens, can change neither, and cannot
reach Python attributes, files or modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2 import __version__ as jinja_version
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cubeloom.base.errors import UserError, first_line

Message = Mapping[str, Any]
PLAIN = (
    "{% for message in messages %}{{ message.role + ':\n' + message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\n\n' }}{% endfor %}"
    "{{ 'assistant:\n' if add_generation_prompt else '' }}"
)
"""Our template, for tokenizers without one: `role:`, a line break and the content; an answer is followed by the end
token.
"""
SAFE = (3, 1, 6)
"""In earlier versions there were ways out of Jinja's sandbox (CVE-2024-56326, CVE-2025-27516)."""


class _Generation(Extension):
    """`{% generation %}` around answers, which some templates have: the content is written unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class Template:
    """`text` is Jinja; `specials` are the special tokens by name, such as `eos_token`."""

    def __init__(self, text: str, specials: Mapping[str, str], where: str = "the chat template") -> None:
        _check_version()
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        sandbox.filters["tojson"] = _json
        sandbox.globals["raise_exception"] = _refuse
        self._specials = dict(specials)
        self._where = where
        try:
            self._template = sandbox.from_string(text)
        except (TemplateError, RecursionError) as error:
            raise UserError(f"{where} is no chat template: {first_line(error)}") from None

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """`prompt`: with the beginning of an answer, as when a model is asked for one."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=prompt, tools=None, documents=None, **self._specials
            )
        except Exception as error:  # a template may fail in any way on missing values
            raise UserError(f"{self._where} refuses the conversation: {first_line(error)}") from None


def _json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(what: str) -> None:
    raise TemplateError(what)


def _check_version() -> None:
    found = tuple(int(part) if part.isdigit() else 0 for part in jinja_version.split(".")[:3])
    if found < SAFE:
        needed = ".".join(map(str, SAFE))
        raise UserError(
            f"chat templates need Jinja {needed} or newer, which is {jinja_version} here: pip install -U jinja2"
        )
