import pytest

from router.security.errors import ForbiddenError, RateLimitedError, UnauthenticatedError
from router.security.guard import Guard
from router.security.tokens import read_tokens

ROUTE, ADMIN, METRICS, ACME, OTHER = (f"token-of-{n}-and-more" for n in "abcde")
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


def test_without_tokens_everybody_may_do_everything():
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


def test_probes_are_open_and_a_route_that_nobody_thought_of_is_closed(guard):
    for path in ("/health", "/ready"):
        assert ask(guard, None, "GET", path)
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
def test_who_is_not_known_is_401_and_learns_nothing(guard, headers):
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


def test_who_is_refused_takes_nothing_from_its_tenant(guard):
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


def test_over_nats_who_asks_is_known_before_what(guard):
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


def test_tokens_change_and_who_asked_much_still_has(guard):
    for _ in range(2):
        ask(guard, ACME)
    guard.replace(read_tokens(FILE.replace(ADMIN, "another-admins-token")))
    with pytest.raises(UnauthenticatedError):
        ask(guard, ADMIN, "GET", "/dump")
    assert ask(guard, "another-admins-token", "GET", "/dump").name == "operator"
    with pytest.raises(RateLimitedError):
        ask(guard, ACME)
