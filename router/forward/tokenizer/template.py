"""A model's chat template: messages in, the text that the model reads out.

As `transformers` renders them, in the same sandbox with the same functions; see its
`apply_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.forward.tokenizer.content_format import loops_over_content
from router.forward.tokenizer.errors import PromptRefusedError

_RAISED = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
           ValueError)  # fmt: skip
"""What templates raise, by themselves or because of what they were given."""

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""As long as the tag of transformers; it shows where the last message ends."""


class ChatTemplate:
    """Renders chats. May be used by several threads at once. Raises TemplateError for a source
    that is none.

    `takes_parts`: contents are lists of parts, not texts; `variables`: what it reads.
    """

    __slots__ = ("_template", "knows_developer", "takes_parts", "variables")

    def __init__(self, source: str) -> None:
        environment = _environment()
        parsed = environment.parse(source)
        self._template = environment.from_string(source)
        self.takes_parts = loops_over_content(parsed)
        self.variables = frozenset(find_undeclared_variables(parsed))
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continues: bool = False,
    ) -> str:
        """The text. `continues`: it ends where the last message does. Raises PromptRefusedError."""
        try:
            if not continues:
                return self._template.render(messages=messages, **variables)
            return self._continued(messages, variables)
        except _RAISED as error:
            said = f"Invalid 'messages': the chat template refuses them: {error}"
            raise PromptRefusedError("messages", said) from error

    def _continued(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        *before, last = messages
        content, text = _tagged(last.get("content"))
        tagged = [*before, {**last, "content": content}]
        rendered = self._template.render(messages=tagged, **variables)
        tag = _TAG.strip()
        if text.strip() not in rendered or tag not in rendered:
            raise ValueError("the final message, which is to be continued, is not in its text")
        at = rendered.rindex(tag)
        keeps_space = rendered[at : at + len(_TAG)] == _TAG
        return rendered[:at] if keeps_space else rendered[:at].rstrip()


def _tagged(content: Any) -> tuple[Any, str]:
    """A content with the tag behind its last text, and that text. Raises ValueError."""
    if isinstance(content, str):
        return content + _TAG, content
    parts = list(content or ())
    for at in reversed(range(len(parts))):
        if "text" in parts[at]:
            text = parts[at]["text"]
            parts[at] = {**parts[at], "text": text + _TAG}
            return parts, text
    raise ValueError("the final message has no text to continue")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what a model generated, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it so

    def parse(self, parser: Parser) -> nodes.Node:
        """What is between its two tags, as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_unmarked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _unmarked(self, caller: Macro) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes for HTML, and sorts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """Of this machine's clock and time zone, as in the engine's."""
    return _now().strftime(form)


def _now() -> datetime:
    return datetime.now()
