"""What tenants of a shared fleet see of each other: nothing but load."""

from contextlib import suppress
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from router.api.caller_commands import (
    Book,
    CallerCommand,
    OverlapScores,
    PotentialLoads,
    Preview,
    ReadShadow,
)
from router.api.commands import Commands
from router.api.prompt_hashing import THREAD_TOKENS
from router.api.tenants import RULES, to_tenant
from router.config.router import RouterConfig
from router.core.commands import Free, PrefillComplete, Select, Submit, UpsertWorker
from router.core.core import RouterCore
from router.errors import InvalidFieldError, WorkerNotFoundError
from router.indexer.factory import make_indexer
from router.ingest.effect_runner import EffectRunner
from router.observability.metrics import RouterMetrics
from router.protocol.replies import Decision
from router.protocol.requests import (
    BookRequest,
    ConfigOverride,
    PotentialLoadsRequest,
    PromptRequest,
    SelectRequest,
)
from router.protocol.subjects import Subjects
from router.runtime.process.settings import configured
from router.runtime.security.caller import Caller
from router.runtime.security.errors import ForbiddenError
from router.sequence.active.errors import DuplicateReservationError, ReservationNotFoundError
from support.values.builders import announcement

PROMPTS = [list(range(40)), [*range(20), *range(100, 120)], list(range(500, 540))]
WORKERS = (1, 2)


def caller(name, **fields):
    defaults = {"tenant": name, "cache_salts": frozenset((name,))}
    return Caller(f"token-of-{name}", frozenset(("route",)), **{**defaults, **fields})


A, B = caller("a"), caller("b")


def router(**fields):
    """The commands of a router that guesses caches from what it books."""
    config = configured(RouterConfig, use_kv_events=False, approximate_ttl_s=1e6, **fields)
    core = RouterCore(config.core, lambda: make_indexer(config.index_settings), Random(5))
    for worker_id in WORKERS:
        core.handle(UpsertWorker(announcement(worker_id, agent_is_engine=False)), 0.0)
    core.handle(UpsertWorker(announcement(9, agent_is_engine=False, routing_group="b-only")), 0.0)
    metrics = RouterMetrics()
    effect_runner = EffectRunner(Subjects("test"), metrics, has_bus=False, republish=lambda _: None)
    return Commands(core, effect_runner, metrics)


def reserve(who, prompt, worker_id, **fields):
    return BookRequest(
        token_ids=PROMPTS[prompt], worker_id=worker_id, cache_salt=who.tenant, **fields
    )


def perform(commands, steps):
    """Steps of several callers, under the same ids; steps without a booking are skipped."""
    for who, kind, prompt, worker_id, request_id in steps:
        select = SelectRequest(token_ids=PROMPTS[prompt], cache_salt=who.tenant)
        command = {
            "reserve": Book(reserve(who, prompt, worker_id, request_id=request_id)),
            "select": Select(select),
            "prefill_complete": PrefillComplete(request_id),
            "free": Free(request_id),
        }[kind]
        with suppress(DuplicateReservationError, ReservationNotFoundError):
            commands.handle(command, who)


def seen_by(commands, who):
    """The overlap of every rank with every prompt, as a caller sees it."""
    requests = [PromptRequest(token_ids=prompt, cache_salt=who.tenant) for prompt in PROMPTS]
    return [commands.handle(OverlapScores(request), who) for request in requests]


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
    shared, alone = router(), router()
    perform(shared, steps)
    perform(alone, [step for step in steps if step[0] is A])
    assert seen_by(shared, A) == seen_by(alone, A)


def test_bookings_are_visible_to_their_tenant_only():
    commands = router()
    commands.handle(Book(reserve(A, 0, 1, request_id="r")), A)
    for who, blocks in ((A, 10), (B, 0)):
        reply = seen_by(commands, who)[0]
        assert max(each.device_blocks for each in reply.workers) == blocks


def test_the_same_ids_are_different_requests_of_different_tenants():
    commands = router()
    reply = commands.handle(Book(reserve(A, 0, 1, request_id="r")), A)
    assert reply.request_id == "r"
    with pytest.raises(ReservationNotFoundError, match="reservation r not found"):
        commands.handle(Free("r"), B)
    with pytest.raises(ReservationNotFoundError):
        commands.handle(PrefillComplete("a/r"), B)
    commands.handle(Book(reserve(B, 0, 1, request_id="r")), B)
    with pytest.raises(DuplicateReservationError, match="reservation r is"):
        commands.handle(Book(reserve(A, 0, 1, request_id="r")), A)
    commands.handle(Free("r"), A)
    commands.handle(Free("r"), B)


def test_a_decision_has_the_id_that_was_given():
    commands = router()
    request = SelectRequest(token_ids=PROMPTS[0], cache_salt="a", request_id="r", tenant="a")
    assert commands.handle(Submit(request), A).request_id == "r"
    commands.handle(Free("r"), A)


