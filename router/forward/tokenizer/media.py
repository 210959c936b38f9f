"""Images and other media in prompts: which blocks have them, and what is known without hashes."""

from collections.abc import Sequence
from itertools import takewhile
from secrets import randbits
from typing import Any

import msgspec

from router.forward.apis.api import CHAT
from router.forward.request_body import CompletionRequest, read_completion_request
from router.forward.tokenizer.engine_client import Features
from router.protocol.requests import BlockMmInfo, MmObject
from router.publisher.engine_events.extra_keys import mm_hash

BlockMmInfos = list[BlockMmInfo | None]

FILLERS = ("a", "b")
"""Two texts in place of an image. At the image's place, one at most continues as the image does."""

_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode


def block_mm_infos(features: Features, block_size: int) -> BlockMmInfos | None:
    """Return the objects of each block, or None if hashes and places do not belong together."""
    objects: dict[int, list[MmObject]] = {}
    for modality, hashes in features.mm_hashes.items():
        places = features.mm_placeholders.get(modality, [])
        if len(places) != len(hashes):
            return None
        for identifier, place in zip(hashes, places, strict=True):
            end = place.offset + place.length
            seen = MmObject(mm_hash(identifier), [(place.offset, end)])
            for block in range(place.offset // block_size, -(-end // block_size)):
                objects.setdefault(block, []).append(seen)
    if not objects:
        return []
    return [
        BlockMmInfo(objects[block]) if block in objects else None
        for block in range(max(objects) + 1)
    ]


def unknown_from(token: int, block_size: int) -> BlockMmInfos:
    """Return infos by which no block from that of a token on is found in any cache."""
    unique = BlockMmInfo([MmObject(randbits(64))])
    return [*[None] * (token // block_size), unique]


def until_media(chat: CompletionRequest, filler: str) -> CompletionRequest:
    """Return a chat up to its first message with media, which become a text."""
    kept: list[dict[str, Any]] = []
    for message in _messages(bytes(chat.fields["messages"])):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if all(_is_text(part) for part in parts):
            kept.append(message)
            continue
        texts = [part if _is_text(part) else {"type": "text", "text": filler} for part in parts]
        kept.append({**message, "content": texts})
        break
    fields = {**chat.fields, "messages": kept}
    return read_completion_request(CHAT, msgspec.json.encode(fields))


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
