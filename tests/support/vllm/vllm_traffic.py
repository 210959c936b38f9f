"""Conversations of many users, as token ids: shared beginnings, salts, repeats, equal decodes."""

from random import Random

from msgspec import Struct

from support.engines.tiny_llama import WORDS
from support.vllm.vllm_engines import BLOCK_SIZE

SYSTEM_TOKENS = (64, 100, 160, 257)
LIVE_CONVERSATIONS = 14
LONGEST_TOKENS = 900
SALTS = (None, None, None, "tenant-a", "tenant-b")


class Ask(Struct, frozen=True):
    """A prompt, to be sent `times` times at once; `messages`: of a chat that it is made from."""

    token_ids: list[int]
    cache_salt: str | None
    max_tokens: int = 8
    copies: int = 1
    messages: list[dict[str, str]] | None = None


class _Conversation:
    def __init__(self, beginning: list[int], cache_salt: str | None) -> None:
        self.token_ids = beginning
        self.cache_salt = cache_salt
        self.last: Ask | None = None


class Traffic:
    """An endless stream of prompts; the same for the same seed and the same answers."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._systems = [self._words(count) for count in SYSTEM_TOKENS]
        self._conversations: list[_Conversation] = []
        self._asked = self._new()

    def next(self) -> Ask:
        """The next prompt; call `answered` before the one after that."""
        kind = self._rng.random()
        known = [each for each in self._conversations if each.last is not None]
        if kind < 0.7 or not known:
            return self._next_turn()
        self._asked = self._rng.choice(known)
        assert self._asked.last is not None
        token_ids = self._asked.last.token_ids
        if kind < 0.8:
            return Ask(token_ids, self._rng.choice(SALTS))
        # Equal decodes fill blocks of their own with equal tokens: copies.
        copies = self._rng.choice((1, 2, 4))
        return Ask(token_ids, self._asked.cache_salt, 3 * BLOCK_SIZE, copies)

    def answered(self, ask: Ask, answer: list[int]) -> None:
        """Take the answer into the conversation, unless it was asked under another's salt."""
        if ask.cache_salt == self._asked.cache_salt:
            self._asked.last = ask
            self._asked.token_ids = ask.token_ids + answer

    def _next_turn(self) -> Ask:
        self._asked = conversation = self._choose()
        token_ids = conversation.token_ids + self._words(self._rng.randint(1, 80))
        if self._rng.random() < 0.3:  # its last block is full: the engine computes that one anew
            token_ids = token_ids[: len(token_ids) // BLOCK_SIZE * BLOCK_SIZE] or token_ids
        return Ask(token_ids, conversation.cache_salt, self._rng.choice((1, 4, 40)))

    def _choose(self) -> _Conversation:
        conversations = self._conversations
        if len(conversations) < LIVE_CONVERSATIONS:
            conversations.append(self._new())
        i = self._rng.randrange(len(conversations))
        if len(conversations[i].token_ids) > LONGEST_TOKENS:
            conversations[i] = self._new()
        return conversations[i]

    def _new(self) -> _Conversation:
        return _Conversation(self._rng.choice(self._systems), self._rng.choice(SALTS))

    def _words(self, count: int) -> list[int]:
        return self._rng.choices(WORDS, k=count)
