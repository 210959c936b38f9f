"""Tries of the attacker: the victim asks the probed prompt or another, by lot, before a probe."""

import random
import string
from contextlib import ExitStack

from msgspec import structs

from attack.guarded_fleet import ATTACKER, MONITOR, VICTIM
from attack.observations import MetricsView, Observations
from support.values.token_files import token_of

PROMPT_TOKENS = 256
ROUTER, INDEX = "kv.default.router", "kv.default.indexer.query"

ADMIN_ROUTES = (
    "/predictions", "/dashboard/stream", "/shadow", "/dump", "/config", "/workers", "/loads",
    "/routers", "/ready?verbose=1", "/replica_sync/peers", "/metrics",
)  # fmt: skip


def salt_of(name):
    """The salt that a tenant may use; the accomplice has the victim's."""
    return ATTACKER if name == ATTACKER else VICTIM


class Tries:
    """Tries of one attacker, by the name of its token. `setup` asks as the victim."""

    def __init__(self, fleet, attacker, seed):
        self.fleet, self.attacker, self.salt = fleet, attacker, salt_of(attacker)
        self.observations = Observations()
        self.rng = random.Random(seed)
        self._stack = ExitStack()
        self._clients = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def client(self, process, name):
        """A connection that lasts for all tries."""
        key = process, name
        if key not in self._clients:
            self._clients[key] = self._stack.enter_context(self.fleet.client(process, name))
        return self._clients[key]

    def run(self, tries, processes=()):
        """Make tries, with the metrics of these processes as channels. Returns what was seen."""
        view = MetricsView({each: self.client(each, MONITOR) for each in processes})
        for _ in range(tries):
            lot = self.rng.randrange(2)
            self.try_once(lot)
            view.note(self.observations, lot)
        return self.observations

    def try_once(self, lot):
        raise NotImplementedError


class RouterTries(Tries):
    """All that a tenant may ask of a router and an indexer while the victim's request runs."""

    def __init__(self, fleet, attacker, seed):
        super().__init__(fleet, attacker, seed)
        self.bus = self._stack.enter_context(fleet.wire())

    def prompt(self):
        return self.rng.choices(range(256), k=PROMPT_TOKENS)

    def try_once(self, lot):
        probed, others = self.prompt(), self.prompt()
        own, other = self.fleet.new_id(), self.fleet.new_id()
        asked = {
            "token_ids": probed if lot else others,
            "cache_salt": VICTIM,
            "request_id": own if lot else other,
            "session_id": own if lot else other,
        }
        victim = self.client("router", VICTIM)
        booked = victim.ask("POST", "/select_and_reserve", asked)
        assert booked.status == 200, booked
        selected = {"selection_id": f"s-{asked['request_id']}"}
        del asked["request_id"]
        assert victim.ask("POST", "/select", {**asked, **selected}).status == 200
        self._probe_over_http(lot, probed, own)
        self._probe_over_nats(lot, probed)
        self._book_over_nats(lot, probed, own)
        self._book_over_http(lot, probed, own)
        for request_id in (booked.json()["request_id"], selected["selection_id"]):
            victim.ask("DELETE", f"/reservations/{request_id}")

    def _probe_over_http(self, lot, tokens, own):
        client, note = self.client("router", self.attacker), self.observations.note
        prompt = {"token_ids": tokens, "cache_salt": self.salt}
        for path in ("/select", "/overlap_scores", "/potential_loads"):
            note(path, lot, client.ask("POST", path, prompt), is_timed=True)
        asked = {**prompt, "explain": True, "session_id": own}
        note("/select, explained", lot, client.ask("POST", "/select", asked))
        note("/dashboard/look", lot, client.ask("POST", "/dashboard/look", prompt))
        batch = {"requests": [prompt, prompt]}
        note("/select:batch", lot, client.ask("POST", "/select:batch", batch))
        for path in ADMIN_ROUTES:
            note(path, lot, client.ask("GET", path))
        reply = self.client("indexer", self.attacker).ask("POST", "/query", prompt)
        note("indexer /query", lot, reply, is_timed=True)

    def _book_over_http(self, lot, tokens, own):
        """Use the victim's id, or the one that it would have had."""
        client = self.client("router", self.attacker)
        prompt = {"token_ids": tokens, "cache_salt": self.salt}
        freed = {"steps": [{"step": "free", "request_id": own}]}
        for method, path, body in (
            ("POST", "/reservations", {"selection_id": f"s-{own}"}),
            ("POST", f"/reservations/{own}/prefill_complete", {}),
            ("POST", f"/reservations/{own}/output_block", {}),
            ("DELETE", f"/reservations/{own}", None),
            ("POST", "/reservations:batch", freed),
            ("POST", "/select_and_reserve", {**prompt, "request_id": own}),
        ):
            reply = client.ask(method, path, body)
            same = structs.replace(reply, body=reply.body.replace(own.encode(), b"own"))
            channel = f"{method} {path.replace(own, '{id}')}"
            self.observations.note(channel, lot, same, is_timed=path == "/select_and_reserve")
        client.ask("DELETE", f"/reservations/{own}")

    def _probe_over_nats(self, lot, tokens):
        salt = {"cache_salt": self.salt}
        for subject, method, body in (
            (ROUTER, "select", {"token_ids": tokens, **salt}),
            (ROUTER, "overlap_scores", {"token_ids": tokens, **salt}),
            (ROUTER, "potential_loads", {"tokens": tokens, **salt}),
            (ROUTER, "loads", {}),
            (INDEX, "FindMatchesTokens", {"tokens": tokens, **salt}),
            (INDEX, "DumpTree", None),
        ):
            asked = {"method": method, **body} if subject == ROUTER else {method: body}
            self._ask_bus(lot, method, subject, method if body is None else asked)

    def _book_over_nats(self, lot, tokens, own):
        new = {"tokens": tokens, "cache_salt": self.salt}
        for method, fields in (("mark_prefill", {}), ("mark_free", {}), ("new", new)):
            body = {"method": method, "request_id": own, **fields}
            self._ask_bus(lot, method, ROUTER, body, own)
        freed = {"method": "mark_free", "request_id": own}
        self.bus.request(ROUTER, freed, token_of(self.attacker))

    def _ask_bus(self, lot, method, subject, body, own="own"):
        reply = self.bus.request(subject, body, token_of(self.attacker))
        self.observations.note_body(f"NATS {method}", lot, reply.replace(own.encode(), b"own"))


