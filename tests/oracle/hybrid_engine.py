"""A model of an engine with a hybrid model: its block pool, what it caches, evicts and publishes.

After vLLM 0.32's `v1/core/kv_cache_manager.py` and `single_type_kv_cache_manager.py`: one pool for
all groups of layers; full attention and chunks cache every block, windows and states those at a few
boundaries of each prompt. What it finds cached is `oracle.hybrid.cached_tokens` of its true blocks.
"""

from array import array
from collections import OrderedDict
from math import lcm

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from oracle.hybrid import cached_tokens
from router.protocol.hybrid import HybridSettings, LayerClass, Layout
from support.engines.engines import CLEARED, removed, stored

KINDS = {
    "full": "full_attention",
    "window": "sliding_window",
    "state": "mamba",
    "chunk": "chunked_local_attention",
}


UNIT_TOKENS = 4
CHUNK_TOKENS = 32


class Layers(Struct, frozen=True):
    """A group of layers: its kind, tokens in a block, and the window or chunk in tokens.

    `is_eagle`: draft layers use it, so the last block of a hit is dropped.
    """

    kind: str
    block_tokens: int
    span_tokens: int = 0
    is_eagle: bool = False

    @property
    def need(self):
        """The blocks before a hit that have to be held."""
        return -(-(self.span_tokens - 1) // self.block_tokens) if self.kind == "window" else 1


def random_groups(random, *, may_be_eagle=False):
    """Full attention and one or two other shapes, in any order, as `HybridEngine` can have them."""
    groups = []
    while not _is_possible(groups):
        full_tokens = random.choice([4, 4, 8])
        groups = [Layers("full", full_tokens)] * random.choice([1, 1, 2])
        for _ in range(random.randint(1, 2)):
            kind = random.choice(["window", "window", "state", "chunk"])
            block_tokens = random.choice([4, 4, 8]) if kind == "window" else full_tokens
            span = {"window": random.randint(2, 30), "chunk": CHUNK_TOKENS}.get(kind, 0)
            groups += [Layers(kind, block_tokens, span)] * random.randint(1, 2)
    if may_be_eagle and all(each.kind != "chunk" for each in groups):
        drafts = {each for each in groups if each.kind != "state" and random.random() < 0.5}
        groups = [replace(each, is_eagle=each in drafts) for each in groups]
    random.shuffle(groups)
    return tuple(groups)


def _is_possible(groups):
    """Hashes are of 4 tokens, and hits do not end inside blocks, as some with states may."""
    sizes = {each.block_tokens for each in groups if each.kind != "state"}
    has_larger = any(each.block_tokens > UNIT_TOKENS for each in groups if each.kind == "window")
    states_fit = all(each.block_tokens == UNIT_TOKENS for each in groups if each.kind == "state")
    return UNIT_TOKENS in sizes and (states_fit or has_larger)


def class_of(layers):
    """The class that groups of these layers form."""
    return LayerClass(layers.kind, layers.block_tokens, layers.span_tokens, layers.is_eagle)


class Running:
    """A request: its tokens with the answer, how far it is computed, its blocks by group."""

    def __init__(self, tokens, prompt_tokens):
        self.tokens, self.prompt_tokens = tokens, prompt_tokens
        self.computed = 0
        self.registered = []
        self.junction = 0
        self.blocks = []


class HybridEngine:
    """`step` computes a chunk of every running request and returns the events of the batch.

    `seed`: that of its block hashes. `settings`: what is registered with such an engine.
    """

    def __init__(self, groups, *, pool_blocks, retention_tokens, chunk_tokens, seed=7):
        self.groups, self.retention_tokens = groups, retention_tokens
        self.chunk_tokens, self.seed = chunk_tokens, seed
        self.is_eagle = any(each.is_eagle for each in groups)
        self.alignment = lcm(*(each.block_tokens for each in groups))
        self.free = OrderedDict.fromkeys(range(pool_blocks))
        self.uses = [0] * pool_blocks
        self.keys = [None] * pool_blocks
        self.cached = [{} for _ in groups]  # hash: its blocks, as keys of a dict
        self.running, self.events = [], []
        shapes = dict.fromkeys(each for each in groups if each.kind != "full")
        self.shapes = list(shapes)
        self.layout = Layout(
            self.alignment,
            max(each.block_tokens for each in groups if each.kind == "full"),
            tuple(map(class_of, shapes)),
            any(each.is_eagle for each in groups if each.kind == "full"),
        )
        drafts = [index for index, each in enumerate(groups) if each.is_eagle]
        self.settings = HybridSettings(CHUNK_TOKENS, tuple(drafts))

    def name(self, tokens, end):
        return xxhash.xxh3_64_intdigest(array("I", tokens[:end]), self.seed)

    def holds(self, tokens, wanted, end):
        """Do all groups of a kind and shape have the block that ends here?"""
        groups = [i for i, each in enumerate(self.groups) if each == wanted]
        return all(self.name(tokens, end) in self.cached[i] for i in groups)

    def hit(self, tokens, layout=None):
        """The tokens of a prompt that are found cached."""
        full = dict.fromkeys(each for each in self.groups if each.kind == "full")
        return cached_tokens(
            layout or self.layout,
            lambda end: all(self.holds(tokens, each, end) for each in full),
            lambda index, end: self.holds(tokens, self.shapes[index], end),
            len(tokens),
        )

    def begin(self, tokens, answer_tokens):
        request = Running([*tokens, *answer_tokens], len(tokens))
        hit = self.hit(tokens)
        alone = Layout(self.alignment, self.layout.full_block_tokens, (), self.layout.is_full_eagle)
        longest = self.hit(tokens, alone)
        request.junction = longest if longest > hit else 0
        request.computed, request.registered = hit, [hit] * len(self.groups)
        for i, each in enumerate(self.groups):
            request.blocks.append({})
            for end in self.used_by(each, hit):
                block = next(iter(self.cached[i][self.name(tokens, end)]))
                self.free.pop(block, None)
                self.uses[block] += 1
                request.blocks[i][end] = block
        self.running.append(request)

    def used_by(self, group, hit):
        """The ends of the blocks that a hit needs."""
        size = group.block_tokens
        first = {"full": 0, "window": hit - group.need * size, "state": hit - size}.get(
            group.kind, group.span_tokens and hit // group.span_tokens * group.span_tokens
        )
        return range(max(first, 0) + size, hit + 1, size)

    def allocate(self):
        block, _ = self.free.popitem(last=False)
        if self.keys[block] is not None:
            group, name = self.keys[block]
            del self.cached[group][name][block]
            if not self.cached[group][name]:
                del self.cached[group][name]
            self.keys[block] = None
            self.events.append(removed([name], group=group))
        self.uses[block] = 1
        return block

    def release(self, block):
        self.uses[block] -= 1
        if not self.uses[block]:
            self.free[block] = None
            if self.keys[block] is None:
                self.free.move_to_end(block, last=False)

    def step(self):
        for request in list(self.running):
            end = self.next_end(request)
            if len(self.free) < sum(end // each.block_tokens + 2 for each in self.groups):
                self.finish(request)  # preempted: it begins anew when it is sent again
                continue
            self.compute(request, end)
            if end == len(request.tokens):
                self.finish(request)
        events, self.events = self.events, []
        return events

    def next_end(self, request):
        """States stand where a step ends: a prompt is split at its junction and last boundary."""
        end = self.next_boundary(request)
        has_states = any(each.kind == "state" for each in self.groups)
        is_inside = request.computed < request.junction < end
        return request.junction if has_states and is_inside else end

    def next_boundary(self, request):
        end = min(request.computed + self.chunk_tokens, len(request.tokens))
        last = (request.prompt_tokens - 1) // self.alignment * self.alignment
        if request.computed < last:
            aligned = end // self.alignment * self.alignment
            return min(aligned if aligned > request.computed else end, last)
        if request.computed < request.prompt_tokens:
            return request.prompt_tokens
        return min(end, (request.computed // self.alignment + 1) * self.alignment)

    def compute(self, request, end):
        before, request.computed = request.computed, end
        for i, each in enumerate(self.groups):
            size, blocks = each.block_tokens, request.blocks[i]
            if each.kind == "state":
                blocks[-(-end // size) * size] = self.allocate()
                continue
            for block_end in range(before // size * size + size, end + size, size):
                if block_end not in blocks and block_end - size < end:
                    blocks[block_end] = self.allocate()
        self.register(request)
        for i, each in enumerate(self.groups):
            for block_end in [b for b in request.blocks[i] if self.is_behind(each, b, end)]:
                self.release(request.blocks[i].pop(block_end))

    def is_behind(self, group, block_end, computed):
        if group.kind == "window":
            return block_end <= computed - group.span_tokens + 1
        if group.kind == "chunk":
            return block_end <= computed // group.span_tokens * group.span_tokens
        return (
            group.kind == "state"
            and block_end < computed // group.block_tokens * group.block_tokens
        )

    def register(self, request):
        for i, each in enumerate(self.groups):
            size, names = each.block_tokens, []
            start, upto = request.registered[i], self.registered_end(each, request.computed)
            if upto <= start:
                continue
            request.registered[i] = upto
            for end in range(start + size, upto + 1, size):
                block = request.blocks[i].get(end)
                if block is not None and self.is_kept(each, request, end):
                    name = self.name(request.tokens, end)
                    self.keys[block] = (i, name)
                    self.cached[i].setdefault(name, {})[block] = None
                    names.append(name)
            self.events.append(
                stored(
                    names,
                    request.tokens[start:upto],
                    self.name(request.tokens, start) if start else None,
                    block_size=size,
                    group=i,
                    spec_kind=KINDS[each.kind],
                    sliding_window_tokens=each.span_tokens if each.kind == "window" else None,
                )
            )

    def registered_end(self, group, computed):
        """Hits end at the alignment; one block after it is dropped of hits of an EAGLE group."""
        upto, size = computed // self.alignment * self.alignment, group.block_tokens
        return min(computed // size * size, upto + size) if upto and group.is_eagle else upto

    def is_kept(self, group, request, end):
        if group.kind in ("full", "chunk"):
            return True
        aligned = [each // self.alignment * self.alignment for each in self.replayed(request)]
        boundaries = {*aligned, request.junction} - {0}
        dropped = group.is_eagle * group.block_tokens
        reach = group.need * group.block_tokens + dropped
        step = self.retention_tokens
        if step:
            boundaries.update(range(step, end + reach + step, step))
        return any(end <= each + dropped < end + reach for each in boundaries)

    def replayed(self, request):
        """The ends of hits of the same prompt; with EAGLE, also of a longer one."""
        prompt_tokens = request.prompt_tokens
        if not self.is_eagle:
            return (prompt_tokens - 1,)
        ends = (
            each // self.alignment * self.alignment for each in (prompt_tokens - 1, prompt_tokens)
        )
        return tuple(max(each - self.alignment, 0) for each in ends)

    def clear(self):
        """Reset the cache, as engines do while no request runs."""
        for request in list(self.running):
            self.finish(request)
        self.keys = [None] * len(self.keys)
        self.cached = [{} for _ in self.groups]
        self.events.append(CLEARED)

    def finish(self, request):
        self.running.remove(request)
        for blocks in request.blocks:
            for end in sorted(blocks, reverse=True):
                self.release(blocks[end])
