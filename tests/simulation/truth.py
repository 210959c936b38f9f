"""What is true of a rank: what its engine held as of every event, and until when."""

from router.publisher.journal.journal import EventJournal
from simulation.hybrid import doubts_of


class Life:
    """One life of one rank's cache. `held` is the truth of this moment.

    A cursor is superseded when what it stands for is first no longer what the edge knows.
    """

    def __init__(self, rank, incarnation, now_s):
        self.rank = rank
        self.incarnation = incarnation
        self.held = frozenset()
        self.ended_s = float("inf")
        self.problems = []
        self._version = 0
        self._changed_s = [now_s]
        self._as_of = {}

    def change(self, held, now_s):
        """Note what the engine holds from now on, as far as the edge can know."""
        if held != self.held:
            self.held = held
            self._version += 1
            self._changed_s.append(now_s)

    def record(self, event_id, doubts):
        """Note that this event stands for what is held now, or, in doubt, for nothing certain."""
        if doubts:
            return
        known = self._as_of.get(event_id)
        if known is not None and known[1] != self.held:
            self.problems.append(f"{self.rank}: event {event_id} stands for two different sets")
        else:
            self._as_of[event_id] = self._version, self.held

    def as_of(self, event_id):
        """What was held as of an event. Returns None if none was published without doubt."""
        known = self._as_of.get(event_id)
        return None if known is None else known[1]

    def superseded_s(self, event_id):
        """When the set of this event was no longer the latest; infinity if it still is."""
        version = self._as_of[event_id][0] + 1
        if version > self._version:
            return self.ended_s
        return min(self._changed_s[version], self.ended_s)


class Truth:
    """The lives of every rank, by incarnation."""

    def __init__(self):
        self.lives = {}

    def begin(self, rank, incarnation, now_s):
        life = Life(rank, incarnation, now_s)
        self.lives.setdefault(rank, {})[incarnation] = life
        return life

    def life(self, rank, incarnation):
        return self.lives.get(rank, {}).get(incarnation)

    def problems(self):
        return [
            p for lives in self.lives.values() for life in lives.values() for p in life.problems
        ]


class RecordedJournal(EventJournal):
    """A journal that notes when its lives begin, and what each of its messages stands for."""

    __slots__ = ("_clock", "_truth", "life")

    def __init__(self, truth, clock, *arguments):
        self._truth = truth
        self._clock = clock
        self.life = None
        super().__init__(*arguments)

    def new_life(self, incarnation):
        super().new_life(incarnation)
        if self.life is not None:
            self.life.ended_s = self._clock()
        self.life = self._truth.begin(self._rank, incarnation, self._clock())

    def take(self):
        messages = super().take()
        self.life.record(self.last_event_id, doubts_of(self.taken_state.doubts, self.hybrid))
        return messages
