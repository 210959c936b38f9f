"""What tenants of a shared fleet see of each other: nothing but load."""

import asyncio
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from builders import announcement
from router.commands import Commands
from router.config import RouterConfig
from router.core import RouterCore
from router.errors import (
    DuplicateReservationError,
    InvalidFieldError,
    ReservationNotFoundError,
    WorkerNotFoundError,
)
from router.indexer.selection import make_indexer
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.protocol.requests import BookRequest, PromptRequest, SelectRequest
from router.protocol.subjects import Subjects
from router.security.caller import ANYBODY, Caller
from router.security.errors import ForbiddenError
from router.tenant_commands import TenantCommands, commands_of

PROMPTS = [list(range(40)), [*range(20), *range(100, 120)], list(range(500, 540))]
WORKERS = (1, 2)


def caller(name, **fields):
    defaults = {"tenant": name, "cache_salts": frozenset((name,))}
    return Caller(f"token-of-{name}", frozenset(("route",)), **{**defaults, **fields})


A, B = caller("a"), caller("b")


def router(**fields):
    """The commands of a router that guesses caches from what it books."""
    config = RouterConfig(use_kv_events=False, approximate_ttl_s=1e6, **fields)
    core = RouterCore(config.core, lambda: make_indexer(config.index), Random(5))
    for worker_id in WORKERS:
        core.upsert_worker(announcement(worker_id, agent_is_engine=False), 0.0)
    core.upsert_worker(announcement(9, agent_is_engine=False, routing_group="b-only"), 0.0)
    metrics = RouterMetrics()
    outbox = Outbox(Subjects("test"), metrics, has_bus=False, retell=lambda _: None)
    return Commands(core, outbox, metrics)


def reserve(who, prompt, worker_id, **fields):
    return BookRequest(
        token_ids=PROMPTS[prompt], worker_id=worker_id, cache_salt=who.tenant, **fields
    )


async def perform(commands, steps):
    """Steps of several callers, under the same ids; what nobody has booked is passed over."""
    for who, kind, prompt, worker_id, request_id in steps:
        own = commands_of(commands, who)
        with suppress(DuplicateReservationError, ReservationNotFoundError):
            if kind == "reserve":
                await own.reserve(reserve(who, prompt, worker_id, request_id=request_id))
            elif kind == "select":
                request = SelectRequest(token_ids=PROMPTS[prompt], cache_salt=who.tenant)
                await own.select(request)
            elif kind == "prefill_complete":
                own.prefill_complete(request_id)
            else:
                own.free(request_id)


async def seen_by(commands, who):
    """The overlap of every rank with every prompt, as a caller is told."""
    own = commands_of(commands, who)
    return [
        await own.overlap_scores(PromptRequest(token_ids=prompt, cache_salt=who.tenant))
        for prompt in PROMPTS
    ]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([A, B]),
        st.sampled_from(["reserve", "reserve", "select", "prefill_complete", "free"]),
        st.integers(0, len(PROMPTS) - 1),
        st.sampled_from(WORKERS),
        st.sampled_from(["r1", "r2", "r3"]),
    ),
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_one_tenants_traffic_never_changes_the_overlap_another_sees(steps):
    async def scenario():
        shared, alone = router(), router()
        await perform(shared, steps)
        await perform(alone, [step for step in steps if step[0] is A])
        assert await seen_by(shared, A) == await seen_by(alone, A)

    asyncio.run(scenario())


async def test_what_a_tenant_has_booked_it_sees_and_no_other_does():
    commands = router()
    await commands_of(commands, A).reserve(reserve(A, 0, 1, request_id="r"))
    for who, blocks in ((A, 10), (B, 0)):
        reply = (await seen_by(commands, who))[0]
        assert max(each.device_blocks for each in reply.workers) == blocks


async def test_the_same_ids_are_different_requests_of_different_tenants():
    commands = router()
    reply = await commands_of(commands, A).reserve(reserve(A, 0, 1, request_id="r"))
    assert reply.request_id == "r"
    with pytest.raises(ReservationNotFoundError, match="reservation r not found"):
        commands_of(commands, B).free("r")
    with pytest.raises(ReservationNotFoundError):
        commands_of(commands, B).prefill_complete("a/r")
    await commands_of(commands, B).reserve(reserve(B, 0, 1, request_id="r"))
    with pytest.raises(DuplicateReservationError, match="reservation r is"):
        await commands_of(commands, A).reserve(reserve(A, 0, 1, request_id="r"))
    commands_of(commands, A).free("r")
    commands_of(commands, B).free("r")


async def test_a_decision_has_the_id_that_was_given():
    own = commands_of(router(), A)
    request = SelectRequest(token_ids=PROMPTS[0], cache_salt="a", request_id="r", tenant="a")
    assert (await own.select_and_reserve(request)).request_id == "r"
    own.free("r")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cache_salt": "b"}, "cache_salt"),
        ({"cache_salt": None}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a", "tenant": "b"}, "tenant"),
        ({"cache_salt": "a", "sequence_hashes": [1], "isl_tokens": 16}, "sequence_hashes"),
    ],
)
async def test_what_is_anothers_is_refused(fields, field):
    with pytest.raises(ForbiddenError) as refusal:
        await commands_of(router(), A).select(SelectRequest(token_ids=PROMPTS[0], **fields))
    assert refusal.value.field == field


async def test_a_tenant_stays_in_its_groups_whichever_way_it_asks():
    own = commands_of(router(), caller("a", routing_groups=frozenset(("default",))))
    prompt = {"token_ids": PROMPTS[0], "cache_salt": "a", "routing_group": "b-only"}
    for ask in (
        own.select(SelectRequest(**prompt)),
        own.select_and_reserve(SelectRequest(**prompt, request_id="r")),
        own.reserve(BookRequest(**prompt, request_id="r", worker_id=9)),
        own.potential_loads(PromptRequest(**prompt)),
        own.overlap_scores(PromptRequest(**prompt)),
    ):
        with pytest.raises(ForbiddenError, match="b-only"):
            await ask
    with pytest.raises(WorkerNotFoundError):
        await own.reserve(reserve(A, 0, 9, request_id="r"))


async def test_who_may_use_any_salt_may_name_blocks_by_hashes():
    own = commands_of(router(), caller("a", cache_salts=frozenset(("*",))))
    request = SelectRequest(sequence_hashes=list(range(8)), isl_tokens=32)
    assert (await own.select(request)).isl_tokens == 32


async def test_an_id_that_would_not_fit_is_refused():
    request = SelectRequest(token_ids=PROMPTS[0], cache_salt="a", request_id="x" * 255)
    with pytest.raises(InvalidFieldError, match="request_id: 255 characters"):
        await commands_of(router(), A).select(request)


async def test_sessions_of_tenants_are_apart():
    seen = []

    class Noting(Commands):
        async def select(self, request):
            seen.append(request.session_id)
            return await super().select(request)

    commands = router()
    noting = Noting(commands.core, commands._outbox, RouterMetrics())
    for who in (A, B):
        request = SelectRequest(token_ids=PROMPTS[0], cache_salt=who.tenant, session_id="s")
        await commands_of(noting, who).select(request)
    assert seen == ["a/s", "b/s"]


def test_whoever_is_bound_to_no_tenant_has_the_commands_themselves():
    commands = router()
    assert commands_of(commands, ANYBODY) is commands
    assert commands_of(commands, structs.replace(A, tenant=None)) is commands


def test_no_command_passes_a_tenant_by():
    public = {name for name in vars(Commands) if not name.startswith("_")}
    assert public <= vars(TenantCommands).keys()
