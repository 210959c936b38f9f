"""The simulator's engine model, one step after the other, as its definition says it."""


class NaiveEngine:
    """Serves (arrival_s, isl, osl, hashes) in order; `outcomes[i]`: first token, end, cached.

    `step_tokens[i]`: tokens that request i gets in a decode step, of which `draft_tokens` more are
    verified, in `draft_s` more. `is_preempting`: blocks are taken as contexts grow. `is_deferring`:
    prompts are admitted while the step has room, and found from the step on that completes them.
    """

    def __init__(
        self,
        model,
        block_size,
        requests,
        *,
        step_tokens=None,
        draft_tokens=0,
        draft_s=0.0,
        is_preempting=False,
        is_deferring=False,
    ):
        self.model, self.block_size = model, block_size
        self.step_tokens = step_tokens or [1] * len(requests)
        self.draft_tokens, self.draft_s = draft_tokens, draft_s
        self.is_preempting = is_preempting
        self.is_deferring = is_deferring
        self.preemptions = 0
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
        each = {"i": index, "isl": isl, "osl": osl, "hashes": hashes, "out": 0, "first_s": None}
        self.waiting.append(each)

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
            each["out"] += self.step_tokens[each["i"]]
        for each in [each for each in self.decoding if each["out"] >= each["osl"]]:
            self._finish(each, now_s)
        decoded = list(self.decoding)
        for each, c in chunks:
            self._compute(each, c, now_s)
        if self.is_preempting:
            self._grow(decoded)
        return now_s

    def _grow(self, decoded):
        """Earlier requests take their blocks first."""
        for each in decoded:
            blocks = -(-(each["isl"] + each["out"]) // self.block_size)
            while each in self.decoding and each["blocks"] < blocks:
                if self._used() < self.capacity:
                    each["blocks"] += 1
                    self._evict()
                else:
                    self._preempt(
                        self._running()[-1] if not self.prefilling else self.prefilling[-1]
                    )

    def _preempt(self, each):
        self.preemptions += 1
        names = self._names(each)
        (self.prefilling if each in self.prefilling else self.decoding).remove(each)
        self._release(names)
        self.waiting.insert(0, each)

    def _plan(self):
        room = self.model.chunk_tokens - len(self.decoding) * (1 + self.draft_tokens)
        chunks = []
        for each in self.prefilling:
            c = min(room, each["isl"] + each["out"] - each["computed"])
            if c > 0:
                chunks.append((each, c))
                room -= c
        return chunks

    def _duration_s(self, chunks):
        step_s = self.model.base_s + self.draft_s * bool(self.decoding)
        for each in self.decoding:
            step_s += (1 + self.draft_tokens) * self.model.decode_request_s
            step_s += (each["isl"] + each["out"]) * self.model.decode_kv_token_s
        for each, c in chunks:
            step_s += c * self.model.prefill_token_s
            step_s += c * (each["computed"] + c / 2) * self.model.attention_token2_s
        return step_s

    def _compute(self, each, c, now_s):
        each["computed"] += c
        if each["computed"] < each["isl"] + each["out"]:
            return
        self.prefilling.remove(each)
        self._name(each)
        if each["first_s"] is None:
            each["first_s"], each["first_cached"] = now_s, each["cached"]
        each["out"] += 1
        self.decoding.append(each)
        if each["out"] == each["osl"]:
            self._finish(each, now_s)

    def _name(self, each):
        self.idle = [h for h in self.idle if h not in each["hashes"]]
        each["named"] = True

    def _room(self):
        """Of the next step, after all prompts; those that fit are completed."""
        room = self.model.chunk_tokens - len(self.decoding) * (1 + self.draft_tokens)
        for each in self.prefilling:
            room -= each["isl"] + each["out"] - each["computed"]
            if room >= 0:
                self._name(each)
        return room

    def _admit(self):
        while self.waiting and not (self.is_deferring and self._room() <= 0):
            each = self.waiting[0]
            cached = 0
            computed = each["isl"] + each["out"]
            for sequence_hash in each["hashes"][: (computed - 1) // self.block_size]:
                if sequence_hash not in self.idle and sequence_hash not in self._used_names():
                    break
                cached += 1
            matched = each["hashes"][:cached]
            tokens = computed + 1 if self.is_preempting else each["isl"] + each["osl"]
            blocks = -(-tokens // self.block_size)
            each.update(blocks=blocks, cached=cached, computed=cached * self.block_size)
            each["named"] = False
            if self._used(each) > self.capacity:
                return
            self.waiting.pop(0)
            self.idle = [h for h in self.idle if h not in matched]
            self.prefilling.append(each)
            self._evict()

    def _evict(self):
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
        self.outcomes[each["i"]] = (each["first_s"], now_s, each["first_cached"])
        self._release(each["hashes"])

    def _release(self, names):
        used = self._used_names()
        self.idle += [h for h in reversed(names) if h not in used]
