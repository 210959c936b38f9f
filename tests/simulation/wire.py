"""An engine in a process of its own, and the sockets on which it publishes: lossy, and replayed.

EngineProcess ──publish──▶ Wire ──live──▶ its follower         batches are numbered from 0 in
  numbers, buffer  ◀─ask──  │ ──replayed──▶                    every life, and name no life
"""

from collections import deque

import msgspec
from xxhash import xxh3_64_intdigest

from router.protocol.values import Tier
from router.publisher.engine_events.batch import EngineRemoved, EngineStored
from simulation.corpus import BLOCK_SIZE
from simulation.engine import BlockRemoved, BlockStored

REPLAY_TIMEOUT_S = 2.0
MAX_DELAY_S = 0.3
_MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}


class EngineProcess:
    """One rank's engine. `held_after`: the truth, by batch (life and sequence)."""

    def __init__(self, world, rank):
        self.world = world
        self.rank = rank
        self.rates = {}
        self.wires = []
        self.life = 0
        self.is_up = True
        self.batch_of = {}
        self.held_after = {}
        self._history = []
        self._begin()

    def _begin(self):
        life = self.life if self.world.scenario.names_anew else 0
        self.cache = self.world.new_engine(self.rank.worker_id, life)
        self.buffer = deque(maxlen=self.world.scenario.buffer_batches)
        self._sequence = 0
        self._history.append((self.world.loop.time(), frozenset()))

    def step(self):
        """The cache changes, and it is published."""
        if self.is_up:
            changes = self.cache.step()
            if changes:
                self._publish(changes)

    def restart(self, after_s):
        """A new process: an empty cache, numbers from 0, every connection lost."""
        self.is_up = False
        for wire in list(self.wires):
            wire.disconnect()
        self.life += 1
        self._begin()
        self.world.loop.call_later(after_s, self._up)

    def _up(self):
        self.is_up = True

    def has_held(self, held, since_s):
        """Whether exactly this was what it had published at some moment since."""
        ends_s = [start_s for start_s, _ in self._history[1:]] + [float("inf")]
        return any(
            end_s >= since_s and held == then
            for (_, then), end_s in zip(self._history, ends_s, strict=True)
        )

    def hits(self, fault):
        rate = self.rates.get(fault)
        if not rate or self.world.random.random() >= rate:
            return False
        self.world.server.counts[fault] += 1
        return True

    def _publish(self, changes):
        sequence = self._sequence
        payload = self._encoded(changes)
        self._sequence += 1
        self.buffer.append((sequence, payload))
        self._history.append((self.world.loop.time(), self.cache.held()))
        self.batch_of[payload] = (self.life, sequence)
        self.held_after[self.life, sequence] = self.cache.held()
        for wire in self.wires:
            wire.send(sequence, payload)

    def _encoded(self, changes):
        events = [event for change in changes for event in self._events(change)]
        return msgspec.msgpack.encode([self.world.loop.time(), events, self.rank.dp_rank])

    def _events(self, change):
        match change:
            case BlockStored(tier, nodes):
                yield self._stored(tier, nodes)
            case BlockRemoved(tier, nodes):
                for node in nodes:
                    hashes = [self._name(node)]
                    yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIA[tier]}
            case EngineStored():
                yield _hybrid_stored(change)
            case EngineRemoved(hashes):
                yield {
                    "type": "BlockRemoved",
                    "block_hashes": hashes.tolist(),
                    "medium": "GPU",
                    "group_idx": change.group,
                }
            case _:
                yield {"type": "AllBlocksCleared"}

    def _stored(self, tier, nodes):
        is_placeholder = tier and self.world.scenario.has_placeholders
        parent, first = nodes[0].parent, nodes[0]
        extra = [[first.salt] if first.salt and parent is None else None]
        return {
            "type": "BlockStored",
            "block_hashes": [self._name(node) for node in nodes],
            "parent_block_hash": None if parent is None else self._name(parent),
            "token_ids": [] if is_placeholder else [t for node in nodes for t in node.tokens],
            "block_size": 0 if is_placeholder else BLOCK_SIZE,
            "lora_id": None,
            "medium": _MEDIA[tier],
            "extra_keys": None if is_placeholder else extra + [None] * (len(nodes) - 1),
        }

    def _name(self, node):
        """Engines name blocks in a way of their own, some in every life anew."""
        life = self.life if self.world.scenario.names_anew else 0
        return xxh3_64_intdigest(b"%d %d" % (life, node.number))


