"""Load reports of an engine whose steps take what the formula says, times what a test adds."""

from itertools import count

import numpy as np

from router.protocol.loads import LoadConstants, LoadCounters, LoadGauges, LoadReport
from router.protocol.values import HeldState

LARGE_S = np.array([0.020, 1 / 9_000, 1.85e-9, 0.00015, 2.0e-8])
"""A 70 B model on eight devices: seconds a step, prompt token, token · context, request, token."""


def mixed_second(random):
    """What an engine may count in a second: steps, prompts and decoding in any proportion."""
    steps = random.randint(1, 40)
    prefill_tokens = random.choice([0, random.randint(1, 9_000)])
    contexts = prefill_tokens * random.uniform(500, 30_000)
    decoding = random.choice([0, random.randint(1, 30)])
    resident = steps * decoding * random.uniform(100, 20_000)
    return np.array([steps, prefill_tokens, contexts, steps * decoding, resident])


class CountingEngine:
    """One rank of an engine, with cumulative counters, which has nothing to do when it reports."""

    def __init__(self, worker_id=1, seconds=LARGE_S):
        self.worker_id = worker_id
        self.seconds = seconds
        self.incarnation = 1
        self.gauges = LoadGauges()
        self.chunk_tokens = 2048
        self._report_ids = count(1)
        self.restart()

    def restart(self):
        self.done = np.zeros(5)
        self.busy_s = 0.0
        self.received = self.finished = self.cached = 0

    def work(self, done, times=1.0):
        self.done += done
        self.busy_s += float(done @ self.seconds) * times

    def report(self, **hidden):
        steps, prefill, contexts, decoding, resident = self.done
        counters = {
            "steps": int(steps),
            "busy_s": self.busy_s,
            "prefill_tokens": int(prefill),
            "prefill_token_contexts": float(contexts),
            "decode_requests": int(decoding),
            "resident_kv_tokens": int(resident),
            "requests_received": self.received,
            "requests_finished": self.finished,
            "cached_tokens": self.cached,
        }
        return LoadReport(
            worker_id=self.worker_id,
            dp_rank=0,
            agent_incarnation=self.incarnation,
            incarnation=self.incarnation,
            report_id=next(self._report_ids),
            event_id=0,
            state=HeldState(),
            counters=LoadCounters(**{**counters, **hidden}),
            gauges=self.gauges,
            constants=LoadConstants(chunk_tokens=self.chunk_tokens),
        )