class GuessTries(Tries):
    """Guesses of the victim's token: by lot, one that begins like it, or one that does not."""

    def try_once(self, lot):
        token = token_of(VICTIM)
        guess = (token[:-1] if lot else token[:-1][::-1]) + self.rng.choice("ABCDEF")
        said = {"authorization": f"Bearer {guess}"}
        reply = self.client("router", None).ask("POST", "/select", {"token_ids": [1]}, **said)
        self.observations.note("guess", lot, reply, is_timed=True)


class EngineTries(Tries):
    """What a tenant learns through forwarders, which tokenize, and engines, which keep prefixes."""

    def text(self):
        return "".join(
            self.rng.choices(string.ascii_letters + string.digits + " ", k=PROMPT_TOKENS)
        )

    def try_once(self, lot):
        probed, others = self.text(), self.text()
        asked = probed if lot else others
        for forwarder in ("forwarder", "tokenizing"):
            self._ask(forwarder, VICTIM, asked, VICTIM)
            self._chat(forwarder, VICTIM, asked, VICTIM)
        self._probe(lot, probed)

    def _probe(self, lot, text):
        note = self.observations.note
        for forwarder in ("forwarder", "tokenizing"):
            only_placed = {"nvext": {"annotations": ["query_instance_id:"]}}
            reply = self._ask(forwarder, self.attacker, text, self.salt, **only_placed)
            note(f"{forwarder}, placement", lot, reply, is_timed=True)
        tokenize = {"model": "default", "prompt": text}
        reply = self.client("worker", self.attacker).ask("POST", "/tokenize", tokenize)
        note("/tokenize", lot, reply, is_timed=True)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        reply = self._ask("forwarder", self.attacker, text, self.salt, **streamed)
        note("completion", lot, reply, is_timed=True)
        reply = self._chat("tokenizing", self.attacker, text, self.salt)
        note("chat", lot, reply, is_timed=True)
        reply = self.client("forwarder", self.attacker).ask("GET", "/v1/models")
        note("/v1/models", lot, reply)

    def _ask(self, forwarder, name, text, salt, **fields):
        return self._complete(forwarder, name, "/v1/completions", salt, prompt=text, **fields)

    def _chat(self, forwarder, name, text, salt):
        """Chat, in a session that the other tenant can name as well."""
        said = {"messages": [{"role": "user", "content": text}]}
        headers = {"x-session-id": text[:16].encode().hex()}
        return self._complete(forwarder, name, "/v1/chat/completions", salt, headers, **said)

    def _complete(self, forwarder, name, path, salt, headers=None, **fields):
        body = {"model": "default", "max_tokens": 1, "cache_salt": salt, **fields}
        reply = self.client(forwarder, name).ask("POST", path, body, **(headers or {}))
        assert reply.status == 200, reply
        return reply
