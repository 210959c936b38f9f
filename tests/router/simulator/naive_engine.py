"""The simulator's engine model, one step after the other, as its definition says it."""


class NaiveEngine:
    """Serves (arrival_s, isl, osl, hashes) in order; `outcomes[i]`: first token, end, cached."""

    def __init__(self, model, block_size, requests):
        self.model, self.block_size = model, block_size
        self.capacity = model.capacity_tokens // block_size
        self.arrivals = list(enumerate(requests))
        self.waiting, self.prefilling, self.decoding = [], [], []
        self.idle = []  # least recently used first
        self.outcomes = {}
        self.steps = 0
        self.busy_s = 0.0

    def run(self):
        now_s = 0.0
        while self.arrivals or self.waiting or self.prefilling or self.decoding:
            if not (self.waiting or self.prefilling or self.decoding):
                now_s = max(now_s, self.arrivals[0][1][0])
                # a request that comes at the very moment that a step begins waits for the next one
                self._take(self.arrivals.pop(0))
            now_s = self._step(now_s)
        return self.outcomes

    def _take(self, arrival):
        index, (_, isl, osl, hashes) = arrival
        self.waiting.append({"i": index, "isl": isl, "osl": osl, "hashes": hashes})

    def _step(self, now_s):
        self._admit()
        chunks = self._plan()
        step_s = self._duration_s(chunks)
        now_s += step_s
        self.busy_s += step_s
        self.steps += 1
        # a request that comes while the step lasts is there when it is over
        while self.arrivals and self.arrivals[0][1][0] <= now_s:
            self._take(self.arrivals.pop(0))
        for each in self.decoding:
            each["out"] += 1
        for each in [each for each in self.decoding if each["out"] == each["osl"]]:
            self._finish(each, now_s)
        for each, c in chunks:
            self._compute(each, c, now_s)
        return now_s

    def _plan(self):
        room, chunks = self.model.chunk_tokens - len(self.decoding), []
        for each in self.prefilling:
            c = min(room, each["isl"] - each["computed"])
            if c > 0:
                chunks.append((each, c))
                room -= c
        return chunks

    def _duration_s(self, chunks):
        step_s = self.model.base_s
        for each in self.decoding:
            step_s += self.model.decode_request_s
            step_s += (each["isl"] + each["out"]) * self.model.decode_kv_token_s
        for each, c in chunks:
            step_s += c * self.model.prefill_token_s
            step_s += c * (each["computed"] + c / 2) * self.model.attention_token2_s
        return step_s

    def _compute(self, each, c, now_s):
        each["computed"] += c
        if each["computed"] < each["isl"]:
            return
        self.prefilling.remove(each)
        self.idle = [h for h in self.idle if h not in each["hashes"]]
        each["named"], each["out"], each["first_s"] = True, 1, now_s
        self.decoding.append(each)
        if each["osl"] == 1:
            self._finish(each, now_s)

    def _admit(self):
        while self.waiting:
            each = self.waiting[0]
            cached = 0
            for sequence_hash in each["hashes"][: (each["isl"] - 1) // self.block_size]:
                if sequence_hash not in self.idle and sequence_hash not in self._used_names():
                    break
                cached += 1
            matched = each["hashes"][:cached]
            blocks = -(-(each["isl"] + each["osl"]) // self.block_size)
            each.update(blocks=blocks, cached=cached, computed=cached * self.block_size)
            each["named"] = False
            if self._used(each) > self.capacity:
                return
            self.waiting.pop(0)
            self.idle = [h for h in self.idle if h not in matched]
            self.prefilling.append(each)
            while self._used() + len(self.idle) > self.capacity:
                self.idle.pop(0)

    def _running(self, extra=None):
        return self.prefilling + self.decoding + ([] if extra is None else [extra])

    def _names(self, each):
        return each["hashes"] if each["named"] else each["hashes"][: each["cached"]]

    def _used_names(self, extra=None):
        return {h for each in self._running(extra) for h in self._names(each)}

    def _used(self, extra=None):
        nameless = sum(e["blocks"] - len(self._names(e)) for e in self._running(extra))
        return nameless + len(self._used_names(extra))

    def _finish(self, each, now_s):
        self.decoding.remove(each)
        self.outcomes[each["i"]] = (each["first_s"], now_s, each["cached"])
        used = self._used_names()
        self.idle += [h for h in reversed(each["hashes"]) if h not in used]
