"""The routing group of each request whose group is split over others.

A request's group is changed before anything else reads it: candidates, hashes and sessions are
those of the chosen group.
"""

import time
from collections import Counter
from collections.abc import Collection
from inspect import iscoroutine
from typing import Any

from msgspec.structs import replace

from router.api.caller_commands import PromptCommand
from router.core.commands import Select, Submit
from router.core.core import RouterCore
from router.core.selections import Selections
from router.core.views.workers import loads
from router.protocol.replies import ScopeLoads, SplitChoice
from router.protocol.requests import BookRequest, PromptRequest
from router.protocol.values import Scope
from router.scheduler.splits import (
    Splits,
    Weights,
    chosen_group,
    split_from,
    split_key,
    weights_of,
)

_NAMED_WORKERS = ("pinned_worker", "affinity_target")


class SplitStep:
    """A step before the core. `splits`: those in force; `counts`: requests by split and group."""

    __slots__ = ("_core", "_selections", "counts", "splits")

    def __init__(self, core: RouterCore, selections: Selections, splits: Splits) -> None:
        self._core = core
        self._selections = selections
        self.splits = splits
        self.counts: Counter[tuple[str, str]] = Counter()

    def before(self, command: Any) -> tuple[Any, SplitChoice | None]:
        """Return a command with the group that was chosen, and why; itself if it is not split."""
        given: PromptCommand = command
        request = given.request
        weights = weights_of(self.splits, request.scope)
        if weights is None:
            return command, None
        choice = self._chosen(request, weights)
        if isinstance(given, Select | Submit):
            self.counts[choice.asked_group, choice.routing_group] += 1
        changed = replace(request, routing_group=choice.routing_group)
        return replace(command, request=changed), choice

    def loads(self) -> list[ScopeLoads]:
        """Return the booked load of every rank by scope, with the groups whose requests it gets."""
        found = loads(self._core)
        if not self.splits:
            return found
        return [
            replace(each, split_from=groups)
            if (groups := split_from(self.splits, Scope(each.model_name, each.routing_group)))
            else each
            for each in found
        ]

    def engines_of(self, scope: Scope) -> Scope:
        """Return a scope whose engines tokenize for one: itself, or the first of its split's."""
        groups = weights_of(self.splits, scope) or (scope.routing_group,)
        scopes = [Scope(scope.model_name, group) for group in groups]
        return next((each for each in scopes if self._core.fleet.schedulable(each)), scope)

    def _chosen(self, request: PromptRequest, weights: Weights) -> SplitChoice:
        asked, total = request.routing_group, sum(weights.values())
        named = self._named(request, weights)
        if named is not None:
            return SplitChoice(asked, named, "worker", weights[named] / total)
        key, text = split_key(request)
        usable = [group for group in weights if weights[group] and self._serves(request, group)]
        group = chosen_group(weights, usable or weights, text)
        skipped = tuple(each for each in weights if weights[each] and each not in usable)
        return SplitChoice(asked, group, key, weights[group] / total, skipped if usable else ())

    def _named(self, request: PromptRequest, weights: Weights) -> str | None:
        """Return the group of the worker, or the selection, that a request names."""
        if isinstance(request, BookRequest) and request.worker_id is None:
            selection_id = request.selection_id or request.request_id or ""
            return next((each for each in weights if self._has(request, each, selection_id)), None)
        targets = [getattr(request, name, None) for name in _NAMED_WORKERS]
        worker_ids = [each.worker_id for each in targets if each is not None]
        worker_ids += [getattr(request, name, None) for name in ("worker_id", "prefill_worker_id")]
        for worker_id in worker_ids:
            worker = None if worker_id is None else self._core.fleet.get(worker_id)
            if worker is not None and worker.announcement.routing_group in weights:
                return worker.announcement.routing_group
        return None

    def _has(self, request: PromptRequest, group: str, selection_id: str) -> bool:
        key = Scope(request.model_name, group), selection_id
        return self._selections.find(key, time.monotonic()) is not None

    def _serves(self, request: PromptRequest, group: str) -> bool:
        """Return whether a group has a worker for a request. O(1) unless it names workers."""
        workers = self._core.fleet.schedulable(Scope(request.model_name, group))
        allowed: Collection[int] | None = getattr(request, "allowed_worker_ids", None)
        excluded: Collection[int] = getattr(request, "excluded_worker_ids", None) or ()
        if allowed is None and not excluded:
            return bool(workers)
        return any(
            each.worker_id not in excluded and (allowed is None or each.worker_id in allowed)
            for each in workers
        )


def with_split(reply: Any, choice: SplitChoice) -> Any:
    """Return a reply, or a coroutine of it, that says how its group was chosen, if it can."""
    if iscoroutine(reply):
        return _later(reply, choice)
    return replace(reply, split=choice) if hasattr(reply, "split") else reply


async def _later(reply: Any, choice: SplitChoice) -> Any:
    return with_split(await reply, choice)
