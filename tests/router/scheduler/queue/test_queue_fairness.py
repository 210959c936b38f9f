"""Two equal tenants, one of which requests ten times as much: what the other notices, in virtual
time.

Ranks compute one prompt after the other, at a rate of tokens, and are busy above a limit of booked
tokens.
"""

import heapq
from collections import defaultdict
from itertools import count
from random import Random

import numpy as np
import pytest

from router.scheduler.queue.admission_queue import AdmissionQueue
from router.scheduler.queue.flows import Waiting
from router.scheduler.queue.policy_classes import Classes, PolicyClass

RANKS = 16
TOKENS_PER_S = 8000.0
MEAN_TOKENS = 4000
BUSY_TOKENS = 4096
RUN_S, WARM_UP_S = 240.0, 30.0


def arrivals(seed, tenant, load, of_ranks):
    """Poisson, with prompts of very different lengths."""
    rng, now_s, found = Random(seed), 0.0, []
    rate = load * of_ranks * TOKENS_PER_S / MEAN_TOKENS
    while now_s < RUN_S:
        now_s += rng.expovariate(rate)
        tokens = int(MEAN_TOKENS * rng.lognormvariate(-0.5, 1.0))
        found.append((now_s, tenant, max(64, min(tokens, 60_000))))
    return found


def p99(requests, ranks, key=lambda tenant: tenant):
    """p99 of the wait in the queue, and of the time to the first token, of tenant `a`."""
    queue = AdmissionQueue(Classes([PolicyClass(name="all", prefill_busy_threshold=BUSY_TOKENS)]))
    tickets, tenants = count(), {}
    booked, free_s, ends, measured = [0] * ranks, [0.0] * ranks, [], defaultdict(list)

    def is_free(_, settings, part):
        return min(booked) <= part * settings.prefill_busy_threshold

    def send(request, now_s):
        rank = booked.index(min(booked))
        free_s[rank] = max(now_s, free_s[rank]) + request.isl_tokens / TOKENS_PER_S
        booked[rank] += request.isl_tokens
        heapq.heappush(ends, (free_s[rank], rank, request.isl_tokens))
        times_s = (now_s - request.since_s, free_s[rank] - request.since_s)
        if request.since_s > WARM_UP_S:
            measured[tenants[request.ticket]].append(times_s)

    for arrival in [*sorted(requests), (RUN_S, "end", 1)]:
        while ends and ends[0][0] <= arrival[0]:
            now_s, rank, tokens = heapq.heappop(ends)
            booked[rank] -= tokens
            while (request := queue.take(is_free, now_s)) is not None:
                send(request, now_s)
        now_s, tenant, tokens = arrival
        ticket = next(tickets)
        tenants[ticket] = tenant
        queue.push(
            Waiting(
                ticket=ticket, tenant=key(tenant), order=now_s, isl_tokens=tokens,
                since_s=now_s, expires_s=1e9,
            ), 0, ranks, now_s,
        )  # fmt: skip
        while (request := queue.take(is_free, now_s)) is not None:
            send(request, now_s)
    return np.percentile(measured["a"], 99, axis=0)


@pytest.fixture(scope="module", params=[0.5, 0.7, 0.9])
def worlds(request):
    """p99s of `a` alone on half the fleet, beside `b` on all of it, and so without tenants."""
    a = arrivals(1, "a", request.param, RANKS / 2)
    b = arrivals(2, "b", 10 * request.param, RANKS / 2)
    blind = p99(a + b, RANKS, key=lambda _: "")
    return p99(a, RANKS // 2), p99(a + b, RANKS), blind


def test_small_tenant_waits_no_longer_than_alone_on_half_the_fleet(worlds):
    alone, beside, _ = worlds
    assert beside[0] <= 1.2 * alone[0]


def test_small_tenant_has_no_later_first_token_than_alone_on_half_the_fleet(worlds):
    alone, beside, _ = worlds
    assert beside[1] <= 1.2 * alone[1]


def test_without_tenants_the_small_one_waits_longer(worlds):
    alone, _, blind = worlds
    assert blind[0] > 20 * alone[0]
