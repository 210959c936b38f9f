"""Equal tokens that are not equal blocks."""

from typing import Any

from ..events import as_array, prompt, publish, stored, text
from ..steps import Ask, Scenario, Step

GROUP = "identity"
A = text("a", 10)
IMAGE = "9f" * 32


def scenario(name: str, *steps: Step, **fields: str) -> Scenario:
    return Scenario(name, GROUP, steps, **fields)


def asked(blocks: int, **context: str) -> Ask:
    return Ask(prompt(A, **context), (blocks,))


def salted(salt: str, first: int = 0, last: int | None = None, **fields: Any) -> dict[str, Any]:
    """As vLLM stores it: the salt is a key of the first block alone."""
    event = stored(A, first, last, **fields)
    keys = [None] * len(event["block_hashes"])
    return event | {"extra_keys": [[salt], *keys[1:]] if first == 0 else keys}


def with_lora(name: str) -> dict[str, Any]:
    return stored(A, lora_id=1, lora_name=name, extra_keys=[[name]] * 10)


SCENARIOS = (
    scenario("salt A, asked with salt A", publish(salted("A")), asked(10, cache_salt="A")),
    scenario("salt A, asked without", publish(salted("A")), asked(0)),
    scenario("salt A, asked with salt B", publish(salted("A")), asked(0, cache_salt="B")),
    scenario("salt A, told in two events",
             publish(salted("A", 0, 5)), publish(salted("A", 5)),
             asked(10, cache_salt="A"), asked(0),
             note="The second event names no salt: its blocks inherit it from their parent."),
    scenario("no salt, asked with salt A", publish(stored(A)), asked(0, cache_salt="A")),
    scenario("SGLang's cache_salt, asked with it",
             publish(stored(A, cache_salt="A")), asked(10, cache_salt="A")),
    scenario("SGLang's cache_salt, asked without", publish(stored(A, cache_salt="A")), asked(0)),
    scenario("image on one block, asked without",
             publish(stored(A, extra_keys=[[[IMAGE, 0]], *[None] * 9])), asked(0)),
    scenario("image on the sixth block, asked without",
             publish(stored(A, extra_keys=[*[None] * 5, [[IMAGE, 2]], *[None] * 4])), asked(5)),
    scenario("image on all blocks, asked without",
             publish(stored(A, extra_keys=[[[IMAGE, 0]]] * 10)), asked(0)),
    scenario("prompt embeddings, asked as tokens",
             publish(stored(A, extra_keys=[[b"\x07" * 32]] * 10)), asked(0)),
    scenario("LoRA, asked with it", publish(with_lora("ad")), asked(10, lora_name="ad")),
    scenario("LoRA, asked as base", publish(with_lora("ad")), asked(0)),
    scenario("LoRA by its deprecated number, asked as base",
             publish(as_array(stored(A, lora_id=7), 5)), asked(0)),
    scenario("base, asked with LoRA", publish(stored(A)), asked(0, lora_name="ad")),
)  # fmt: skip
