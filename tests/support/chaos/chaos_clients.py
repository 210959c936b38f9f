"""Clients that ask, hang up whenever they like, and know what every whole answer has to be."""

import asyncio
import json
import re
import time
from collections import Counter
from contextlib import suppress

import httpx

from support.fleets.forwarding import lines

VANISH_CHANCE = 0.1
PATIENCE_S = 120.0
NUMBER = re.compile(r"\b\d+\b")


class Clients:
    """`outcomes`: what became of requests; `waiting`: since when, by request id; `stalls`: moments
    in which nothing ran here, nor engines, so that they were late. `faults`: what engines did, by
    request id.
    """

    def __init__(self, dice, faults):
        self.outcomes = Counter()
        self.waiting = {}
        self.requests = self.stalls = 0
        self._dice = dice
        self._faults = faults
        self._failed = []
        self._never = []

    @property
    def wrong(self):
        """What no engine's fault is to blame for, nor a machine that stood still."""
        unblamed = [each for each in self._failed if not self._faults.get(each[0])]
        late = [each for each in unblamed if self.stalls and "timeout" in each[1]]
        return [*self._never, *(each for each in unblamed if each not in late)]

    async def ask_until(self, ends_s, url):
        """One after the other."""
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            while time.monotonic() < ends_s:
                self.requests += 1
                request_id = f"r{self.requests}"
                self.waiting[request_id] = time.monotonic()
                try:
                    outcome = await self._ask(client, request_id)
                finally:
                    del self.waiting[request_id]
                self.outcomes[outcome] += 1
                if outcome.startswith("failed"):
                    self._failed.append((request_id, outcome))

    def summary(self):
        """How many came to what, in a few words."""
        summed = Counter()
        for outcome, times in self.outcomes.items():
            summed[NUMBER.sub("…", outcome)[:60]] += times
        return dict(summed.most_common())

    async def _ask(self, client, request_id):
        dice = self._dice
        tokens = dice.randint(1, 30)
        body = {"model": "default", "max_tokens": tokens, "stream": dice.random() < 0.7}
        path, first = "/v1/completions", dice.randint(1, 60)
        if dice.random() < 0.2:
            path, first = "/v1/chat/completions", 0
            body["messages"] = [{"role": "user", "content": "x" * dice.randint(1, 99)}]
        else:
            body["prompt"] = [dice.randrange(3)] * first
        vanishes_s = dice.uniform(0, 0.3) if dice.random() < VANISH_CHANCE else PATIENCE_S
        asking = client.post(path, json=body, headers={"x-request-id": request_id})
        try:
            async with asyncio.timeout(vanishes_s):
                answer = await asking
        except TimeoutError:
            return "vanished" if vanishes_s < PATIENCE_S else "failed: no answer"
        except httpx.HTTPError as error:
            return f"failed: {type(error).__name__}"
        return self._judged(answer, body["stream"], [*map(str, range(first, first + tokens))])

    def _judged(self, answer, is_stream, words):
        if answer.status_code != 200:
            return f"failed: {answer.status_code} {answer.text[:150]}"
        if not is_stream:
            with suppress(ValueError, LookupError):
                text = answer.json()["choices"][0]["text"]
                return "whole" if text.split() == words else f"failed: {text[:150]}"
            return f"failed: {answer.text[:150]}"
        said = lines(answer.text)
        received = _words(said)
        if received != words[: len(received)]:
            # No fault is an excuse for other words.
            self._never.append((answer.headers["x-request-id"], f"words {received} of {words}"))
        if said and said[-1] == "[DONE]" and received == words:
            return "whole"
        return f"failed: {said[-1][:150] if said else 'nothing'}"


def _words(said):
    """The words of a stream."""
    events = [json.loads(each) for each in said if each.startswith("{")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    texts = [each.get("text") or each.get("delta", {}).get("content", "") for each in choices]
    return "".join(texts).split()
