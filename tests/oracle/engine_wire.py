"""An engine, its lives and the wire to it, as `BatchOrder` sees them: what it applies is checked
after every step against what the engine really published.
"""

from random import Random

from router.publisher.batch_order.batch_order import BatchOrder, BatchOrderSettings
from router.publisher.batch_order.steps import Apply, Lost, NewLife, Replay

TICK_S = 0.05


class Applied:
    """What came out, checked: one life since the last NewLife, in order, from 0 unless lost."""

    def __init__(self):
        self.batches = []
        self.lost = 0
        self.lives = 0

    def take(self, step):
        match step:
            case NewLife():
                self.batches, self.lost = [], 0
                self.lives += 1
            case Lost():
                self.lost += 1
            case Apply(sequence, payload):
                self._apply(sequence, payload)

    def _apply(self, sequence, payload):
        life, number = decode(payload)
        assert number == sequence
        if self.batches:
            last_life, last = self.batches[-1]
            assert life == last_life, "two lives are mixed"
            assert sequence > last, "applied twice, or out of order"
        previous = self.batches[-1][1] if self.batches else -1
        assert self.lost or sequence == previous + 1, "a hole that nobody mentions"
        self.batches.append((life, sequence))


def encode(life, sequence):
    return b"%d %d" % (life, sequence)


def decode(payload):
    life, sequence = payload.split()
    return int(life), int(sequence)


class EngineWorld:
    """One engine, one connection to it, one replay at a time; `random` decides what goes wrong.

    The pipe holds live batches and connection events in the order of the wire. With
    `early_events` an event overtakes the batches before it, as with a reader that is behind.
    """

    def __init__(self, random, settings=None, *, buffer=10_000, early_events=False):
        self.random = random
        self.settings = settings or BatchOrderSettings()
        self.buffer = buffer
        self.early_events = early_events
        self.now_s = 0.0
        self.life = 0
        self.count = 0
        self.is_connected = False
        self.pipe = []
        self.answer = None
        self.log = BatchOrder(0.0, self.settings)
        self.applied = Applied()
        self.asked = []

    # What the engine does.

    def publish(self, count=1):
        for _ in range(count):
            if self.is_connected:
                self.pipe.append((self.life, self.count))
            self.count += 1

    def restart(self, count=0):
        """Another life, which has published `count` batches before any connection."""
        self.disconnect()
        self.life += 1
        self.count = 0
        self.answer = self.answer and "broken"
        self.publish(count)

    def disconnect(self):
        if self.is_connected:
            self._event("disconnected")
        self.is_connected = False

    def connect(self):
        if not self.is_connected:
            self._event("connected")
        self.is_connected = True

    def _event(self, event):
        events = [i for i, item in enumerate(self.pipe) if isinstance(item, str)]
        first = events[-1] + 1 if events else 0
        place = self.random.randint(first, len(self.pipe)) if self.early_events else len(self.pipe)
        self.pipe.insert(place, event)

    # What the wire does.

    def lose(self):
        self._change(lambda i: self.pipe.pop(i))

    def double(self):
        self._change(lambda i: self.pipe.insert(i, self.pipe[i]))

    def swap(self):
        def swap(i):
            if i and isinstance(self.pipe[i - 1], tuple):
                self.pipe[i - 1], self.pipe[i] = self.pipe[i], self.pipe[i - 1]

        self._change(swap)

    def _change(self, change):
        places = [i for i, item in enumerate(self.pipe) if isinstance(item, tuple)]
        if places:
            change(self.random.choice(places))

    def deliver(self, count=1):
        for item in self.pipe[:count]:
            self.pipe.pop(0)
            if item == "connected":
                self._take(self.log.connected(self.now_s))
            elif item == "disconnected":
                self._take(self.log.disconnected(self.now_s))
            else:
                self._take(self.log.live(item[1], encode(*item), self.now_s, self.now_s))

    def replay(self, count=1):
        """Let `count` frames of the answer arrive; the engine answers all at once."""
        for _ in range(count):
            if isinstance(self.answer, int):
                first = max(self.answer, self.count - self.buffer)
                self.answer = [(self.life, n) for n in range(first, self.count)]
            elif self.answer == "broken":
                self.fail()
            elif self.answer:
                item = self.answer.pop(0)
                self._take(self.log.replayed(item[1], encode(*item), self.now_s))
            elif self.answer == []:
                self.answer = None
                self._take(self.log.replay_ended(self.now_s))

    def fail(self):
        if self.answer is not None:
            self.answer = None
            self._take(self.log.replay_failed("timeout", self.now_s))

    def wait(self, seconds=TICK_S):
        for _ in range(max(1, round(seconds / TICK_S))):
            self.now_s += TICK_S
            self._take(self.log.tick(self.now_s))

    def quiet(self, seconds=4.0):
        """No more faults, until everything has settled."""
        self.connect()
        for _ in range(round(seconds / TICK_S)):
            self.deliver(len(self.pipe))
            while self.answer is not None:
                self.replay(1 + self.count)
            self.wait()

    def resume(self):
        """The process that reads is restarted from what it saved."""
        saved = self.log.save()
        self.pipe = []
        self.is_connected = False
        self.answer = None
        self.log = BatchOrder(self.now_s, self.settings, saved)

    # What must hold.

    def check_settled(self):
        if not self.applied.lost:
            self.check_equal()
        assert self.log.waiting_s(self.now_s) < 60.0

    def check_equal(self):
        assert self.applied.batches == [(self.life, n) for n in range(self.count)]
        assert not self.applied.lost

    def _take(self, steps):
        for step in steps:
            if isinstance(step, Replay):
                self.asked.append(step.first)
                self.answer = step.first
            else:
                self.applied.take(step)


def run_lives(seed, steps, settings=None, *, failures=True, **fields):
    """A world after `steps` random operations and a quiet time."""
    random = Random(seed)
    world = EngineWorld(random, settings, **fields)
    operations = [
        lambda: world.publish(random.choice([1, 1, 2, 5])),
        lambda: world.deliver(random.choice([1, 1, 3, 10])),
        lambda: world.deliver(random.choice([1, 3, 10])),
        lambda: world.replay(random.choice([1, 2, 10])),
        lambda: world.replay(random.choice([1, 5, 30])),
        lambda: world.wait(random.choice([TICK_S, 0.2, 0.5])),
        world.connect,
        random.choice([world.lose, lambda: None]),
        random.choice([world.double, lambda: None]),
        random.choice([world.swap, lambda: None]),
        world.fail if failures else lambda: None,
        lambda: random.random() < 0.3 and world.disconnect(),
        lambda: random.random() < 0.3 and world.restart(random.choice([0, 1, 3, world.count, 30])),
        world.resume if random.random() < 0.1 else lambda: None,
    ]
    for _ in range(steps):
        random.choice(operations)()
    world.quiet()
    world.publish()  # Without a replay only the next batch shows that the last one was lost.
    world.quiet()
    return world
