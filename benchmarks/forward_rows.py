"""The sections of `forward.py` about whole answers."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import httpx
from forward_servers import MODEL, PATH, Scale, Served, engine, ours, ours_separate, peer
from msgspec import structs
from rows import Row
from service_load import Address, Load, Script, request, run_load
from tokenizers import Tokenizer
from tokenizing import BOOKS, train

TOKENS = 1000
AT_ONCE = 64
IDS_GOAL, TEXT_GOAL, RATE_GOAL = 1.3, 1.5, 1.0
PATIENCE_S = 60.0


def latency(scale: Scale) -> list[Row]:
    """Return what is added to a request of token ids, beside vllm-router."""
    with (
        engine() as direct,
        ours(direct.port) as own,
        peer("vllm-router", direct.port, [1, 2]) as other,
    ):
        return _added_rows(_rounds(scale, (direct, own, other), _ids), "vllm-router", IDS_GOAL)


def separate(scale: Scale) -> list[Row]:
    """Return the same of an endpoint in a process of its own."""
    with (
        engine() as direct,
        ours_separate(direct.port) as own,
        peer("vllm-router", direct.port, [1, 2]) as other,
    ):
        return _added_rows(_rounds(scale, (direct, own, other), _ids), "vllm-router", IDS_GOAL)


def text(scale: Scale) -> list[Row]:
    """Return what is added to a request of text that is new, tokenized here; beside smg."""
    with TemporaryDirectory() as folder:
        train(Path(folder), BOOKS.read_text())
        file = f"{folder}/tokenizer.json"
        prompts = _texts(Tokenizer.from_file(file))
        with (
            engine(tokenizer=file) as direct,
            ours(direct.port, "--tokenizer", folder) as own,
            peer("smg", direct.port, "one two") as other,
        ):
            _until_verified(own.port)
            rounds = _rounds(scale, (direct, own, other), lambda _: _script(next(prompts)))
            _check_tokenized_here(own.port, scale)
            return _added_rows(rounds, "smg", TEXT_GOAL)


def rate(scale: Scale) -> list[Row]:
    """Return requests a second that a core can serve, and its processor time of each."""
    with (
        engine() as direct,
        ours(direct.port) as own,
        peer("vllm-router", direct.port, [1, 2]) as other,
    ):
        found = _rounds(scale, (own, other), _ids, AT_ONCE)
    seen = [median(load.per_s for load in loads) for loads in found]
    spent_s = [median(load.processor_s_each for load in loads) for loads in found]
    return [
        Row(
            "vllm-router, of a core", *(1 / each for each in spent_s), "1/s", RATE_GOAL, lower=False
        ),
        Row("vllm-router, as measured", *seen, "1/s", RATE_GOAL, lower=False),
    ]


def _rounds(
    scale: Scale, sides: Sequence[Served], script: Callable[[int], Script], at_once: int = 1
) -> list[list[Load]]:
    """Return the loads of each side by round, the sides in turn; the first round warms up."""
    loads: list[list[Load]] = [[] for _ in sides]
    requests = scale.requests if at_once == 1 else scale.requests_together
    for number in range(scale.rounds + 1):
        for kept, served in zip(loads, sides, strict=True):
            begin = number * requests
            scripts = [script(each) for each in range(begin, begin + requests)]
            before_s = served.processor_s
            load = run_load([Address(served.port)], scripts, at_once)
            if load.refusals:
                raise RuntimeError(f"port {served.port}: {load.refusals[0].answer[:300]!r}")
            kept.append(structs.replace(load, processor_s=served.processor_s - before_s))
    return [each[1:] for each in loads]


def _added_rows(rounds: Sequence[Sequence[Load]], name: str, goal: float) -> list[Row]:
    """Return the rows of ours and a peer: p50 added to what the engine takes in the same round,
    and processor time of a request.
    """
    direct, *sides = rounds
    added = [
        1e6 * median(each.p50_s() - base.p50_s() for each, base in zip(side, direct, strict=True))
        for side in sides
    ]
    spent = [1e6 * median(each.processor_s_each for each in side) for side in sides]
    return [
        Row(f"beside {name}", *added, "µs", goal, lower=True),
        Row(f"beside {name}, processor", *spent, "µs", goal, lower=True),
    ]


def _ids(number: int) -> Script:
    first = 1000 + number % 100_000
    return _script([first, *(each * 37 % 50_000 for each in range(TOKENS - 1))])


def _script(prompt: object) -> Script:
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
    return ((request(PATH, body, "application/json"),),)


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts of exactly `TOKENS` tokens, of words in an order that never came before."""
    dialogues = json.loads(BOOKS.read_text())["conversations"]
    words = " ".join(_words(dialogues)).split()
    counts = {word: len(tokenizer.encode(f" {word}").ids) for word in set(words)}
    single = next(word for word in words if word.isalpha() and counts[word] == 1)
    random, number = Random(7), 0
    while True:
        chosen, tokens, number = [], 0, number + 1
        while tokens < TOKENS:
            word = random.choice(words)
            word = word if tokens + counts[word] <= TOKENS - 8 else single
            chosen.append(word)
            tokens += counts[word]
        prompt = f"{' '.join(chosen)}"
        while (missing := TOKENS - len(tokenizer.encode(prompt).ids)) > 0:
            prompt += f" {single}" * missing
        if not missing:
            yield prompt


def _words(value: object) -> Iterator[str]:
    """Yield all texts of a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _words(each)


def _until_verified(port: int) -> None:
    """Wait until the engine has agreed with the tokenizer. Raises TimeoutError."""
    deadline_s, found = time.monotonic() + PATIENCE_S, {}
    while time.monotonic() < deadline_s:
        found = httpx.get(f"http://127.0.0.1:{port}/ready?verbose").json()
        standing = found.get("tokenizers", {}).get("standing", {}).get(MODEL, {})
        if standing.get("text") == "agrees":
            return
        time.sleep(0.2)
    raise TimeoutError(f"the tokenizer is not verified: {found}")


def _check_tokenized_here(port: int, scale: Scale) -> None:
    """Raise RuntimeError if prompts were not tokenized here, or engines count otherwise."""
    found = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    counts = dict(re.findall(r'_forward_tokenizations_total{outcome="(\w+)"} (\S+)', found))
    asked = scale.requests * (scale.rounds + 1)
    if float(counts.get("local", 0)) < asked or float(counts.get("disagreed", 0)):
        raise RuntimeError(f"prompts of {asked} requests were tokenized by {counts}")
