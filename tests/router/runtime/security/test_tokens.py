from hashlib import sha256

import pytest

from router.errors import ConfigError
from router.runtime.security import tokens
from router.runtime.security.tokens import read_tokens

SECRET = "a-token-of-some-length"


def test_a_token_is_found_by_itself_or_by_its_digest():
    digest = sha256(b"another-token-of-some-length").hexdigest()
    table = read_tokens(
        f'[[tokens]]\nname = "a"\nscopes = ["route"]\ntoken = "{SECRET}"\n'
        f'[[tokens]]\nname = "b"\nscopes = ["metrics", "route"]\ntoken_sha256 = "{digest}"\n'
    )
    assert table.find(SECRET.encode()).caller.name == "a"
    found = table.find(b"another-token-of-some-length")
    assert (found.caller.name, found.caller.scopes) == ("b", {"metrics", "route"})
    assert table.find(b"") is table.find(SECRET.encode()[:-1]) is table.find(b"\xff" * 99) is None


def test_every_token_is_compared_whichever_is_presented(monkeypatch):
    """What a guess costs says nothing of how right it is."""
    lines = [
        f'[[tokens]]\nname = "t{n}"\nscopes = ["route"]\ntoken = "{n:032}"\n' for n in range(9)
    ]
    table = read_tokens("".join(lines))
    real, compared = tokens.compare_digest, []

    def counted(one, other):
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(tokens, "compare_digest", counted)
    for presented in (f"{0:032}", f"{8:032}", "nobody's", "", "x" * 4000):
        table.find(presented.encode())
        assert compared == [(32, 32)] * 9
        compared.clear()


def test_a_tenants_token_is_bound_to_its_name_as_salt_unless_said():
    text = (
        f'[[tokens]]\nname = "a"\nscopes = ["route"]\ntoken = "{SECRET}"\ntenant = "acme"\n'
        'requests_per_s = 5\n[[tenants]]\nname = "acme"\nrequests_per_s = 7\n'
    )
    (token,) = read_tokens(text).tokens
    assert token.caller.cache_salts == {"acme"}
    assert token.caller.routing_groups == {"*"}
    assert token.requests_per_s == 5
    (tenant,) = read_tokens(text).tenants
    assert (tenant.name, tenant.requests_per_s) == ("acme", 7)


def test_a_token_expires_in_utc_unless_said():
    line = f'[[tokens]]\nname = "a"\nscopes = ["route"]\ntoken = "{SECRET}"\n'
    (zoned,) = read_tokens(line + "expires = 1970-01-02T01:00:00+01:00").tokens
    (local,) = read_tokens(line + "expires = 1970-01-02T00:00:00").tokens
    for token in (zoned, local):
        assert not token.is_expired(86_399.9)
        assert token.is_expired(86_400.0)


NAMED = 'name = "a"\nscopes = ["route"]\n'
GOOD = f'[[tokens]]\n{NAMED}token = "{SECRET}"\n'
DIGEST = "0" * 64


@pytest.mark.parametrize(
    "text",
    [
        GOOD + "unknown = 1\n",
        f'[[tokens]]\nname = "a"\nscopes = ["root"]\ntoken = "{SECRET}"\n',
        f'[[tokens]]\nname = "a"\nscopes = []\ntoken = "{SECRET}"\n',
        f'[[tokens]]\nname = "a b"\nscopes = ["route"]\ntoken = "{SECRET}"\n',
        GOOD + f'token_sha256 = "{DIGEST}"\n',
        f"[[tokens]]\n{NAMED}",
        f'[[tokens]]\n{NAMED}token = "too-short"\n',
        f'[[tokens]]\n{NAMED}token_sha256 = "zz"\n',
        GOOD + 'cache_salts = ["a"]\n',
        f'[[tokens]]\nname = "a"\nscopes = ["admin"]\ntenant = "t"\ntoken = "{SECRET}"\n',
        GOOD + 'tenant = "a/b"\n',
        GOOD + "requests_per_s = -1\n",
        GOOD + "requests_per_s = nan\n",
        GOOD + f'[[tokens]]\n{NAMED}token = "{SECRET}2"\n',
        GOOD + f'[[tokens]]\nname = "b"\nscopes = ["route"]\ntoken = "{SECRET}"\n',
        GOOD.rstrip('"\n'),
        f'token = "{SECRET}"',
    ],
)
def test_invalid_token_file_is_refused_without_showing_tokens(text):
    with pytest.raises(ConfigError) as refusal:
        read_tokens(text)
    said = str(refusal.value.body())
    assert "token_file" in said
    assert SECRET not in said
    assert "too-short" not in said


def test_a_token_limits_its_strict_priority():
    line = f'[[tokens]]\nname = "a"\nscopes = ["route"]\ntoken = "{SECRET}"\n'
    found = read_tokens(line + "max_strict_priority = 3\n").find(SECRET.encode())
    assert found.caller.max_strict_priority == 3
    with pytest.raises(ConfigError, match="max_strict_priority"):
        read_tokens(line + "max_strict_priority = -1\n")
