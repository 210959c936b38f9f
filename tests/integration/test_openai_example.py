"""The worked example, with OpenAI's own client, against real engines."""

from openai_client import RoutedCompletions, converse

from router.client import RouterClient
from servers import eventually


async def load(fleet):
    ((rank, *_),) = [scope["loads"] for scope in await fleet.get("/loads")]
    return rank["active_requests"], rank["potential_prefill_tokens"]


async def test_a_conversation_is_served_where_it_was_before(fleet):
    await fleet.start(workers=2)
    figures = await converse(fleet.url, "default", max_tokens=24)
    (first, nothing), *later = figures
    assert nothing == 0
    before = first
    for prompt_tokens, cached_tokens in later:
        assert before - 16 <= cached_tokens <= prompt_tokens
        before = prompt_tokens
    assert await load(fleet) == (0, 0)


async def test_an_answer_that_nobody_reads_to_its_end_frees_its_reservation(fleet):
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
