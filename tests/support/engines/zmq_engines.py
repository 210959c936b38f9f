"""An engine's event publisher, as vLLM and SGLang run it: PUB, a buffer, and a ROUTER that replays.

The loop is theirs: one thread polls the replay socket, then waits up to 0.1 s for a batch, numbers,
publishes and buffers it. Sequence numbers begin at 0 with every start. As a program it does what
JSON lines on its standard input say, and can be killed.
"""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from support.processes.servers import free_port

END = (-1).to_bytes(8, "big", signed=True)


def stored(hashes, token_ids, parent=None, block_size=4, **fields):
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": token_ids, "block_size": block_size, "lora_id": None, "medium": "GPU",
        **fields,
    }  # fmt: skip


def removed(hashes, **fields):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **fields}


def cleared():
    return {"type": "AllBlocksCleared"}


class Engine:
    """One rank's publisher. Ports are offset by the rank; `with_topic`: as since vLLM #45177.
    `is_heard`: what is published from now on arrives, also where nothing is replayed.
    """

    def __init__(
        self,
        port=None,
        replay_port=None,
        *,
        topic="",
        buffer_steps=10_000,
        dp_rank=0,
        with_topic=True,
        has_replay=True,
        host="127.0.0.1",
    ):
        self.host = host
        self.port, self.replay_port = port or free_port(), replay_port or free_port()
        self.topic = topic.encode()
        self.buffer_steps = buffer_steps
        self.dp_rank = dp_rank
        self.with_topic = with_topic
        self.has_replay = has_replay
        self.published = []
        self.replays = 0
        self.is_heard = False
        self._thread = None

    @property
    def endpoint(self):
        return f"tcp://{self.host}:{self.port}"

    @property
    def replay_endpoint(self):
        return f"tcp://{self.host}:{self.replay_port}" if self.has_replay else None

    def start(self):
        self.published, self.is_heard = [], False
        self._queue = queue.Queue()
        self._is_running = True
        self._running = threading.Event()
        self._running.set()
        is_bound = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_bound,), daemon=True)
        self._thread.start()
        assert is_bound.wait(60)
        return self

    def stop(self):
        if self._thread is not None:
            self._is_running = False
            self._running.set()
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def restart(self, *batches):
        """Another life at the same address, which begins with these batches."""
        self.stop()
        self.start()
        for events in batches:
            self.publish(*events)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    def pause(self):
        """Neither publish nor replay; connections stay."""
        self._running.clear()

    def resume(self):
        self._running.set()

    def publish(self, *events):
        """Publish one batch."""
        self._queue.put((self._payload(events), True))

    def lose(self, *events):
        """Publish one batch that does not arrive."""
        self._queue.put((self._payload(events), False))

    def publish_payload(self, payload):
        self._queue.put((payload, True))

    def send_raw(self, frames):
        """Whatever, out of order."""
        self._queue.put((frames, None))

    def wait(self):
        """Return once all of it is published, and at once if the engine is stopped or paused."""
        if self._thread is not None and self._running.is_set():
            self._queue.join()

    def _payload(self, events):
        return msgspec.msgpack.encode([time.time(), list(events), self.dp_rank])

    def _run(self, is_bound):
        context = zmq.Context()
        publisher = context.socket(zmq.XPUB)  # PUB, but that it shows its subscribers
        publisher.set(zmq.SNDHWM, 100_000)
        publisher.bind(f"tcp://{self.host}:{self.port + self.dp_rank}")
        replayer = context.socket(zmq.ROUTER)
        replayer.set(zmq.SNDHWM, 2 * (self.buffer_steps + 1))
        if self.has_replay:
            replayer.bind(f"tcp://{self.host}:{self.replay_port + self.dp_rank}")
        is_bound.set()
        try:
            self._serve(publisher, replayer)
        finally:
            context.destroy(linger=0)

    def _serve(self, publisher, replayer):
        buffer, sequence = deque(maxlen=self.buffer_steps), 0
        while self._is_running:
            self._running.wait()
            if publisher.poll(0):
                self.is_heard = publisher.recv().startswith(b"\x01")
            if replayer.poll(0):
                self._replay(replayer, buffer)
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            self._running.wait()
            if item is not None and item[1] is None:
                publisher.send_multipart(item[0])
            elif item is not None:
                if item[1]:
                    publisher.send_multipart((self.topic, sequence.to_bytes(8, "big"), item[0]))
                buffer.append((sequence, item[0]))
                self.published.append(item[0])
                sequence += 1
            self._queue.task_done()

    def _replay(self, replayer, buffer):
        client, _, start = replayer.recv_multipart()
        self.replays += 1
        topic = (self.topic,) if self.with_topic else ()
        for sequence, payload in buffer:
            if sequence >= int.from_bytes(start, "big"):
                frames = (*topic, sequence.to_bytes(8, "big"), payload)
                replayer.send_multipart((client, b"", *frames))
        end = (b"", END, b"") if self.with_topic else (END, b"")
        replayer.send_multipart((client, b"", *end))


class EngineProcess:
    """The same as a process of its own, to be killed."""

    def __init__(self, **fields):
        self._fields = {"port": free_port(), "replay_port": free_port(), **fields}
        self.endpoint = f"tcp://127.0.0.1:{self._fields['port']}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self._fields['replay_port']}"
        self._process = None

    def start(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self._fields)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            self._until("ready")
        except BaseException:
            self.kill()
            raise

    def kill(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def restart(self, *batches):
        self.kill()
        self.start()
        for events in batches:
            self.publish(*events)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def publish(self, *events):
        """Publish one batch."""
        self._say({"publish": events})

    def flood(self, count, *events):
        """Publish `count` equal batches as fast as it goes."""
        self._say({"flood": [count, events]})

    def wait(self):
        """Until all of it is published."""
        self._say({"wait": True})
        self._until("done")

    def _say(self, command):
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _until(self, line):
        assert self._process.stdout.readline().decode().strip() == line


def tell(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main():
    with Engine(**json.loads(sys.argv[1])) as engine:
        tell("ready")
        for line in sys.stdin:
            match json.loads(line):
                case {"publish": events}:
                    engine.publish(*events)
                case {"flood": [count, events]}:
                    for _ in range(count):
                        engine.publish(*events)
                case {"wait": _}:
                    engine.wait()
                    tell("done")


if __name__ == "__main__":
    main()
