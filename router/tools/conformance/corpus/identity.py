"""Equal tokens that are not equal blocks. Written by hand in vLLM 0.33's form."""

from typing import Any

from router.tools.conformance.events import as_array, prompt, publish, stored, text
from router.tools.conformance.steps import Ask, EngineSpec, Image, Salt, Scenario, Step

GROUP = "identity"
SALT = "vLLM's salt, in extra_keys"
SALT_ONCE = "a salted chain in several events"
SGLANG_SALT = "SGLang's cache_salt"
IMAGES = "images, asked without them"
LORA = "LoRA by name"
A = text("a", 10)
IMAGE = Image("9f" * 32)


def scenario(name: str, *steps: Step, **fields: Any) -> Scenario:
    """Return a scenario of this group."""
    return Scenario(name, GROUP, steps, **fields)


def asked(blocks: int, **context: str) -> Ask:
    """Ask about the one text."""
    return Ask(prompt(A, **context), (blocks,))


def salted(salt: str, first: int = 0, last: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return vLLM's event of salted blocks: the salt is a key of the chain's first block alone."""
    event = stored(A, first, last, **fields)
    keys: list[Any] = [None] * len(event["block_hashes"])
    return event | {"extra_keys": [[Salt(salt)], *keys[1:]] if first == 0 else keys}


def with_images(*blocks: int) -> dict[str, Any]:
    """Return vLLM's event of a text with an image on some blocks."""
    keys = [[[IMAGE, 0]] if block in blocks else None for block in range(10)]
    return stored(A, extra_keys=keys)


def with_lora(name: str, *first: Any) -> dict[str, Any]:
    """Return vLLM's event of an adapter's blocks. `first`: further keys of the first block."""
    return stored(A, lora_id=1, lora_name=name, extra_keys=[[name, *first], *[[name]] * 9])


SCENARIOS = (
    scenario("salt A, asked with salt A", publish(salted("A")), asked(10, cache_salt="A"),
             cause=SALT),
    scenario("salt A, asked without", publish(salted("A")), asked(0), cause=SALT),
    scenario("salt A, asked with salt B", publish(salted("A")), asked(0, cache_salt="B"),
             cause=SALT),
    scenario("no salt, asked with salt A", publish(stored(A)), asked(0, cache_salt="A"),
             cause=SALT),
    scenario("salt A and a LoRA", publish(with_lora("ad", Salt("A"))),
             asked(10, lora_name="ad", cache_salt="A"), asked(0, lora_name="ad"), asked(0),
             cause=SALT),
    scenario("salt A, in two events",
             publish(salted("A", 0, 5)), publish(salted("A", 5)),
             asked(10, cache_salt="A"), asked(0), cause=SALT_ONCE,
             note="vLLM's second event names no salt: its blocks inherit it from their parent."),
    scenario("SGLang's cache_salt, asked with it",
             publish(stored(A, cache_salt="A")), asked(10, cache_salt="A"), cause=SGLANG_SALT,
             engines=(EngineSpec(kind="sglang"),)),
    scenario("SGLang's cache_salt, asked without",
             publish(stored(A, cache_salt="A")), asked(0), cause=SGLANG_SALT,
             engines=(EngineSpec(kind="sglang"),)),
    scenario("image on one block, asked without", publish(with_images(0)), asked(0), cause=IMAGES),
    scenario("image on the sixth block, asked without", publish(with_images(5)), asked(5),
             cause=IMAGES),
    scenario("image on all blocks, asked without", publish(with_images(*range(10))), asked(0),
             cause=IMAGES),
    scenario("prompt embeddings, asked as tokens",
             publish(stored(A, extra_keys=[[b"\x07" * 32]] * 10)), asked(0),
             convention="vLLM sends token 0 for each embedding, so that a request for these tokens "
             "is one that no tokenizer makes."),
    scenario("LoRA, asked with it", publish(with_lora("ad")), asked(10, lora_name="ad"),
             cause=LORA),
    scenario("LoRA, asked as base", publish(with_lora("ad")), asked(0), cause=LORA),
    scenario("base, asked with LoRA", publish(stored(A)), asked(0, lora_name="ad"), cause=LORA),
    scenario("LoRA by its deprecated number, asked as base",
             publish(as_array(stored(A, lora_id=7), 5)), asked(0),
             note="This is the form of vLLM 0.9, which has no names."),
)  # fmt: skip
