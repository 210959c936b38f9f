"""Where responses are kept: engines that store them have them in their own memory. Pure.

Learned from engines' own answers. A response that is not known here any more is as lost as one that
its engine has forgotten.
"""

from collections import OrderedDict

from msgspec import Struct

from router.protocol.requests import RankTarget

MOST_RESPONSES = 16_384
"""Limit of responses per tenant; beyond it, the oldest is forgotten."""

KEPT_S = 86_400.0
"""Time after which a response is forgotten."""


class KeptAt(Struct, frozen=True):
    """The rank that has a response, and the model that made it."""

    model: str
    rank: RankTarget
    until_s: float


class KeptResponses:
    """The ranks of responses by tenant and id. No tenant finds those of another."""

    __slots__ = ("_by_tenant", "forgotten")

    def __init__(self) -> None:
        self._by_tenant: dict[str | None, OrderedDict[str, KeptAt]] = {}
        self.forgotten = 0
        """The number of responses that were forgotten because of the limit."""

    def __len__(self) -> int:
        """Return the number of responses."""
        return sum(map(len, self._by_tenant.values()))

    def note(
        self, tenant: str | None, response_id: str, model: str, rank: RankTarget, now_s: float
    ) -> None:
        """Record where a response is kept."""
        kept = self._by_tenant.setdefault(tenant, OrderedDict())
        kept.pop(response_id, None)
        kept[response_id] = KeptAt(model, rank, now_s + KEPT_S)
        while next(iter(kept.values())).until_s <= now_s:
            kept.popitem(last=False)
        if len(kept) > MOST_RESPONSES:
            kept.popitem(last=False)
            self.forgotten += 1

    def find(self, tenant: str | None, response_id: str, now_s: float) -> KeptAt | None:
        """Return where a response is kept, or None."""
        found = self._by_tenant.get(tenant, OrderedDict()).get(response_id)
        return None if found is None or found.until_s <= now_s else found

    def forget(self, tenant: str | None, response_id: str) -> None:
        """Forget a response."""
        self._by_tenant.get(tenant, OrderedDict()).pop(response_id, None)
