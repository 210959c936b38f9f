"""Token ids and block names of a scenario that no other scenario has.

Systems index all engines at once, and some take an engine's name of a block for the same block
on every engine, as it is among real engines of one model.
"""

from typing import Any

from router.tools.conformance.steps import Event, Prompt

TOKEN_IDS = 32_000
SPREAD = 0x9E37_79B9_7F4A_7C15


class Place:
    """The range of one scenario."""

    def __init__(self, number: int) -> None:
        self._first_token_id = number * TOKEN_IDS
        self._mask = number * SPREAD % 2**63  # keeps the sign of 64 bits

    def prompt(self, prompt: Prompt) -> Prompt:
        """Return the prompt in this range."""
        token_ids = tuple(map(self._token_id, prompt.token_ids))
        return Prompt(token_ids, prompt.lora_name, prompt.cache_salt)

    def event(self, event: Event) -> Event:
        """Return the event in this range. A malformed one stays as it is."""
        match event:
            case {"token_ids": [*_], "block_hashes": [*_], "parent_block_hash": parent}:
                token_ids = list(map(self._token_id, event["token_ids"]))
                names = list(map(self._name, event["block_hashes"]))
                placed = {"token_ids": token_ids, "block_hashes": names}
                return event | placed | {"parent_block_hash": self._name(parent)}
            case {"block_hashes": [*names]}:
                return event | {"block_hashes": list(map(self._name, names))}
            case ["BlockStored", [*names], parent, [*token_ids], *others]:
                names, parent = list(map(self._name, names)), self._name(parent)
                return [event[0], names, parent, list(map(self._token_id, token_ids)), *others]
            case ["BlockRemoved", [*names], *others]:
                return [event[0], list(map(self._name, names)), *others]
        return event

    def _token_id(self, token_id: int) -> int:
        return self._first_token_id + token_id

    def _name(self, name: Any) -> Any:
        match name:
            case bytes():
                return self._mask.to_bytes(8, "big") + name[8:]
            case int() if name < 0:
                return (name % 2**64 ^ self._mask) - 2**64
            case int():
                return name ^ self._mask
        return name
