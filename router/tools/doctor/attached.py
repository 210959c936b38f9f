"""The engine at a URL as a router would attach it: the same sentence, and the sockets."""

from msgspec.structs import replace

from router.discovery.attach import sentences
from router.discovery.attach.attachment import attachment
from router.discovery.attach.engine_client import EngineClient
from router.discovery.attach.engine_server import Server
from router.discovery.attach.engine_url import parsed_url
from router.discovery.attach.socket_choice import socket_choices
from router.tools.doctor.config import DoctorConfig
from router.tools.doctor.findings import Finding, ok, warning, wrong

_WHY = "without events the router estimates what this engine has cached"


async def attached(config: DoctorConfig) -> tuple[DoctorConfig, Finding]:
    """Return the settings with the sockets that the engine names, and what a router says of it.

    Without sockets they stay empty. Raises InvalidFieldError for a URL that none would attach.
    """
    engine = parsed_url(config.url, "url")
    client = EngineClient(engine.url)
    try:
        seen = await Server(client).look()
    finally:
        await client.close()
    (*_, choice) = socket_choices(engine, seen, follows_others=True, may_guess=False)
    found = attachment(engine, seen, choice, was_up=False)
    if not found.is_up:
        text = found.sentence.removesuffix(sentences.RETRYING)
        fix = "give --url as http://host:port of the engine's OpenAI server"
        return config, wrong("attach", text, "it is asked there for all the rest", fix)
    if not choice.sockets:
        return config, warning("attach", found.sentence, _WHY, "or name them by --zmq")
    first = choice.sockets[min(choice.sockets)]
    named = replace(
        config,
        url=engine.url,
        zmq=first.events,
        replay=config.replay or first.replay or "",
        topic=config.topic or first.topic,
    )
    say = ok("attach", found.sentence)
    return named, say if found.caution is None else warning("attach", found.sentence)
