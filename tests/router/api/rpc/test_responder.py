import asyncio
from contextlib import asynccontextmanager

from router.api.rpc.responder import BusResponse, Responder
from router.observability.metrics import RouterMetrics


@asynccontextmanager
async def responding(bus, answer):
    """A responder on `subject`; a refusal is its text."""

    def refuse(message, error):
        assert message.data == b""
        return BusResponse(str(error).encode())

    responder = Responder("subject", "group", answer, refuse, RouterMetrics(), 9)
    listening = asyncio.Event()
    running = asyncio.create_task(responder.run(bus, listening.set))
    await listening.wait()
    yield lambda data: bus.client.request("subject", data, timeout=60)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_failing_request_is_answered_and_ends_nothing(bus, caplog):
    async def fail_later():
        raise ValueError("a bug")

    async def answer(message):
        if message.data == b"now":
            raise ZeroDivisionError
        return fail_later() if message.data == b"later" else BusResponse(b"right")

    async with responding(bus, answer) as ask:
        for data, said in ((b"now", b"internal error"), (b"later", b"internal error")):
            assert (await ask(data)).data == said
        assert (await ask(b"")).data == b"right"
    assert "ZeroDivisionError" in caplog.text
    assert "ValueError: a bug" in caplog.text
