"""Token files of guarded processes."""

import json


def token_of(name):
    """The token of this name."""
    return f"a-token-of-{name}-1234"


def token_lines(name, scopes, **fields):
    """A token's entry: its scopes in one text, and other fields of the file."""
    given = {"name": name, "token": token_of(name), "scopes": scopes.split(), **fields}
    return "\n".join(
        ["[[tokens]]", *(f"{key} = {json.dumps(value)}" for key, value in given.items()), ""]
    )
