import pytest

from router.runtime.security.errors import ForbiddenError, RateLimitedError, UnauthenticatedError
from router.runtime.security.guard import MOST_ADDRESSES, Guard
from router.runtime.security.tokens import read_tokens

ROUTE, ADMIN, METRICS, ACME, OTHER, LOADS = (f"token-of-{n}-and-more" for n in "abcdef")
FILE = f"""
[[tokens]]
name = "gateway"
token = "{ROUTE}"
scopes = ["route"]
expires = 1970-01-02T00:00:00Z
[[tokens]]
name = "operator"
token = "{ADMIN}"
scopes = ["admin"]
[[tokens]]
name = "prometheus"
token = "{METRICS}"
scopes = ["metrics"]
[[tokens]]
name = "forwarder"
token = "{LOADS}"
scopes = ["loads"]
[[tokens]]
name = "acme-1"
token = "{ACME}"
scopes = ["route"]
tenant = "acme"
requests_per_s = 2
[[tokens]]
name = "acme-2"
token = "{OTHER}"
scopes = ["route"]
tenant = "acme"
[[tenants]]
name = "acme"
requests_per_s = 3
"""


@pytest.fixture
def guard():
    guard = Guard()
    guard.replace(read_tokens(FILE))
    return guard


def ask(guard, token, method="POST", path="/select", now_s=0.0, unix_s=0.0):
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    return guard.admit(method, path, headers, now_s, unix_s)


def test_without_tokens_every_request_is_admitted():
    guard = Guard()
    assert guard.is_idle
    assert ask(guard, None, "GET", "/dump").tenant is None


def test_each_scope_opens_its_routes_and_no_others(guard):
    for token, method, path in (
        (ROUTE, "POST", "/select_and_reserve"),
        (ROUTE, "DELETE", "/reservations/any"),
        (ADMIN, "GET", "/dump"),
        (ADMIN, "PATCH", "/workers/7"),
        (METRICS, "GET", "/metrics"),
    ):
        assert ask(guard, token, method, path).name
        for other in {ROUTE, ADMIN, METRICS} - {token}:
            with pytest.raises(ForbiddenError):
                ask(guard, other, method, path)


def test_scope_loads_shows_loads_alone_and_admin_includes_it(guard):
    for token in (LOADS, ADMIN):
        assert ask(guard, token, "GET", "/loads").name
        assert ask(guard, token, "NATS", "loads").name
    for path in ("/workers", "/dump", "/ready?verbose", "/dashboard/stream"):
        with pytest.raises(ForbiddenError):
            ask(guard, LOADS, "GET", path)
    with pytest.raises(ForbiddenError):
        ask(guard, ROUTE, "GET", "/loads")


def test_probes_are_open_and_unknown_routes_are_closed(guard):
    for path in ("/health", "/ready"):
        for token in (None, "unknown", ROUTE):
            assert not ask(guard, token, "GET", path, unix_s=86_400.0).may("admin")
        assert ask(guard, ADMIN, "GET", path).may("admin")
    for path in ("/dump/", "//dump", "/DUMP", "/select/../dump", "/workers/7/x", "/new"):
        with pytest.raises(ForbiddenError):
            ask(guard, ROUTE, "GET", path)
        with pytest.raises(UnauthenticatedError):
            ask(guard, None, "GET", path)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer nobody's-token-at-all")],
        [(b"authorization", b"Basic " + ROUTE.encode())],
        [(b"authorization", ROUTE.encode())],
        [(b"authorization", b"Bearer " + b"x" * 10_000)],
        [(b"authorization", b"Bearer " + ROUTE.encode())] * 2,
        [(b"authorization", b"Bearer " + ROUTE.upper().encode())],
        [(b"x-authorization", b"Bearer " + ROUTE.encode())],
    ],
)
def test_unknown_token_is_401_without_details(guard, headers):
    with pytest.raises(UnauthenticatedError) as refusal:
        guard.admit("POST", "/select", headers, 0.0, 0.0)
    said = str(refusal.value.body())
    assert refusal.value.http_status == 401
    assert ROUTE not in said
    assert "gateway" not in said