async def test_long_prompt_of_a_tenant_is_hashed_on_a_thread_under_its_ids():
    commands = router()
    request = SelectRequest(token_ids=[7] * (THREAD_TOKENS + 1), cache_salt="a", request_id="r")
    reply = commands.handle(Submit(request), A)
    assert not isinstance(reply, Decision)
    assert (await reply).request_id == "r"
    with pytest.raises(DuplicateReservationError, match="reservation r is"):
        await commands.reply_to(Submit(request), A)
    commands.handle(Free("r"), A)


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
def test_request_of_another_tenant_is_refused(fields, field):
    with pytest.raises(ForbiddenError) as refusal:
        router().handle(Select(SelectRequest(token_ids=PROMPTS[0], **fields)), A)
    assert refusal.value.field == field


def test_a_tenant_stays_in_its_groups_whichever_way_it_asks():
    who, commands = caller("a", routing_groups=frozenset(("default",))), router()
    prompt = {"token_ids": PROMPTS[0], "cache_salt": "a", "routing_group": "b-only"}
    for command in (
        Select(SelectRequest(**prompt)),
        Submit(SelectRequest(**prompt, request_id="r")),
        Preview(SelectRequest(**prompt), 1),
        Book(BookRequest(**prompt, request_id="r", worker_id=9)),
        Book(BookRequest(routing_group="b-only", request_id="r")),
        PotentialLoads(PotentialLoadsRequest(**prompt)),
        OverlapScores(PromptRequest(**prompt)),
    ):
        with pytest.raises(ForbiddenError, match="b-only"):
            commands.handle(command, who)
    with pytest.raises(WorkerNotFoundError):
        commands.handle(Book(reserve(A, 0, 9, request_id="r")), who)


def test_tenant_with_any_salt_may_send_sequence_hashes():
    request = SelectRequest(sequence_hashes=list(range(8)), isl_tokens=32)
    any_salt = caller("a", cache_salts=frozenset(("*",)))
    assert router().handle(Select(request), any_salt).isl_tokens == 32


@pytest.mark.parametrize("make", [Select, Submit, lambda request: Preview(request, 4)])
def test_strict_priority_above_the_token_is_refused(make):
    operator = Caller("operator", frozenset(("route",)))
    limited = structs.replace(operator, max_strict_priority=3)
    for who, most in ((A, 0), (caller("a", max_strict_priority=2), 2), (limited, 3)):
        for asked in (most, most + 1):
            request = SelectRequest(
                token_ids=PROMPTS[0], cache_salt=who.tenant, strict_priority=asked
            )
            if asked == most:
                assert router().handle(make(request), who)
                continue
            allowed = rf"strict_priority: {asked} is above .* \(allowed: 0 to {most}\)"
            with pytest.raises(ForbiddenError, match=allowed):
                router().handle(make(request), who)
    highest = SelectRequest(token_ids=PROMPTS[0], strict_priority=2**32 - 1)
    assert router().handle(make(highest), operator)


def test_a_tenants_prompt_is_never_hidden_from_placement():
    hidden = ConfigOverride(track_prefill_tokens=False)
    select = SelectRequest(
        token_ids=PROMPTS[0], cache_salt="a", router_config_override=hidden, request_id="r"
    )
    book = reserve(A, 0, 1, request_id="r", router_config_override=hidden)
    for command in (Select(select), Submit(select), Book(book), Preview(select, 4)):
        with pytest.raises(ForbiddenError, match="track_prefill_tokens: false hides"):
            router().handle(command, A)
    for override in (ConfigOverride(track_prefill_tokens=True), ConfigOverride(), None):
        request = structs.replace(select, router_config_override=override)
        assert router().handle(Submit(request), A).request_id == "r"
    assert router().handle(Submit(select), Caller("gateway", frozenset(("route",))))


def test_an_id_that_would_not_fit_is_refused():
    request = SelectRequest(token_ids=PROMPTS[0], cache_salt="a", request_id="x" * 255)
    with pytest.raises(InvalidFieldError, match="request_id: 255 characters"):
        router().handle(Select(request), A)


def test_sessions_of_tenants_are_apart():
    request = SelectRequest(token_ids=PROMPTS[0], session_id="s")
    for who in (A, B):
        own = structs.replace(request, cache_salt=who.tenant)
        assert to_tenant(Select(own), who).request.session_id == f"{who.tenant}/s"


def test_every_command_has_a_rule_for_tenants():
    assert set(get_args(CallerCommand)) - set(RULES) == {ReadShadow}


def test_command_without_a_rule_is_refused_for_tenants():
    class Unruled(Struct):
        """A command that was added without a rule."""

    for command in (ReadShadow(), Unruled()):
        with pytest.raises(ForbiddenError, match="data of all"):
            router().handle(command, A)
