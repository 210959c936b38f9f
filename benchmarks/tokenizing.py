"""What tokens of prompts in words cost, each piece made once, beside making all of them each time.

    python benchmarks/tokenizing.py [--quick] [--json] [--only conversations,prompts]

In one process, without servers: processor time of all threads, interleaved. Needs the extra
`forward`. The tokenizer is byte-level BPE of 4,000 tokens, trained on the demonstration's
conversations. Beside `kv-router forward`'s stands what `transformers.apply_chat_template` does with
the same libraries: the template is rendered, and the whole text encoded.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from command_line import section_parser
from msgspec import Struct
from report import Benchmark, Section, report
from rows import Row
from timing import alternate
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from router.forward.apis.api import CHAT
from router.forward.request_body import CompletionRequest, read_completion_request
from router.forward.tokenizer.chats import read_chat
from router.forward.tokenizer.conversation import rendered
from router.forward.tokenizer.files import read_files
from router.forward.tokenizer.local import LocalTokenizer
from router.forward.tokenizer.template import ChatTemplate
from router.forward.tokenizer.token_cache import TokenCache

BOOKS = Path(__file__).parents[1] / "router/tools/up/demo/conversations.json"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = 100_000
CONVERSATION_GOAL, FRESH_GOAL, KNOWN_GOAL = 0.2, 1.0, 0.1
SECTIONS = {
    "conversations": "milliseconds of a whole conversation, each turn with all before it",
    "prompts": "milliseconds of one prompt of 8,000 tokens",
}


class Scale(Struct, frozen=True):
    """How much, how often."""

    is_quick: bool

    @property
    def rounds(self) -> int:
        return 5 if self.is_quick else 15

    @property
    def turns(self) -> int:
        return 20 if self.is_quick else 40

    def __str__(self) -> str:
        return f"conversations of {self.turns} turns, medians of {self.rounds} interleaved rounds"


class World:
    """A tokenizer, and both ways to use it."""

    def __init__(self, folder: Path) -> None:
        written = BOOKS.read_text()
        train(folder, written)
        self._text = " ".join(Random(1).choices(written.split(), k=WORDS))
        files = read_files(str(folder))
        self._whole = Tokenizer.from_str(files.tokenizer)
        self._template = ChatTemplate(TEMPLATE)
        self._ours = LocalTokenizer(files, TokenCache(8_000_000))

    def ours(self, asked: CompletionRequest) -> int:
        return len(self._ours.tokens(asked)[1])

    def whole(self, asked: CompletionRequest) -> int:
        text = rendered(read_chat(asked.fields), self._template, {})
        return len(self._whole.encode(text, add_special_tokens=False).ids)

    def chat(self, turns: int, seed: int, characters: int = 1_500) -> list[CompletionRequest]:
        """A conversation as it is asked, turn by turn."""
        messages, asked = [], []
        for turn in range(2 * turns - 1):
            at = (seed * 7919 + turn * characters) % (len(self._text) - characters)
            role = "assistant" if turn % 2 else "user"
            messages.append({"role": role, "content": self._text[at : at + characters]})
            if role == "user":
                asked.append(
                    read_completion_request(CHAT, json.dumps({"messages": messages}).encode())
                )
        return asked


def train(folder: Path, text: str) -> None:
    """Write a tokenizer of 4,000 tokens, trained on a text, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4_000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _spent_ms(asked: list[CompletionRequest], count: Callable[[CompletionRequest], int]) -> float:
    begun_s = time.process_time()
    for each in asked:
        count(each)
    return (time.process_time() - begun_s) * 1e3


def conversations(world: World, scale: Scale) -> list[Row]:
    unseen = itertools.count(1)
    sides: list[Callable[[int], float]] = [
        lambda _: _spent_ms(world.chat(scale.turns, next(unseen)), world.ours),
        lambda n: _spent_ms(world.chat(scale.turns, n), world.whole),
    ]
    ours, whole = (median(each) for each in alternate(sides, scale.rounds, warm_up=True))
    return [Row(f"{scale.turns} turns", ours, whole, "ms", CONVERSATION_GOAL, lower=True)]


def prompts(world: World, scale: Scale) -> list[Row]:
    sample = world.chat(1, 0, 30_000)
    unseen = itertools.count(1_000)
    sides: list[Callable[[int], float]] = [
        lambda _: _spent_ms(world.chat(1, next(unseen), 30_000), world.ours),
        lambda _: _spent_ms(sample, world.ours),
        lambda n: _spent_ms(world.chat(1, n, 30_000), world.whole),
    ]
    rounds = alternate(sides, scale.rounds, warm_up=True)
    fresh, again, whole = (median(each) for each in rounds)
    return [
        Row("never seen", fresh, whole, "ms", FRESH_GOAL, lower=True),
        Row("seen before", again, whole, "ms", KNOWN_GOAL, lower=True),
    ]


def main() -> int:
    arguments = section_parser(__doc__, SECTIONS).parse_args()
    scale = Scale(arguments.quick)
    measure = {"conversations": conversations, "prompts": prompts}
    with TemporaryDirectory() as folder:
        world = World(Path(folder))
        chosen = {
            name: Section(SECTIONS[name], partial(measure[name], world, scale))
            for name in arguments.only
        }
        return report(chosen, Benchmark("tokenizing", "whole", str(scale)), arguments)


if __name__ == "__main__":
    sys.exit(main())
