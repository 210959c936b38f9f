"""Where a request wants to go: a worker, or one rank of it.

In a header, or as Dynamo's clients say it: `nvext.backend_instance_id`; of disaggregated serving
`nvext.decode_worker_id`, for that worker is who answers.
"""

from router.errors import InvalidFieldError
from router.forward.bodies import Asked
from router.forward.errors import NoWorkerNamedError
from router.forward.headers import (
    DP_RANK,
    PREFILL_INSTANCE_ID,
    WORKER_ID,
    WORKER_INSTANCE_ID,
    Pairs,
    header,
)
from router.protocol.requests import RankTarget

_MOST = (1 << 64) - 1


def named_worker(asked: Asked, headers: Pairs) -> RankTarget | None:
    """Who was chosen already; headers precede the body. Raises InvalidFieldError."""
    worker_id = _number(headers, WORKER_ID)
    if worker_id is None:
        worker_id = _number(headers, WORKER_INSTANCE_ID)
    extensions = asked.extensions
    if worker_id is None:
        worker_id = extensions.backend_instance_id
    if worker_id is None:
        worker_id = extensions.decode_worker_id
    return None if worker_id is None else RankTarget(worker_id, _number(headers, DP_RANK))


def demanded_worker(asked: Asked, headers: Pairs) -> RankTarget:
    """The same, where it has to be named. Raises NoWorkerNamedError."""
    target = named_worker(asked, headers)
    if target is None:
        raise NoWorkerNamedError
    return target


def named_prefill_worker(asked: Asked, headers: Pairs) -> int | None:
    """Who has computed the prompt, where somebody has."""
    worker_id = _number(headers, PREFILL_INSTANCE_ID)
    return asked.extensions.prefill_worker_id if worker_id is None else worker_id


def _number(headers: Pairs, name: bytes) -> int | None:
    said = header(headers, name)
    if said is None:
        return None
    if not (said.isascii() and said.isdecimal() and len(said) <= 20) or int(said) > _MOST:
        raise InvalidFieldError(name.decode(), repr(said[:64]), f"0 to {_MOST}")
    return int(said)