def _hybrid_stored(event):
    return {
        "type": "BlockStored",
        "block_hashes": event.block_hashes.tolist(),
        "parent_block_hash": event.parent,
        "token_ids": event.tokens.tolist(),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": "GPU",
        "extra_keys": event.extra_keys,
        "group_idx": event.group,
        "kv_cache_spec_kind": event.spec_kind,
        "kv_cache_spec_sliding_window": event.sliding_window_tokens,
    }


class Wire:
    """One follower's sockets: a connection that is lost and made again, and one replay at a time.

    `follower` gets what happens: connected, disconnected, live, replayed, replay_ended,
    replay_failed.
    """

    def __init__(self, engine, follower):
        self._engine = engine
        self._follower = follower
        self._world = engine.world
        self._loop = engine.world.loop
        self._random = engine.world.random
        self._connection = 0
        self._is_connected = False
        self._is_closed = False
        self._due_s = 0.0
        self._replay = 0
        self.has_lost = False
        engine.wires.append(self)
        self._connect()

    def close(self):
        self._is_closed = True
        self._connection += 1
        self._engine.wires.remove(self)

    def disconnect(self):
        """The connection is lost, and with it what was on its way."""
        self._connection += 1
        if self._is_connected:
            self._is_connected = False
            self._loop.call_later(0.02 * self._random.random(), self._disconnected)

    def send(self, sequence, payload):
        """A live batch sets out."""
        engine = self._engine
        if not self._is_connected:
            return
        if engine.hits("zmq_lose"):
            self.has_lost = True
            return
        for _ in range(2 if engine.hits("zmq_double") else 1):
            due_s = self._loop.time() + self._delay_s()
            if engine.hits("zmq_reorder"):
                self.has_lost = True  # it may seem to be of a new life
            else:
                due_s = self._due_s = max(self._due_s + 1e-6, due_s)
            self._loop.call_at(due_s, self._arrive, self._connection, sequence, payload)

    def ask(self, first):
        """Ask for everything from a sequence on; what was asked before is void."""
        self._replay += 1
        if self._engine.hits("replay_lose"):
            self._loop.call_later(REPLAY_TIMEOUT_S, self._fail, self._replay)
        else:
            self._loop.call_later(self._delay_s(), self._answer, self._replay, first)

    def _delay_s(self):
        delay_s = 0.0002 + 0.001 * self._random.random()
        if self._engine.hits("zmq_delay"):
            delay_s += min(self._random.expovariate(1 / 0.2), MAX_DELAY_S)
        return delay_s

    def _connect(self):
        self._loop.call_later(0.05 * self._random.random(), self._try_to_connect)

    def _try_to_connect(self):
        if self._is_closed or self._is_connected:
            return
        if not self._engine.is_up:
            self._connect()
            return
        self._is_connected = True
        self._follower.connected()

    def _disconnected(self):
        if not self._is_closed:
            self._follower.disconnected()
            self._connect()

    def _arrive(self, connection, sequence, payload):
        if connection == self._connection and self._is_connected:
            self._follower.live(sequence, payload)

    def _answer(self, replay, first):
        """All at once, after some time; or a part of it, and then nothing."""
        if not self._engine.is_up:
            self._loop.call_later(REPLAY_TIMEOUT_S, self._fail, replay)
            return
        batches = [each for each in self._engine.buffer if each[0] >= first]
        is_cut = self._engine.hits("replay_cut")
        if is_cut:
            batches = batches[: self._random.randint(0, len(batches))]
        self._loop.call_later(self._delay_s(), self._deliver, replay, batches, is_cut)

    def _deliver(self, replay, batches, is_cut):
        for sequence, payload in batches:
            if replay != self._replay or self._is_closed:
                return
            self._follower.replayed(sequence, payload)
        if replay != self._replay or self._is_closed:
            return
        if is_cut:
            self._loop.call_later(REPLAY_TIMEOUT_S, self._fail, replay)
        else:
            self._follower.replay_ended()

    def _fail(self, replay):
        if replay == self._replay and not self._is_closed:
            self._follower.replay_failed()
