"""A worker with a reference engine that is wired otherwise than it announces.

python miswired_engine.py SETTING OPTIONS…    options of `kv-worker-agent run`
"""

import sys

from msgspec.structs import replace

from router.protocol.values import Identity, Tier
from worker_agent import cli
from worker_agent.config.reference import ReferenceConfig
from worker_agent.reference import server
from worker_agent.reference.chat import ChatRequest, TokenizeRequest
from worker_agent.reference.runner import RankRunner

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
    publish = RankRunner._publish

    def of_the_device(self, tier, change):
        if tier is Tier.DEVICE:
            publish(self, tier, change)

    RankRunner._publish = of_the_device


if __name__ == "__main__":
    command, *options = sys.argv[1:]
    setting = next(each for each in options if each.startswith("--wired-wrongly="))
    options.remove(setting)
    globals()[setting.partition("=")[2]]()
    sys.exit(cli.main([command, *options]))
