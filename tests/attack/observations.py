"""What an attacker observes, by channel, and whether it depends on the lot."""

import json
import os
import re

from attack.statistics import NoPowerError, p_of_numbers, p_of_outcomes

ALPHA = 0.01
"""The probability of an alarm without a leak, of all channels together."""

TRIES = int(os.environ.get("ATTACK_TRIES", "1000"))

FRESH = frozenset(
    ("age_s", "at", "created", "event_id", "id", "request_id", "selection_id", "tokens",
     "token_ids", "sequence_hashes", "first_tokens", "text", "content")
)  # fmt: skip
"""Fields that are new in every response: clocks, ids, and what follows from the prompt alone."""

FRESH_HEADERS = frozenset(("date", "x-request-id", "content-length"))
LEAST_NUMBERS = 50
"""Tries in which a number must have been shown, for it to be a channel."""


class Observations:
    """Outcomes and numbers by channel, each with the lot of its try."""

    def __init__(self):
        self.outcomes, self.numbers = {}, {}

    def note_outcome(self, channel, lot, outcome):
        self.outcomes.setdefault(channel, []).append((lot, outcome))

    def note_number(self, channel, lot, number):
        self.numbers.setdefault(channel, []).append((lot, number))

    def note(self, channel, lot, reply, *, is_timed=False):
        """Note status, size, headers and body of a response, and its time if that is a channel."""
        self.note_outcome(f"{channel}: status", lot, reply.status)
        headers = [each for each in reply.headers if each[0] not in FRESH_HEADERS]
        names = sorted(name for name, _ in reply.headers)
        self.note_outcome(f"{channel}: headers", lot, (tuple(headers), tuple(names)))
        self.note_body(channel, lot, reply.body)
        if is_timed:
            self.note_number(f"{channel}: time", lot, reply.first_byte_s)

    def note_body(self, channel, lot, body):
        """Note the size of a body, its values without fresh ones, and its fractions as numbers."""
        self.note_number(f"{channel}: size", lot, len(body))
        fractions = []
        said = [_stable(document, "", fractions) for document in _documents(body)]
        self.note_outcome(f"{channel}: body", lot, json.dumps(said))
        for name, value in fractions:
            self.note_number(f"{channel}: {name}", lot, value)

    def p_values(self):
        """Return p of every channel that shows more than one value."""
        tested = {}
        for channel, seen in self.outcomes.items():
            lots, outcomes = zip(*seen, strict=True)
            if len(set(outcomes)) > 1:
                try:
                    tested[channel] = p_of_outcomes(lots, outcomes)
                except NoPowerError as error:
                    raise NoPowerError(f"{channel}: {error}") from error
        for channel, seen in self.numbers.items():
            lots, numbers = zip(*seen, strict=True)
            least = min(lots.count(0), lots.count(1))
            if len(set(numbers)) > 1 and least >= LEAST_NUMBERS // 2:
                tested[channel] = p_of_numbers(lots, numbers)
        return tested

    def leaks(self):
        """Return the channels that tell the lots apart: {channel: p}, by Bonferroni's correction.

        A channel that always shows the same can tell nothing, and is not counted.
        """
        tested = self.p_values()
        return {name: p for name, p in tested.items() if p < ALPHA / len(tested)}

    def summary(self):
        """Return a line for the report of a run."""
        tested = self.p_values()
        name, least = min(tested.items(), key=lambda each: each[1], default=("none", 1.0))
        same = len(self.outcomes) + len(self.numbers) - len(tested)
        return (
            f"{len(tested)} channels that vary, {same} that never do; the smallest p is "
            f"{least:.2g} ({name}), an alarm is below {ALPHA / max(1, len(tested)):.2g}"
        )


def _documents(body):
    """The JSON documents of a response, a stream's events included."""
    text = body.decode()
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE) or [text]
    return [json.loads(each) for each in events if each not in ("", "[DONE]")]


def _stable(value, name, fractions):
    """Return a value without what is fresh in every response; collects fractions by name."""
    if isinstance(value, dict):
        return {
            key: None if key in FRESH else _stable(each, f"{name}.{key}", fractions)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_stable(each, f"{name}[{n}]", fractions) for n, each in enumerate(value)]
    if isinstance(value, float):
        fractions.append((name, value))
        return "a fraction"
    return value


NOT_OF_REQUESTS = re.compile(r"#|process_|python_|.*(age_s|_age_seconds|uptime|_created|_bytes)\b")


def metric_values(text):
    """Return the values of metrics, without those of the process as such."""
    lines = [line for line in text.splitlines() if not NOT_OF_REQUESTS.match(line)]
    pairs = [line.rpartition(" ")[::2] for line in lines]
    return {name: float(value) for name, value in pairs}


class MetricsView:
    """How the metrics of processes change from try to try, as a token of monitoring sees them."""

    def __init__(self, clients):
        """Initialise from connections by the name of their process."""
        self._clients = clients
        self._before = self._read()

    def _read(self):
        return {
            f"metrics of {process}: {name}": value
            for process, client in self._clients.items()
            for name, value in metric_values(client.ask("GET", "/metrics").body.decode()).items()
        }

    def note(self, observations, lot):
        now = self._read()
        for name, value in now.items():
            observations.note_number(name, lot, value - self._before.get(name, 0.0))
        self._before = now
