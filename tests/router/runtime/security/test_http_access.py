"""The TLS context of a client: made once, and again when its files have changed."""

import pytest

from router.errors import ConfigError
from router.runtime.security.http_access import ClientTls, HttpAccess
from support.processes.certificates import Authority


def names(context):
    return {part[0][1] for each in context.get_ca_certs() for part in each["subject"]}


@pytest.fixture
def authorities(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    return Authority(tmp_path / "first", "first"), Authority(tmp_path / "second", "second")


def test_context_is_made_once_until_a_file_changes(authorities):
    first, second = authorities
    tls = ClientTls(str(first.path))
    context = tls.context()
    assert tls.context() is context
    first.path.write_bytes(second.path.read_bytes())
    assert names(tls.context()) == {"second"}
    assert tls.context() is tls.context()


@pytest.mark.parametrize("content", [b"", b"no certificate", None])
def test_files_that_cannot_be_read_change_nothing(authorities, content, caplog):
    first, second = authorities
    tls = ClientTls(str(first.path))
    context = tls.context()
    first.path.unlink() if content is None else first.path.write_bytes(content)
    assert tls.context() is context
    assert "not reloaded" in caplog.text
    first.path.write_bytes(second.path.read_bytes())
    assert names(tls.context()) == {"second"}


def test_renewed_certificate_is_presented(authorities):
    first, _ = authorities
    tls = ClientTls(str(first.path), *first.issue("client"), prefix="peer_tls")
    context = tls.context()
    first.issue("client")
    assert tls.context() is not context


def test_systems_authorities_are_read_when_needed_and_kept_if_they_vanish(
    authorities, tmp_path, monkeypatch
):
    first, second = authorities
    file = tmp_path / "system.pem"
    file.write_bytes(first.path.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
    tls = ClientTls()
    assert names(tls.context()) == {"first"}
    context = tls.context()
    file.unlink()
    assert tls.context() is context
    file.write_bytes(second.path.read_bytes())
    assert names(tls.context()) == {"second"}


def test_unusable_file_names_its_setting(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        ClientTls(str(tmp_path / "missing"), prefix="share")
    assert refusal.value.key == "share_ca_file"


def test_without_tls_no_server_is_trusted():
    assert not HttpAccess().options("client", "http://router:8092")["verify"].get_ca_certs()
    assert HttpAccess().options("client", "https://router:8092")["verify"].get_ca_certs()


def test_named_authorities_are_read_without_tls_too(tmp_path):
    access = HttpAccess(ca_file=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="client_tls_ca_file"):
        access.options("client", "http://router:8092")
