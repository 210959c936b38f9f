"""Authorities and certificates of a test, made in it."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

_SIGNS = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
    encipher_only=False, decipher_only=False,
)  # fmt: skip
"""Python 3.13 and later require it of authorities, and key identifiers of all certificates."""


def _name(common_name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class Authority:
    """Signs certificates; its own is at `path`."""

    def __init__(self, directory, name="authority"):
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_SIGNS, critical=True)
        )
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(self._signed(builder))

    def issue(self, name):
        """Paths of a certificate for this machine, and of its key; the same name replaces both."""
        key = ec.generate_private_key(ec.SECP256R1())
        local = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        builder = self._builder(_name(name), key).add_extension(
            x509.SubjectAlternativeName(local), critical=False
        )
        cert_path, key_path = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        cert_path.write_bytes(self._signed(builder))
        key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return str(cert_path), str(key_path)

    def _builder(self, subject, key):
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )

    def _signed(self, builder):
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
