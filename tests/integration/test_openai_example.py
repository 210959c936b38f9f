"""The worked example, with OpenAI's own client, against real engines."""

import itertools

from openai_client import RoutedCompletions, converse

from router.client import RouterClient
from support.processes.servers import eventually


async def load(fleet):
    ((rank, *_),) = [scope["loads"] for scope in await fleet.get("/loads")]
    return rank["active_requests"], rank["potential_prefill_tokens"]


async def test_a_conversation_is_served_where_it_was_before(fleet):
    # The default policy may try the other worker, because its rate is unknown. This one may not.
    fleet.router_options |= {"policy": "dynamo-1.6"}
    await fleet.start(workers=2)
    await eventually(fleet.all_exact)
    figures = []
    async for prompt_tokens, cached_tokens in converse(fleet.url, "default", max_tokens=24):
        figures.append((prompt_tokens, cached_tokens))
        await fleet.until_drained()  # people read an answer for longer than events travel
    assert figures[0][1] == 0
    assert len(figures) > 2
    for (before, _), (prompt_tokens, cached_tokens) in itertools.pairwise(figures):
        assert before - 16 <= cached_tokens <= prompt_tokens
    assert await load(fleet) == (0, 0)


async def test_closed_stream_frees_its_reservation(fleet):
    await fleet.start(workers=1)
    async with RouterClient.over_http(fleet.url) as router:
        completions = RoutedCompletions(router, "default", lambda text: list(text.encode()))
        stream = completions.stream("Once upon a time " * 4, 512)
        assert (await anext(stream)).choices
        assert (await load(fleet))[0] == 1
        await eventually(lambda: is_prefilled(fleet))
        await stream.aclose()
        assert await load(fleet) == (0, 0)
        await completions.close()


async def is_prefilled(fleet):
    return await load(fleet) == (1, 0)
