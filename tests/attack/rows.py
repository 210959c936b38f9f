"""How `make attack` tries each row of the table of attacks in `router/runtime/security/README.md`.

As a program, it prints the tests of the rows that cannot be tried from outside a process.
"""

import re
import sys
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "router" / "runtime" / "security" / "README.md"
TITLE = "## Attacks, and the tests of the defences"


class Inside(Struct, frozen=True):
    """A row whose own tests are run as they are, and why no attack from outside tries it."""

    why: str


REDIS = Inside("the attacker is the Redis server, or writes to it; the tests have a real one")
ENGINE = Inside("the attacker is an engine; the tests have one")
NEIGHBOUR = Inside("the attacker is another user of the machine; the tests make its files")
BETWEEN = Inside("the attacker is between two workers; the tests put one there")

ROWS: dict[str, tuple[str, ...] | Inside] = {
    "slow-loris: headers, the next request's headers, silence": (
        "test_http.py::test_headers_that_come_slowly_are_refused",
    ),
    "TLS handshakes that never end": ("test_edges.py::test_handshakes_that_never_end_are_aborted",),
    "slow body; an endless body that is not read": (
        "test_http.py::test_body_that_comes_slowly_is_refused",
        "test_http.py::test_hundred_megabytes_are_refused",
    ),
    "half-closed connections": ("test_http.py::test_half_closed_connections_leave_nothing",),
    "responses that are never read, to keep connections and engines busy": (
        "test_edges.py::test_responses_that_are_never_read_hold_no_connection",
    ),
    "requests hidden in bodies, after `upgrade: h2c`": (
        "test_http.py::test_request_hidden_in_a_body_is_none",
    ),
    "headers that bypass the guard: trailers; endless trailers and chunk extensions": (
        "test_http.py::test_trailers_are_no_headers_and_bounded",
    ),
    "the same at the forwarder": (
        "test_http.py::test_trailers_are_no_headers_and_bounded",
        "test_http.py::test_smuggled_requests_are_refused",
        "test_http.py::test_invalid_bodies_are_refused",
    ),
    "floods of connections": ("test_http.py::test_flood_of_connections_is_refused",),
    "floods of headers, endless URLs": ("test_http.py::test_flood_of_headers_is_refused",),
    "request smuggling: CL+TE, two lengths, unusual transfer codings": (
        "test_http.py::test_smuggled_requests_are_refused",
    ),
    "wrong content types, numbers beyond u32, NaN, duplicate keys, invalid UTF-8, deep nesting, "
    "compressed bombs": ("test_http.py::test_invalid_bodies_are_refused",),
    "100 MB bodies": ("test_http.py::test_hundred_megabytes_are_refused",),
    "web pages in a local browser: forms and cross-origin requests (415, no CORS), DNS rebinding "
    "to 127.0.0.1": (
        "test_local_browser.py::test_name_that_was_bound_to_this_machine_is_refused",
        "test_local_browser.py::test_forms_and_requests_of_other_sites_are_refused",
        "test_local_browser.py::test_second_host_is_refused",
        "test_local_browser.py::test_no_public_address_without_tokens",
    ),
    "bodies that take seconds to parse": ("test_http.py::test_invalid_bodies_are_refused",),
    "garbage in the session store; a server that is not Redis; a Redis that lost its data": REDIS,
    "a load report with a forged sequence number, to silence a worker": (
        "test_bus.py::test_forged_report_silences_no_worker",
        "test_bus.py::test_flood_of_messages_leaves_the_fleet_exact",
    ),
    "many large bodies at once, to exhaust a forwarder's memory": (
        "test_http.py::test_bodies_of_the_forwarder_together_are_bounded",
    ),
    "guessing tokens by time": (
        "test_channels.py::test_no_channel_shows_what_another_tenant_has_asked",
    ),
    "bodies of unauthenticated callers": (
        "test_http.py::test_stranger_is_refused_before_its_body_is_read",
    ),
    "path traversal, paths that bypass the guard": (
        "test_http.py::test_no_path_leads_around_the_guard",
        "test_http.py::test_scopes_are_no_others",
    ),
    "the same over NATS: missing token, missing scope, salts and ids of others, queries of the "
    "index": (
        "test_bus.py::test_stranger_gets_no_details",
        "test_bus.py::test_tenant_reaches_nothing_of_another",
    ),
    "messages that break NATS clients, to disconnect routers": (
        "test_bus.py::test_no_message_disconnects_a_process",
    ),
    "reply subjects that point into the event log, or to the server's own subjects": (
        "test_bus.py::test_replies_go_to_inboxes_alone",
    ),
    "numbers out of range": ("test_http.py::test_registrations_beyond_any_range_are_refused",),
    "steering engines: a transfer from a host of the caller's choice, priority over others, "
    "fields of next year's engines": ("test_tenants.py::test_callers_steer_no_engine",),
    "guessing another tenant's prompts by the time of tokenization": (
        "test_channels.py::test_no_channel_shows_what_another_tenant_has_asked",
        "test_tenants.py::test_completions_under_anothers_salt_are_refused_before_tokenization",
    ),
    "what a stranger learns from a probe: addresses, passwords in URLs, the inventory; and what "
    "it costs": (
        "test_http.py::test_stranger_learns_only_whether_a_process_is_ready",
        "test_http.py::test_documentation_runs_no_script_and_has_a_rate",
    ),
    "evading rates with batches": (
        "test_tenants.py::test_batches_evade_no_rate",
        "test_bus.py::test_batches_evade_no_rate",
    ),
    "another tenant's request ids": (
        "test_tenants.py::test_requests_and_selections_of_another_tenant_cannot_be_used",
        "test_channels.py::test_no_channel_shows_what_another_tenant_has_asked",
    ),
    "probing the prompts of others, by salts or hashes": (
        "test_tenants.py::test_salts_and_hashes_of_another_tenant_are_refused",
        "test_channels.py::test_no_channel_shows_what_another_tenant_has_asked",
    ),
    "probing the prompts of others at an engine's own port": (
        "test_tenants.py::test_completions_under_anothers_salt_are_refused_before_tokenization",
    ),
    "probing hashes on the bus and in dumps": (
        "test_tenants.py::test_hashes_of_blocks_on_the_bus_and_in_dumps_are_keyed",
    ),
    "log injection, metrics with many labels": (
        "test_http.py::test_guessed_tokens_and_injected_lines_reach_no_log_and_no_metric",
    ),
    "secrets in responses and logs": ("test_http.py::test_secrets_are_in_no_response",),
    "blocks replaced in Redis, with the right checksum": REDIS,
    "blocks and requests changed between two workers, with the right checksum": BETWEEN,
    "connections to the block server that prove nothing; a lack of descriptors or threads": (
        "test_block_server.py::test_strangers_hold_few_places_for_a_short_time",
        "test_block_server.py::test_garbage_gets_no_block_and_costs_nothing",
        "test_block_server.py::test_proof_of_another_secret_is_refused",
    ),
    "a bug in the answer to one request on the bus": Inside("no such bug is known to an attacker"),
    "arguments of tool calls that are deep or huge": (
        "test_http.py::test_deep_or_huge_tool_arguments_are_refused",
    ),
    "code of another host in the documentation's page": (
        "test_http.py::test_documentation_runs_no_script_and_has_a_rate",
    ),
    "callers in the cluster that go to engines, past tokens and rates": Inside(
        "Kubernetes refuses them, by the policies that the chart renders"
    ),
    "a tenant that goes ahead of others, or hides its prompts from placement": (
        "test_tenants.py::test_tenant_goes_ahead_of_no_other",
    ),
    "watching the dashboard with a token that was removed, expired, or lost its scope": Inside(
        "the other attacks need the tokens of the fleet; the tests have a file of their own"
    ),
    "web pages in any browser: forms and cross-site requests to any route of any server that "
    "changes something": (
        "test_local_browser.py::test_forms_and_requests_of_other_sites_are_refused",
    ),
    "messages made to break a parser, of engines, agents, peers and routers: invalid UTF-8, deep "
    "nesting, huge numbers, lengths that go beyond the end": (
        "test_bus.py::test_no_message_disconnects_a_process",
        "test_http.py::test_invalid_bodies_are_refused",
        "test_block_server.py::test_garbage_gets_no_block_and_costs_nothing",
    ),
    "a peer that proves nothing and sends what cannot be read; one that offers memory of another "
    "host": BETWEEN,
    "a second response behind a malformed one, to be taken for the answer": ENGINE,
    "an engine that publishes faster than it is read, to exhaust memory: 64 MiB may wait in each "
    "of its sockets, then it is connected again and replayed": ENGINE,
    "odd requests that spoil the predictions of all ranks of a model": ENGINE,
    "machine code of another user: in a cache folder that others can write to, or below one; files "
    "and links in it": NEIGHBOUR,
    "another user's `data_dir`, or one that others can change; links in the place of its files": (
        NEIGHBOUR
    ),
    "reading state, keys and logs of another user, under any umask": NEIGHBOUR,
    "files in `/dev/shm` that are there before ours, to read blocks or to keep an agent from "
    "starting": NEIGHBOUR,
    "a password in the remote tier's URL, which process lists show": NEIGHBOUR,
    "certificates withdrawn while a client runs; the cost of reading them for each connection": (
        Inside("the attacker has a certificate of the fleet; the tests withdraw one")
    ),
    "a user of NATS that publishes or reads what is not its role's work": Inside(
        "the fleet's bus has no users; the tests start a fleet with one for each role"
    ),
    "a NATS server without TLS that asks for credentials": Inside(
        "the attacker is the NATS server; the tests have one that asks"
    ),
}
"""Tests in this folder by the first column of the table."""


def table(text):
    """Return the rows of the table: the tests that are named there, by attack."""
    part = text.partition(TITLE)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (`.+`) \|$", part, re.MULTILINE)
    return {attack: re.findall(r"`([^`]+::[^`]+)`", tests) for attack, tests in rows}


def ids_inside(text):
    """Return the ids of the tests of the rows that are tried inside a process."""
    base = ROOT / "tests" / "router"
    ids = []
    for attack, tests in table(text).items():
        if isinstance(ROWS.get(attack), Inside):
            for each in tests:
                path, _, name = each.partition("::")
                ids.append(f"{(base / path).resolve().relative_to(ROOT)}::{name}")
    return ids


if __name__ == "__main__":
    sys.stdout.write("\n".join(ids_inside(TABLE.read_text())) + "\n")
