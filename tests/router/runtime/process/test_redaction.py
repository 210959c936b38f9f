import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.runtime.process.redaction import redact, without_addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nats://me:secret@a:1, redis://:s3cret@b/0", "nats://***@a:1, redis://***@b/0"),
        ("nats://u:p@a:1,nats://u:p@b:1", "nats://***@a:1,nats://***@b:1"),
        ("redis://u:p@ss@host:6379/0 is away", "redis://***@host:6379/0 is away"),
        ("redis://u:p/ss@host:6379/0", "redis://***@host:6379/0"),
        ("redis://h/0?password=x&db=1", "redis://h/0?password=***&db=1"),
        (
            "http://h/a?db=1;api_KEY=x#access_token=y",
            "http://h/a?db=1;api_KEY=***#access_token=***",
        ),
        ("'redis://:p@h/0'", "'redis://***@h/0'"),
        ("TLS://me@h", "TLS://***@h"),
        ("http://h:80/path?page=2", "http://h:80/path?page=2"),
        ("authorization: Bearer abc.DEF-1_2", "authorization: Bearer ***"),
        ("Basic dTpw was refused", "Basic *** was refused"),
        ("no address in it: a@b", "no address in it: a@b"),
        ("nothing here", "nothing here"),
        ("http://a/b?c=d@e", "http://***@e"),
    ],
)
def test_redaction_hides_secrets_and_keeps_the_rest(text, expected):
    assert redact(text) == expected
    assert redact(expected) == expected


@given(st.text("ab@:/?&=#;,.%", max_size=12))
def test_password_of_any_delimiters_is_hidden(password):
    shown = redact(f"nats://user:S3CR{password}3T@host:4222")
    assert shown.endswith("***@host:4222")
    assert "S3CR" not in shown
    assert "3T" not in shown


@pytest.mark.parametrize(
    "text", ["not connected to NATS at nats://u:p@bus:4222", "tcp://10.0.0.7:5557: no connection"]
)
def test_strangers_see_schemes_alone(text):
    shown = without_addresses(text)
    assert "://***" in shown
    assert "bus" not in shown
    assert "10.0" not in shown
