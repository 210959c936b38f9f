"""Engines that are asked again and again."""

import asyncio

import pytest

from router.publisher.follower.http_fetch import poll_forever


async def test_unanswered_request_gets_a_new_connection():
    """One that was given up while it was made may count as busy for ever."""
    outcomes, clients = [True, False, False, True, True], []

    async def ask(client):
        clients.append(client)
        if len(clients) > len(outcomes):
            raise asyncio.CancelledError
        return outcomes[len(clients) - 1]

    with pytest.raises(asyncio.CancelledError):
        await poll_forever(ask, timeout_s=60.0, interval_s=0.0, max_pause_s=0.0)
    first, again, second, third, still, last = clients
    assert first is again
    assert third is still is last
    assert len({id(each) for each in (first, second, third)}) == 3
    assert all(each.is_closed for each in clients)
