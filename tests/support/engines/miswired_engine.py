"""A worker with a reference engine that is wired otherwise than it announces.

python miswired_engine.py SETTING OPTIONS…    options of `kv-worker-agent run`
"""

import sys

from msgspec.structs import replace

from router.protocol.values import Identity, Tier
from router.publisher.event_publisher import KvEventPublisher
from worker_agent import cli
from worker_agent.config.reference import ReferenceConfig
from worker_agent.reference import server
from worker_agent.reference.chat import ChatRequest, TokenizeRequest

ANNOUNCED_BLOCK_SIZE = 64


def nothing():
    """As it should be."""


def block_size():
    """Announce larger blocks than the engine has."""
    ReferenceConfig.identity = property(
        lambda self: Identity(self.naming.scheme, ANNOUNCED_BLOCK_SIZE)
    )


def salt():
    """The engine salts what comes without a salt."""
    checked = server.checked

    def salted(body, *arguments):
        request = checked(body, *arguments)
        return replace(request, cache_salt=request.cache_salt or "pepper")

    server.checked = salted


def chat_template():
    """Chats begin with a tag that /tokenize knows nothing of."""
    rendered = ChatRequest.rendered
    ChatRequest.rendered = lambda self, messages: "<begin>" + rendered(self, messages)


def tokenizer():
    """/tokenize is of a model that knows double letters."""
    tokens = TokenizeRequest.tokens.fget

    def other(self):
        said = tokens(self)
        return [b for a, b in zip([None, *said], said, strict=False) if a != b]

    TokenizeRequest.tokens = property(other)


def offload():
    """Publish nothing of what the host keeps."""
    for name in ("stored", "removed", "cleared"):
        setattr(KvEventPublisher, name, of_the_device(getattr(KvEventPublisher, name)))


def of_the_device(publish):
    def published(self, tier=None, *what):
        if tier in (Tier.DEVICE, None):
            publish(self, tier, *what)

    return published


if __name__ == "__main__":
    command, *options = sys.argv[1:]
    setting = next(each for each in options if each.startswith("--wired-wrongly="))
    options.remove(setting)
    globals()[setting.partition("=")[2]]()
    sys.exit(cli.main([command, *options]))
