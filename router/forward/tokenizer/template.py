"""A model's chat template: its content format, and messages rendered to text.

Engines look for a loop over the content in the template's source, and this module does the same, in
the same way as vLLM, which other engines copied. Whatever the result, templates receive contents in
that format, and their output for the other format may differ.

A model's chat template: renders messages to the text that the model receives.

It renders as `transformers` does, in the same sandbox with the same functions; see its
`apply_chat_template`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.forward.tokenizer.errors import PromptRefusedError


def loops_over_content(template: nodes.Template) -> bool:
    """Return whether a template iterates over the parts of a message's content."""
    messages = set(_loop_variables(template, _assigned(template, "messages")))
    passed = _parameters_with_content(template, messages)
    in_macros = {
        id(loop): macro.name
        for macro in template.find_all(nodes.Macro)
        for loop in macro.find_all(nodes.For)
    }
    for loop in template.find_all(nodes.For):
        macro = in_macros.get(id(loop))
        names = {"content"} if macro is None else passed.get(macro, set())
        is_named = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_named or any(_reads(loop.iter, each, "content") for each in messages):
            return True
    return False


def _assigned(template: nodes.Template, name: str) -> list[str]:
    """Return the names of a variable, including its later aliases."""
    names = [name]
    for known in names:
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if not isinstance(target, nodes.Name) or target.name in names:
                continue
            if _reads(assignment.node, known):
                names.append(target.name)
    return names


def _loop_variables(template: nodes.Template, lists: list[str]) -> Iterator[str]:
    for loop in template.find_all(nodes.For):
        is_over = any(_reads(loop.iter, name) for name in lists)
        if is_over and isinstance(loop.target, nodes.Name):
            yield loop.target.name


def _parameters_with_content(template: nodes.Template, messages: set[str]) -> dict[str, set[str]]:
    """Return, by macro, the parameters that receive a message's content in any call."""
    found: dict[str, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        for call in template.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            given = [*zip(names, call.args, strict=False)]
            given += [(each.key, each.value) for each in call.kwargs if each.key in names]
            found.setdefault(macro.name, set()).update(
                name for name, value in given if any(_reads(value, m, "content") for m in messages)
            )
    return found


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether a node reads a variable, or its `key`, possibly filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return is_key and _reads_only(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_only(node.node, name)


def _reads_only(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


_RAISED = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
           ValueError)  # fmt: skip
"""Errors that templates raise, themselves or because of their input."""

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""A marker of the end of the last message, of the same length as the tag of transformers."""


class ChatTemplate:
    """Renders chats. Thread-safe. Raises TemplateError for an invalid source.

    `takes_parts`: contents are lists of parts, not texts. `variables`: names that the template
    reads.
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
        """Render messages. Raises PromptRefusedError.

        `continues`: the text ends where the last message does.
        """
        try:
            if not continues:
                return self._template.render(messages=messages, **variables)
            return self._continued(messages, variables)
        except _RAISED as error:
            refusal = f"Invalid 'messages': the chat template refuses them: {error}"
            raise PromptRefusedError("messages", refusal) from error

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
    """Return a content with the tag after its last text, and that text. Raises ValueError."""
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
    """The tag `{% generation %}`: marks generated text for training, and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content between the two tags, unchanged."""
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
    """Encode as JSON without Jinja's HTML escapes and sorting."""
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
    """Format the local time of this machine, as engines do."""
    return _now().strftime(form)


def _now() -> datetime:
    return datetime.now()
