"""Engines for recorded registrations: a worker without an engine is not chosen."""

from contextlib import ExitStack

from support.engines.zmq_engines import Engine


class RecordedEngines:
    """Engines that hold nothing, and the sockets of a recording that stand for theirs.

    Worker 1 has `first`; worker 2 has two ranks.
    """

    def __init__(self):
        self.first = Engine(has_replay=False)
        second = Engine(has_replay=False)
        third = Engine(has_replay=False)
        recorded = (f"tcp://127.0.0.1:{port}" for port in (27999, 27997, 27998))
        self._engines = dict(zip(recorded, (self.first, second, third), strict=True))
        self._stack = ExitStack()

    def __enter__(self):
        for engine in self._engines.values():
            self._stack.enter_context(engine)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def live(self, text):
        """Return a recorded text with these engines' sockets."""
        for recorded, engine in self._engines.items():
            text = text.replace(recorded, engine.endpoint)
        return text

    def recorded(self, text):
        """Return a text with the sockets of the recording."""
        for recorded, engine in self._engines.items():
            text = text.replace(engine.endpoint, recorded)
        return text
