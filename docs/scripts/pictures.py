"""The pictures of docs/concepts.md and docs/architecture.md."""

import tomllib
from pathlib import Path

from svg import Picture

from router.sequence.hashing.block_hashes import chain_hash, local_block_hashes, token_array

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SYSTEM = [101, 102, 103, 104, 105, 106, 107, 108]
PROMPTS = {
    "prompt A": [*SYSTEM, 201, 202, 203, 204, 205],
    "prompt B": [*SYSTEM, 301, 302, 303, 304, 305],
}


def blocks() -> str:
    """Two prompts with one beginning, hashed as routers hash them."""
    picture = Picture(720, 250, "Two prompts share the names of the blocks that they share")
    for row, (name, tokens) in enumerate(PROMPTS.items()):
        y = 40 + 110 * row
        picture.text(10, y + 30, name, "title", "start")
        parent = None
        for number, local in enumerate(local_block_hashes(token_array(tokens), 4).tolist()):
            parent = chain_hash(parent, local)
            kind = "held" if number < 2 else "warm"
            words = " ".join(map(str, tokens[4 * number : 4 * number + 4]))
            picture.box(90 + 170 * number, y, 150, 56, [words, f"{parent:016x}"], kind)
            if number:
                picture.arrow((70 + 170 * number, y + 28), (90 + 170 * number, y + 28))
        picture.box(600, y, 115, 56, [str(tokens[-1]), "not full: no name"])
    picture.text(245, 20, "the same content after the same content: the same name", "small")
    picture.text(505, 20, "another content: another name", "small")
    picture.text(
        360,
        240,
        "block size 4; a name is the sequence hash, XXH3-64 of the parent's name and the block's own hash",
        "small",
    )
    return picture.svg()


def trust() -> str:
    """Draw the trust states of a rank, and their transitions."""
    picture = Picture(720, 300, "Trust states of a rank and what leads from one to the other")
    picture.box(30, 110, 130, 60, ["blind", "nothing is known"], "bad")
    picture.box(280, 30, 160, 60, ["exact", "proven within 1 s"], "held")
    picture.box(540, 110, 150, 60, ["lagging", "right, but behind"], "warm")
    picture.box(280, 200, 160, 60, ["degraded", "may be wrong"], "bad")
    picture.arrow((160, 125), (280, 70))
    picture.text(150, 85, "checkpoint or replay read", "small")
    picture.arrow((440, 75), (540, 130))
    picture.text(480, 125, "1 s without a proof", "small")
    picture.arrow((600, 110), (440, 45))
    picture.text(610, 70, "report or replay proves it", "small")
    picture.arrow((335, 90), (335, 200))
    picture.text(330, 150, "gap, digest differs, doubt", "small", "end")
    picture.arrow((385, 200), (385, 90))
    picture.text(392, 150, "next checkpoint", "small", "start")
    picture.text(95, 190, "a router, or a worker, starts", "small")
    return picture.svg()


TIERS = (
    ("G1 device", "the engine's pool"),
    ("G2 host", "memory, or /dev/shm"),
    ("G3 disk", "outlives the process"),
    ("G4 remote", "Redis, shared"),
)


def tiers() -> str:
    """Where blocks are kept, and the two ways between."""
    picture = Picture(720, 190, "Tiers of blocks: offloaded to slower ones, onboarded from them")
    for number, (name, words) in enumerate(TIERS):
        x = 20 + 178 * number
        picture.box(x, 60, 140, 60, [name, words], "held" if number == 0 else "box")
        if number:
            picture.arrow((x - 38, 78), (x, 78))
            picture.arrow((x, 104), (x - 38, 104))
    picture.text(360, 35, "offload: copied, with a checksum, behind the engine's back", "small")
    picture.text(
        360, 150, "onboard: read, proven, loaded if that is sooner than computing it", "small"
    )
    picture.text(
        360, 172, "what every tier holds is told to routers, and counts in predictions", "small"
    )
    return picture.svg()


STEPS = (
    ("select_and_reserve", "a rank, and its booking"),
    ("prefill_complete", "the prompt is computed"),
    ("output_block", "every block of output"),
    ("free", "the booking is gone"),
)


def request() -> str:
    """Draw the life of a reservation."""
    picture = Picture(720, 170, "A request is booked, computes its prompt, grows, and is freed")
    for number, (name, words) in enumerate(STEPS):
        x = 15 + 178 * number
        picture.box(x, 50, 155, 60, [name, words], "held" if number in (0, 3) else "box")
        if number:
            picture.arrow((x - 23, 80), (x, 80))
    picture.arrow((460, 50), (460, 30), (415, 30), (415, 50))
    picture.text(
        360,
        150,
        "without any of these for 300 s a booking expires; a router that stops hands its own to another",
        "small",
    )
    return picture.svg()


def layers() -> str:
    """Draw the rooms of the router, in the order of imports, as pyproject.toml states it."""
    contracts = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]
    (lines,) = [each["layers"] for each in contracts if each["name"].startswith("router: ")]
    (pure,) = [each["source_modules"] for each in contracts if each["name"].startswith("pure ")]
    rows = [line.split(" | ") for line in lines]
    picture = Picture(560, 34 * len(rows) + 60, "The router's rooms, in the order of imports")
    picture.text(
        280,
        20,
        "each row imports only from rows below it; green: no clock, socket, thread, logger",
        "small",
    )
    for number, row in enumerate(rows):
        is_pure = all(f"router.{name}" in pure for name in row)
        picture.box(60, 32 + 34 * number, 440, 26, [" · ".join(row)], "held" if is_pure else "box")
    return picture.svg()


PICTURES = {"blocks": blocks, "trust": trust, "tiers": tiers, "request": request, "layers": layers}
