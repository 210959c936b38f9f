"""An engine at a URL: what is learned of it, as a registration and one sentence."""

from msgspec import Struct

from router.discovery.attach import sentences
from router.discovery.attach.engine_server import ObservedServer
from router.discovery.attach.engine_url import EngineUrl
from router.discovery.attach.socket_choice import SocketChoice
from router.discovery.attach.versions import untested
from router.protocol.workers import WorkerRegistration


class Attachment(Struct, frozen=True):
    """An engine as it is registered, and the sentence about it.

    `is_up`: its server answered. `caution`: a reason to trust its events less than they claim.
    """

    registration: WorkerRegistration
    sentence: str
    is_up: bool
    caution: str | None = None


def bare_registration(engine: EngineUrl, model: str | None = None) -> WorkerRegistration:
    """Return the registration of an engine that is shown, and not chosen."""
    return WorkerRegistration(
        worker_id=engine.worker_id, endpoint=engine.url, model_name=model or "default"
    )


def attachment(
    engine: EngineUrl, seen: ObservedServer, choice: SocketChoice, *, was_up: bool
) -> Attachment:
    """Return how an engine is registered, from what its server says.

    A registration without what a worker needs is incomplete: it is shown, and not chosen.
    """
    if seen.problem is not None:
        sentence = f"{engine.url}  {sentences.unreachable(seen, was_up=was_up)}"
        return Attachment(bare_registration(engine), sentence, is_up=False)
    registration = _registration(engine, seen, choice)
    clauses = [sentences.description(seen, registration), choice.clause]
    if not choice.sockets and seen.generates and registration.caches_prefixes is not False:
        clauses.append(sentences.ESTIMATED)
    if registration.block_size is None:
        clauses.append("its metrics do not name its block size, so it is not chosen")
    if seen.needs_key:
        clauses.append(sentences.needs_key())
    caution = _caution(engine, seen) if choice.sockets else None
    if caution is not None:
        clauses.append(f"degraded: {caution}")
    sentence = f"{engine.url}  {'; '.join(filter(None, clauses))}"
    return Attachment(registration, sentence, is_up=True, caution=caution)


def _caution(engine: EngineUrl, seen: ObservedServer) -> str | None:
    """Return a reason why an engine may reuse less than its events say; None if there is none."""
    is_unknown = seen.drafts_tokens and engine.hybrid is None
    return untested(seen.engine, seen.version) or (sentences.DRAFTS if is_unknown else None)


def _registration(
    engine: EngineUrl, seen: ObservedServer, choice: SocketChoice
) -> WorkerRegistration:
    sockets, facts = choice.sockets, seen.facts
    adapters = sorted(name for name, parent in seen.models.items() if parent is not None)
    start, size = min(sockets, default=0), max(len(sockets), seen.rank_count, 1)
    return WorkerRegistration(
        worker_id=engine.worker_id,
        endpoint=engine.url,
        model_name=seen.base_model or next(iter(seen.models), None) or "default",
        engine=seen.engine or "vllm",
        role=engine.role,
        block_size=facts.block_size,
        total_kv_blocks=facts.total_kv_blocks,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        data_parallel_start_rank=start,
        data_parallel_size=size,
        lora_names=adapters if seen.engine == "vllm" else None,
        model_aliases=list(seen.aliases) or None,
        max_model_len=seen.max_model_len,
        kv_events_endpoints={rank: each.events for rank, each in sockets.items()} or None,
        replay_endpoints={r: each.replay for r, each in sockets.items() if each.replay} or None,
        load_endpoints={r: each.load for r, each in sockets.items() if each.load} or None,
        block_addresses=engine.block_addresses(range(start, start + size)) or None,
        topic=next((each.topic for each in sockets.values() if each.topic), None),
        hybrid=engine.hybrid,
        caches_prefixes=False if seen.has_prefix_caching is False else None,
    )
