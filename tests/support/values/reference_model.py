"""The reference model of decisions and bookings: plain Python, slow, without state beside lists.

It repeats what READMEs and docstrings say, and computes everything anew at each question. Taken as
given: the hashes of prompts, the rates of engines, and properties of workers (other tests have
their models), which it reads from the core's rank table.
"""

import math
from functools import partial
from types import SimpleNamespace

from router.protocol.requests import RankTarget
from router.protocol.values import TIERS, Tier
from router.scheduler.filters import NO_CONSTRAINTS, merged, taints_of, transfer_constraints
from router.scheduler.settings import PolicySettings
from router.sequence import rank_table as columns
from router.sequence.active.footprint import TrackedParts
from router.sequence.active.prompt import prepare
from support.values.policy_costs import costs_of, of_two, picked, tie_breakers

MICRO = 1_000_000
WAIT_S = 60.0


class Refused(Exception):
    """A request is refused; the argument is the error's code."""


class Settings(SimpleNamespace):
    """`busy`: decode blocks, prefill tokens, prefill steps. `threshold_frac`: None: no queue."""

    has_guesses, busy, hysteresis, is_hard = False, None, 0.1, True
    lora_weight, threshold_frac, order, ttl_s = 0.0, None, "fcfs", 4.0


class ReferenceModel:
    """What is cached, booked, bound and waiting; `row_of` returns a rank's row of the core."""

    def __init__(self, workers, row_of, settings):
        self.workers, self.row_of, self.settings = workers, row_of, settings
        self.ranks = [each for worker in workers.values() for each in worker.ranks]
        self.held = {each: [set() for _ in range(TIERS)] for each in self.ranks}
        self.guessed = {each: set() for each in self.ranks}
        self.bookings, self.discounts = {}, {}
        self.head_since_s = dict.fromkeys(self.ranks, 0.0)
        self.busy = dict.fromkeys(self.ranks, False)
        self.placements, self.placed_at = {}, dict.fromkeys(self.ranks, 1)
        self.cordoned, self.loaded, self.sessions, self.last = set(), {}, {}, {}
        self.waiting, self.tickets, self.shares, self.unreported = [], 0, {}, 0.0

    def worker(self, rank):
        return self.workers[rank.worker_id]

    def hashed(self, rank, request):
        return prepare(request, {w.identity for w in self.workers.values()}).hashed(
            self.worker(rank).identity
        )

    # ── Caches ───────────────────────────────────────────────────────────────────────────────────

    def overlap(self, rank, hashes):
        """Return the longest prefix in each cumulative tier; guesses count for their own part."""
        known = [leading(hashes, set().union(*self.held[rank][: tier + 1])) for tier in Tier]
        guessed = leading(hashes, self.guessed[rank]) if self.settings.has_guesses else 0
        return [max(each, guessed) for each in known]

    # ── Bookings ─────────────────────────────────────────────────────────────────────────────────

    def on(self, rank):
        """Return the bookings of a rank, oldest first."""
        return [each for each in self.bookings.values() if each.rank == rank]

    def blocks(self, rank):
        return set().union(*(each.hashes for each in self.on(rank)))

    def booked_columns(self, rank):
        """Return the columns of the rank table that bookings determine."""
        here = self.on(rank)
        queued = [each for each in here if each.stage == "queued"]
        decoding = [each for each in here if each.stage != "queued"]
        growing = [each for each in decoding if each.reported_s is not None]
        holders = [block for each in here for block in each.hashes]
        alone = {block for block in holders if holders.count(block) == 1}
        discount = sum(self.discounts.get((rank, block), 0) for block in alone)
        discount += sum(each.own_discount for each in here)
        blocks = len(set(holders)) + sum(each.own_blocks for each in here)
        head = queued[0] if queued else None
        return {
            columns.PREFILL_TOKENS: sum(each.tokens for each in here if each.stage != "complete"),
            columns.QUEUED_TOKENS: sum(each.unshared for each in queued),
            columns.QUEUED_CONTEXTS: sum(each.contexts for each in queued),
            columns.HEAD_TOKENS: head.unshared if head else 0,
            columns.HEAD_CONTEXTS: head.contexts if head else 0,
            columns.HEAD_SINCE_S: self.head_since_s[rank] if head else 0,
            columns.DECODE_BLOCKS: (blocks * MICRO - discount + MICRO // 2) // MICRO,
            columns.REQUESTS: len(here),
            columns.DECODING_REQUESTS: len(decoding),
            columns.DECODING_KV_TOKENS: sum(each.kv_tokens for each in decoding),
            columns.GROWING_REQUESTS: len(growing),
            columns.GROWING_SINCE_S: sum(each.reported_s for each in growing),
        }

    def row(self, rank):
        """Return a rank's row: bookings and busy state by the model, the rest as given."""
        row = self.row_of(rank)
        for column, value in self.booked_columns(rank).items():
            row[column] = float(value)
        row[columns.HELD_BLOCKS] = float(sum(map(len, self.held[rank])))
        row[columns.BUSY] = float(self.busy[rank])
        row[columns.PLACED_AT] = float(self.placed_at[rank])
        return row

    def add(self, request, rank, overlap, now_s):
        """Book a request on a rank that has `overlap` of its blocks on its device."""
        hashed, tracking = self.hashed(rank, request), tracked(request)
        hashes, isl_tokens = hashed.load_hashes.tolist(), hashed.isl_tokens
        blocks, cached = math.ceil(isl_tokens / hashed.block_size), overlap * hashed.block_size
        if not (tracking.active_blocks and tracking.kv_reuse):
            hashes = []
        own = blocks - len(hashes) if tracking.active_blocks else 0
        tokens = max(isl_tokens - cached, 0) if tracking.prefill_tokens else 0
        shared = min(leading(hashes, self.blocks(rank)), (isl_tokens - 1) // hashed.block_size)
        unshared = min(tokens, isl_tokens - shared * hashed.block_size)
        if not any(each.stage == "queued" for each in self.on(rank)):
            self.head_since_s[rank] = now_s
        self.bookings[request.request_id] = SimpleNamespace(
            rank=rank, hashes=hashes, own_blocks=own, first_own=own, own_discount=0,
            tokens=tokens, unshared=unshared, contexts=unshared * (isl_tokens - unshared / 2),
            isl_tokens=isl_tokens, kv_tokens=isl_tokens,
            block_size=hashed.block_size, expected=request.expected_output_tokens or 0,
            stage="queued", booked_s=now_s, reported_s=None, expires_s=now_s + self.settings.ttl_s,
        )  # fmt: skip
        scope = self.worker(rank).scope
        self.placements[scope] = self.placed_at[rank] = self.placements.get(scope, 1) + 1
        for block in hashes:  # shared ones weigh in full until the next report
            self.discounts.pop((rank, block), None)
        self.guessed[rank].update(hashed.sequence_hashes.tolist())
        if request.lora_name is not None:
            loaded = self.loaded.setdefault(rank, [])
            if request.lora_name in loaded:
                loaded.remove(request.lora_name)
            loaded.append(request.lora_name)
            del loaded[: -(self.worker(rank).labels.max_gpu_lora_count or 1)]

    def complete(self, request_id, now_s, *, in_batch=False):
        booking = self.bookings[request_id]
        booking.expires_s = now_s + self.settings.ttl_s
        self._end_prompt(booking, now_s)
        self._note_report(booking, now_s, in_batch=in_batch)

    def output_block(self, request_id, decay, now_s, *, in_batch=False):
        booking = self.bookings[request_id]
        booking.expires_s = now_s + self.settings.ttl_s
        booking.own_blocks += 1
        booking.kv_tokens += booking.block_size
        if decay is None and booking.expected:
            tokens = (booking.own_blocks - booking.first_own) * booking.block_size
            decay = max(0.0, 1 - tokens / booking.expected)
        if decay is not None:
            discount = MICRO - round(decay * MICRO)
            booking.own_discount = booking.own_blocks * discount
            holders = [block for each in self.on(booking.rank) for block in each.hashes]
            for block in booking.hashes:
                if holders.count(block) == 1:
                    self.discounts[booking.rank, block] = discount
        self._note_report(booking, now_s, in_batch=in_batch)

    def free(self, request_id, now_s, *, is_expired=False):
        booking = self.bookings[request_id]
        was_reported = booking.stage == "complete"
        if not is_expired:
            self.unreported = 0.99 * self.unreported + (1 - 0.99) * (not was_reported)
        if booking.stage == "queued":
            self._hand_down(booking)
        self._end_prompt(booking, now_s)
        del self.bookings[request_id]
        left = self.blocks(booking.rank)
        for block in booking.hashes:
            if block not in left:
                self.discounts.pop((booking.rank, block), None)

    def _hand_down(self, booking):
        """Let the next queued prompt that shares blocks compute what this one will not."""
        queued = [each for each in self.on(booking.rank) if each.stage == "queued"]
        for each in queued[queued.index(booking) + 1 :]:
            if each.unshared < each.tokens and each.hashes[:1] == booking.hashes[:1] != []:
                each.unshared += min(booking.unshared, each.tokens - each.unshared)
                each.contexts = each.unshared * (each.isl_tokens - each.unshared / 2)
                return

    def _end_prompt(self, booking, now_s, stage="complete"):
        was_queued = booking.stage == "queued"
        queued = [each for each in self.on(booking.rank) if each.stage == "queued"]
        if booking.stage != "complete":
            booking.stage = stage
        if was_queued and booking is queued[0] and queued[1:]:
            self.head_since_s[booking.rank] = max(now_s, queued[1].booked_s)

    def _note_report(self, booking, now_s, *, in_batch):
        if (in_batch or booking.reported_s is not None) and booking.stage != "queued":
            booking.reported_s = now_s

    def tick(self, now_s):
        """Drop what is too old: bookings without progress, and requests that waited too long."""
        for request_id in [i for i, each in self.bookings.items() if each.expires_s <= now_s]:
            self.free(request_id, now_s, is_expired=True)
        self.waiting = [each for each in self.waiting if each.expires_s > now_s]
        if self.unreported > 0.1:
            for rank in self.ranks:
                self._end_overdue(rank, self.row(rank), now_s)

    def _end_overdue(self, rank, row, now_s):
        decoding = row[columns.DECODING_REQUESTS]
        step_s = row[columns.BASE_S] + decoding * row[columns.DECODE_S]
        step_s += row[columns.DECODING_KV_TOKENS] * row[columns.KV_S]
        for each in [each for each in self.on(rank) if each.stage == "queued"]:
            steps = max(each.unshared / max(row[columns.CHUNK_TOKENS] - decoding, 1.0), 1.0)
            work_s = each.unshared * row[columns.PREFILL_S]
            work_s += each.contexts * row[columns.CONTEXT_S]
            ended_s = self.head_since_s[rank] + (work_s + steps * step_s)
            if ended_s > now_s:
                return
            self._end_prompt(each, ended_s, "assumed")

    # ── Who may serve ────────────────────────────────────────────────────────────────────────────

    def eligible(self, request):
        """Return the ranks that may serve, in order, and the factor of each. Raises Refused."""
        here = [
            each
            for each in self.ranks
            if self.worker(each).scope == request.scope and each.worker_id not in self.cordoned
        ]
        if not here:
            raise Refused("no_endpoints")
        constraints = request.routing_constraints or NO_CONSTRAINTS
        if request.prefill_worker_id is not None:
            if request.prefill_worker_id not in self.workers:
                raise Refused("worker_not_found")
            labels = self.workers[request.prefill_worker_id].labels
            constraints = merged(constraints, transfer_constraints(labels))
        busy = self._mark_busy(here)
        left = list(here)
        for name, passes in self._filters(request, constraints, here, busy):
            kept = [each for each in left if passes(each)]
            if not kept and not (name == "soft" or not left):
                raise Refused("workers_overloaded" if name == "busy" else "no_endpoints")
            left = kept or left
        return left, [self._factor(each, request, constraints) for each in left]

    def _filters(self, request, constraints, here, busy):
        bound = [each for each in here if targets(demanded(request), each)]
        if request.phase == "prefill" or any(self.worker(e).role == "prefill" for e in here):
            is_prefill = request.phase == "prefill"
            yield "role", lambda each: (self.worker(each).role == "prefill") == is_prefill
        if request.allowed_worker_ids is not None:
            yield "allowed", lambda each: each.worker_id in request.allowed_worker_ids
        yield "excluded", lambda each: each.worker_id not in (request.excluded_worker_ids or ())
        if request.pinned_worker is not None:
            yield "pinned", lambda each: targets(request.pinned_worker, each)
        required = set(constraints.required_taints)
        yield "required", lambda each: required <= taints_of(self.worker(each).labels)
        if request.lora_name is not None:
            yield "lora", lambda each: serves(self.worker(each).labels, request.lora_name)
        if bound and self.settings.is_hard:
            yield "bound", lambda each: each in bound
        yield "busy", lambda each: each not in busy
        if bound:
            yield "soft", lambda each: each in bound

    def _factor(self, rank, request, constraints):
        factor, labels = 1.0, self.worker(rank).labels
        if constraints.preferred_taints:
            given, total = taints_of(labels), 0.0
            for taint, weight in constraints.preferred_taints.items():
                total += weight * (taint in given)
            factor = math.exp(-math.tanh(total))
        weight = self.settings.lora_weight
        if weight and request.lora_name is not None:
            is_loaded = request.lora_name in self.loaded.get(rank, ())
            factor *= math.exp(-math.tanh(weight)) if is_loaded else 1.0
        if request.session_is_hint and targets(request.affinity_target, rank):
            factor *= 0.95
        return factor

    def _mark_busy(self, ranks):
        if self.settings.busy is None:
            return set()
        for rank in ranks:
            row = self.row(rank)
            scale = 1 - self.settings.hysteresis if self.busy[rank] else 1.0
            decode, tokens, steps = (scale * each for each in self.settings.busy)
            blocks = max(row[columns.DECODE_BLOCKS], row[columns.USED_BLOCKS])
            most_tokens = min(tokens, steps * row[columns.MAX_BATCHED_TOKENS])
            self.busy[rank] = (
                blocks > decode * row[columns.CAPACITY_BLOCKS]
                or row[columns.PREFILL_TOKENS] > most_tokens
            )
        return {rank for rank in ranks if self.busy[rank]}

    # ── Decisions ────────────────────────────────────────────────────────────────────────────────

    def terms(self, rank, request, factor, now_s):
        """Return a candidate's terms, in the order of their columns."""
        identity, hashed = self.worker(rank).identity, self.hashed(rank, request)
        overlap = self.overlap(rank, hashed.sequence_hashes.tolist())
        reusable = min(overlap[0], max(hashed.isl_tokens - 1, 0) // identity.block_size)
        new = math.ceil(hashed.isl_tokens / identity.block_size)
        row, tracking = self.row(rank), tracked(request)
        if tracking.kv_reuse or not tracking.active_blocks:
            new -= leading(hashed.load_hashes.tolist(), self.blocks(rank))
        if not tracking.active_blocks:
            row[columns.DECODE_BLOCKS] = math.nan
        if request.phase is not None:
            row[columns.DECODE_SIDE] = float(request.phase == "decode")
        grow(row, now_s)
        return [*row, *overlap, max(reusable - identity.eagle, 0), new, factor]

    def choose(self, request, default_policy, dice, now_s):
        """Return the chosen rank, the candidates with their terms, and their costs."""
        ranks, factors = self.eligible(request)
        candidates = zip(ranks, factors, strict=True)
        rows = [self.terms(rank, request, factor, now_s) for rank, factor in candidates]
        override, scope = request.router_config_override, request.scope
        policy = (override and override.policy) or default_policy
        settings = PolicySettings().of_phase(request.phase).overridden(override)
        isl_tokens = self.hashed(ranks[0], request).isl_tokens
        expected = request.expected_output_tokens
        costs = costs_of(policy, rows, settings, isl_tokens, expected, now_s)
        temperature = settings.router_temperature
        if policy == "power-of-two":
            index = of_two(costs, temperature, dice)
        elif policy == "round-robin":
            last = self.last.get(scope)
            begin = sum(last is not None and each <= last for each in ranks)
            costs = [float((index - begin) % len(ranks)) for index in range(len(ranks))]
            index = picked(costs, [()] * len(ranks), temperature, dice)
            self.last[scope] = ranks[index]
        else:
            keys = tie_breakers(policy, rows, isl_tokens)
            index = picked(costs, keys, temperature, dice)
        return ranks[index], dict(zip(ranks, rows, strict=True)), costs

    # ── Sessions ─────────────────────────────────────────────────────────────────────────────────

    def directed(self, request):
        """Return the target of a request: its own, or the rank of its session."""
        if request.session_id is None or request.affinity_target is not None:
            return request.affinity_target
        bound = self.sessions.get((request.scope, request.session_id))
        return None if bound is None else RankTarget(bound.worker_id, bound.dp_rank)

    def bind(self, request, rank):
        """Bind the session of a directed request; a binding to a rank that is gone is replaced."""
        if request.session_id is None:
            return
        key, target = (request.scope, request.session_id), request.affinity_target
        if request.session_is_final:
            self.sessions.pop(key, None)
            return
        bound = self.sessions.setdefault(key, rank)
        is_there = bound.worker_id not in self.cordoned
        if not is_there and target is not None and targets(target, bound):
            self.sessions[key] = rank

    # ── The queue ────────────────────────────────────────────────────────────────────────────────

    def may_pass(self, request):
        """Return whether a request need not wait: no other does, and a rank has room."""
        self.shares.setdefault(request.scope, Shares())
        is_first = all(each.request.scope != request.scope for each in self.waiting)
        return is_first and self.has_room(request, 1.0)

    def has_room(self, request, part):
        """Return whether a rank that may serve has room, or none ever can."""
        try:
            ranks, _ = self.eligible(request)
        except Refused as refused:
            return refused.args != ("workers_overloaded",)
        rows = [self.row(each) for each in ranks]
        most = self.settings.threshold_frac
        return any(
            row[columns.QUEUED_TOKENS] / part <= most * row[columns.MAX_BATCHED_TOKENS]
            for row in rows
        )

    def wait(self, request, now_s):
        """Add a request to the queue. Raises Refused if it can never be served."""
        ranks, _ = self.eligible(request)
        cached = max(
            self.overlap(each, self.hashed(each, request).sequence_hashes.tolist())[0]
            * self.worker(each).identity.block_size
            for each in ranks
        )
        isl_tokens = self.hashed(ranks[0], request).isl_tokens
        cost, jump = max(1, isl_tokens - cached), request.priority_jump
        expires_s = now_s + min(request.max_wait_s or WAIT_S, WAIT_S)
        orders = {
            "fcfs": now_s - jump,
            "lcfs": -(now_s + jump),
            "wspt": -(1 + jump) / cost,
            "deadline": expires_s - jump,
        }
        self.tickets += 1
        order, tenant = orders[self.settings.order], request.tenant or ""
        waiting = SimpleNamespace(request=request, ticket=self.tickets, cost=cost, tenant=tenant)
        waiting.order, waiting.expires_s = order, expires_s
        waiting.own = request.fair_share_id or ""
        self.waiting.append(waiting)

    def next_waiting(self, now_s):
        """Remove and return the next request that a rank has room for, or None."""
        for scope, shares in self.shares.items():
            lanes, flows, turn = {}, {}, partial(turn_of, shares)
            here = [each for each in self.waiting if each.request.scope == scope]
            for each in sorted(here, key=partial(own_turn_of, shares)):
                flows.setdefault((str(demands(each.request)), each.tenant), each)
            for each in sorted(flows.values(), key=turn):
                lanes.setdefault(str(demands(each.request)), each)
            for each in lanes.values():
                part = 0.5 if shares.is_above(each.tenant) else 1.0
                if self.has_room(each.request, part):
                    self.waiting.remove(each)
                    shares.charge_both(each.tenant, each.own, each.cost, now_s)
                    return each.request
        return None


def turn_of(shares, each):
    level = shares.levels.get(each.tenant, -math.inf)
    return (-each.request.strict_priority, level, each.order, each.ticket)


def own_turn_of(shares, each):
    own = shares.within.get(each.tenant)
    level = -math.inf if own is None else own.levels.get(each.own, -math.inf)
    return (-each.request.strict_priority, level, each.order, each.ticket)


class Shares:
    """The tokens given to each tenant, in powers of two that grow with time instead of fading.

    `within`: the same of the ids of each tenant, from the first id that it sent.
    """

    def __init__(self):
        self.levels, self.all, self.squares = {}, -math.inf, -math.inf
        self.within = {}

    def charge_both(self, tenant, own, tokens, now_s):
        self.charge(tenant, tokens, now_s)
        if own:
            self.within.setdefault(tenant, Shares())
        if tenant in self.within:
            self.within[tenant].charge(own, tokens, now_s)

    def charge(self, tenant, tokens, now_s):
        given, before = math.log2(max(1, tokens)) + now_s / 10.0, self.levels.get(tenant, -math.inf)
        self.levels[tenant] = log_sum(before, given)
        self.all = log_sum(self.all, given)
        self.squares = log_sum(self.squares, given + log_sum(self.levels[tenant], before))

    def is_above(self, tenant):
        return self.levels.get(tenant, -math.inf) > self.squares - self.all + 1e-6


def log_sum(one, other):
    low, high = sorted((one, other))
    return high + math.log2(1.0 + 2.0 ** (low - high))


def leading(hashes, held):
    return next((i for i, each in enumerate(hashes) if each not in held), len(hashes))


def tracked(request):
    """Return the parts of a request that count as load."""
    return TrackedParts().of_phase(request.phase).overridden(request.router_config_override)


def targets(target, rank):
    """Return whether a target names this rank, or its worker."""
    return target is not None and (
        target.worker_id == rank.worker_id and target.dp_rank in (None, rank.dp_rank)
    )


def demanded(request):
    """Return the rank or worker that a session demands; a hint demands none."""
    return None if request.session_is_hint else request.affinity_target


def serves(labels, lora_name):
    return labels.lora_names is None or lora_name in labels.lora_names


def demands(request):
    """Return the fields of a request that decide which ranks may serve it."""
    return (
        request.allowed_worker_ids, request.excluded_worker_ids, request.phase,
        request.pinned_worker, request.routing_constraints, demanded(request),
        request.prefill_worker_id, request.lora_name,
    )  # fmt: skip


def grow(row, now_s):
    """Add the output that requests reported in batches should have generated since."""
    requests = row[columns.GROWING_REQUESTS]
    decoding = row[columns.DECODING_REQUESTS] + row[columns.FOREIGN_REQUESTS]
    step_s = row[columns.BASE_S] + decoding * row[columns.DECODE_S]
    step_s += row[columns.DECODING_KV_TOKENS] * row[columns.KV_S]
    if requests <= 0 or step_s <= 0:
        return
    elapsed_s = max(requests * now_s - row[columns.GROWING_SINCE_S], 0.0)
    tokens = elapsed_s * (1.0 - row[columns.PREFILL_SHARE]) / step_s
    if row[columns.OUTPUT_TOKENS] > 0:
        tokens = min(tokens, requests * row[columns.OUTPUT_TOKENS])
    row[columns.DECODING_KV_TOKENS] += tokens
    row[columns.DECODE_BLOCKS] += tokens / row[columns.BLOCK_SIZE]
