"""How a chat template takes a message's content: as one text, or as a list of parts.

Engines find that out by looking for a loop over the content in the template's source, and so do we,
in the same way (vLLM's, which others took over): whatever they conclude, templates are then given
contents in that form, and what they make of the other form may differ.
"""

from collections.abc import Iterator

from jinja2 import nodes


def loops_over_content(template: nodes.Template) -> bool:
    """Whether it goes through the parts of a message's content."""
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
    """Names that this variable has, with those it is given later."""
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
    """By macro: its parameters that somewhere get a message's content."""
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
    """Whether this is the variable, or what it has under this key: filtered, tested or sliced, as
    may be.
    """
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