def test_a_token_expires(guard):
    assert ask(guard, ROUTE, unix_s=86_399.0).name == "gateway"
    with pytest.raises(UnauthenticatedError, match="expired"):
        ask(guard, ROUTE, unix_s=86_400.0)


def test_a_token_and_its_tenant_have_rates(guard):
    for _ in range(2):
        ask(guard, ACME)
    with pytest.raises(RateLimitedError, match="acme-1") as refusal:
        ask(guard, ACME)
    assert refusal.value.http_status == 429
    assert refusal.value.retry_after_s == pytest.approx(0.5)
    ask(guard, OTHER)
    with pytest.raises(RateLimitedError, match="acme:") as refusal:
        ask(guard, OTHER)
    assert refusal.value.limit == 3
    assert ask(guard, ACME, now_s=0.6).name == "acme-1"


def access(guard, token, path="/select"):
    return guard.access("POST", path, [(b"authorization", f"Bearer {token}".encode())], 0.0)


def test_an_access_is_limited_by_rates_and_by_the_end_of_its_token(guard):
    limited = access(guard, ACME)
    assert (limited.caller.name, limited.is_limited) == ("acme-1", True)
    for _ in range(2):
        guard.take(limited, 0.0, 0.0)
    with pytest.raises(RateLimitedError, match="acme-1"):
        guard.take(limited, 0.0, 0.0)
    ending = access(guard, ROUTE)
    assert ending.is_limited
    guard.take(ending, 0.0, 86_399.0)
    with pytest.raises(UnauthenticatedError, match="expired"):
        guard.take(ending, 0.0, 86_400.0)


def test_an_access_belongs_to_its_tokens(guard):
    before = access(guard, ACME)
    assert before.table is guard.table
    guard.replace(read_tokens(FILE))
    assert before.table is not guard.table
    with pytest.raises(ForbiddenError):
        access(guard, ACME, "/dump")
    assert not Guard().access("POST", "/select", [], 0.0).is_limited


def test_refused_request_costs_its_tenant_nothing(guard):
    for _ in range(2):
        ask(guard, ACME)
    for _ in range(9):
        with pytest.raises(RateLimitedError):
            ask(guard, ACME)
    assert ask(guard, OTHER).tenant == "acme"


def test_a_batch_is_charged_by_its_items_afterwards(guard):
    caller = ask(guard, OTHER)
    guard.charge(caller, 5, now_s=0.0)
    with pytest.raises(RateLimitedError, match="acme:") as refusal:
        ask(guard, OTHER)
    assert refusal.value.retry_after_s == pytest.approx(4 / 3)  # 1 + 5 taken of 3, at 3 a second
    guard.replace(read_tokens(""))
    guard.charge(caller, 5, now_s=0.0)  # whose token is gone


def test_over_nats_the_caller_is_identified_before_the_request(guard):
    said = [(b"authorization", f"Bearer {ACME}".encode())]
    caller = guard.identify(said, 0.0, 0.0)
    guard.check_scope(caller, "NATS", "select")
    for name in ("loads", "DumpTree", "unheard-of"):
        with pytest.raises(ForbiddenError):
            guard.check_scope(caller, "NATS", name)
    guard.identify(said, 0.0, 0.0)
    with pytest.raises(RateLimitedError):
        guard.identify(said, 0.0, 0.0)
    with pytest.raises(UnauthenticatedError):
        guard.identify([], 0.0, 0.0)


def test_a_default_rate_counts_for_tokens_without_one_and_without_tokens():
    guard = Guard(default_requests_per_s=1.0)
    assert not guard.is_idle
    ask(guard, None)
    with pytest.raises(RateLimitedError):
        ask(guard, None)
    assert ask(guard, None, "GET", "/health")
    guard.replace(read_tokens(FILE))
    ask(guard, ADMIN, "GET", "/dump")
    with pytest.raises(RateLimitedError):
        ask(guard, ADMIN, "GET", "/dump")


