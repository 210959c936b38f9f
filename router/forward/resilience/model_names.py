"""Names of models: aliases and adapters, and the workers that serve them."""

from collections.abc import Iterable

from msgspec import Struct, structs

from router.protocol.replies import ScopeLoads
from router.protocol.requests import SelectRequest


class ModelName(Struct, frozen=True):
    """A name that requests may use.

    `model`: as workers are registered. `lora_name`: the adapter that it names, or None; the router
    knows its workers. `worker_ids`: those that serve an alias; None for another name.
    `max_tokens`: of prompt and response together; None: unknown.
    """

    name: str
    model: str
    lora_name: str | None = None
    worker_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None


class ModelNames:
    """The names of a routing group, as of the last list of workers."""

    __slots__ = ("_others", "all")

    def __init__(self) -> None:
        self.all: dict[str, ModelName] = {}
        self._others: dict[str, ModelName] = {}

    def replace(self, names: Iterable[ModelName]) -> None:
        """Replace all names."""
        self.all = {each.name: each for each in names}
        self._others = {name: each for name, each in self.all.items() if name != each.model}

    def base(self, name: str) -> str:
        """Return the model that a name stands for; an unknown name is returned."""
        known = self._others.get(name)
        return name if known is None else known.model

    def resolved(self, request: SelectRequest) -> SelectRequest:
        """Return the router request for the model, adapter and workers of its name."""
        known = self._others.get(request.model_name)
        if known is None:
            return request
        return structs.replace(
            request,
            model_name=known.model,
            lora_name=known.lora_name,
            allowed_worker_ids=None if known.worker_ids is None else list(known.worker_ids),
        )


def is_served_by(scope: ScopeLoads, routing_group: str) -> bool:
    """Return whether requests of a routing group may be placed in a scope: a group may be split."""
    return scope.routing_group == routing_group or routing_group in (scope.split_from or ())


def names_in(scopes: Iterable[ScopeLoads], routing_group: str) -> list[ModelName]:
    """Return the names of a routing group. A model comes before an alias or adapter of its name."""
    here = [scope for scope in scopes if is_served_by(scope, routing_group)]
    found: dict[str, ModelName] = {}
    for scope in here:
        for served in scope.names or ():
            adapter = served.name if served.is_adapter else None
            known = found.get(served.name)
            others = () if known is None else known.worker_ids or ()
            worker_ids = None if served.is_adapter else (*others, *served.worker_ids)
            found[served.name] = ModelName(
                served.name, scope.model_name, adapter, worker_ids, scope.max_model_len or None
            )
    for scope in here:
        model = scope.model_name
        found[model] = ModelName(model, model, max_tokens=scope.max_model_len or None)
    return list(found.values())