def test_changed_default_rate_counts_at_once_and_makes_accesses_stale():
    guard = Guard()
    access = guard.access("POST", "/select", [], 0.0)
    guard.set_rates(1.0, 0.0)
    assert not guard.is_idle
    assert access.table is not guard.table
    ask(guard, None)
    with pytest.raises(RateLimitedError):
        ask(guard, None)
    guard.set_rates(0.0, 0.0)
    assert guard.is_idle
    ask(guard, None)


def test_changed_rates_keep_tokens_and_what_was_spent_of_their_own_limits(guard):
    for _ in range(2):
        ask(guard, ACME)
    access = guard.access("GET", "/dump", [(b"authorization", f"Bearer {ADMIN}".encode())], 0.0)
    guard.set_rates(1.0, 1.0)
    assert access.table is not guard.table
    with pytest.raises(RateLimitedError):
        ask(guard, ACME)
    with pytest.raises(UnauthenticatedError):
        ask(guard, None)
    ask(guard, ADMIN, "GET", "/dump")
    with pytest.raises(RateLimitedError):
        ask(guard, ADMIN, "GET", "/dump")
    for _ in range(2):
        guard.admit("GET", "/docs", [], 0.0, 0.0, "a")
    with pytest.raises(RateLimitedError):
        guard.admit("GET", "/docs", [], 0.0, 0.0, "a")


def test_replaced_tokens_keep_spent_rates(guard):
    for _ in range(2):
        ask(guard, ACME)
    guard.replace(read_tokens(FILE.replace(ADMIN, "another-admins-token")))
    with pytest.raises(UnauthenticatedError):
        ask(guard, ADMIN, "GET", "/dump")
    assert ask(guard, "another-admins-token", "GET", "/dump").name == "operator"
    with pytest.raises(RateLimitedError):
        ask(guard, ACME)


def test_each_address_without_token_has_a_rate_on_open_routes():
    guard = Guard(open_requests_per_s=2.0)
    guard.replace(read_tokens(FILE))

    def page(address, now_s=0.0, token=None):
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        return guard.admit("GET", "/docs", headers, now_s, 0.0, address)

    for _ in range(4):
        page("10.0.0.1")
    with pytest.raises(RateLimitedError, match="without a token") as refusal:
        page("10.0.0.1")
    assert refusal.value.retry_after_s == pytest.approx(0.5)
    page("10.0.0.2")
    page("10.0.0.1", token=ROUTE)
    page("10.0.0.1", now_s=0.6)
    for _ in range(99):
        guard.admit("GET", "/ready", [], 0.0, 0.0, "10.0.0.1")


def test_addresses_beyond_the_limit_are_forgotten():
    guard = Guard(open_requests_per_s=1.0)
    guard.replace(read_tokens(FILE))
    for number in range(MOST_ADDRESSES + 1):
        for _ in range(2):
            guard.admit("GET", "/docs", [], 0.0, 0.0, str(number))
    guard.admit("GET", "/docs", [], 0.0, 0.0, "0")
    with pytest.raises(RateLimitedError):
        guard.admit("GET", "/docs", [], 0.0, 0.0, str(MOST_ADDRESSES))


def test_token_may_come_as_an_api_key_if_there_is_no_other(guard):
    def admitted(*headers):
        return guard.admit("POST", "/select", headers, 0.0, 0.0).name

    key = (b"x-api-key", ROUTE.encode())
    assert admitted(key) == admitted((b"authorization", b"Bearer " + ROUTE.encode()))
    for headers in ((key, key), (key, (b"authorization", b"Bearer x")), ((b"x-api-key", b"x"),)):
        with pytest.raises(UnauthenticatedError):
            admitted(*headers)
