"""The credentials that processes of a run check before either reads anything that the other sends."""

import base64
import dataclasses
import datetime
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lp_pipe.errors import Unauthenticated

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# The one name in every certificate. What counts is whether the run's authority has signed the certificate, not the
# host's name: hosts of a run have several names, and addresses change.
RUN_NAME = "lp-pipe.run"

ADVICE = "every process of a run must be given the same credentials, with use_credentials()"

_VALID = datetime.timedelta(days=3650)  # longer than any run; the authority's key is thrown away and nothing is renewed
_CLOCK_SKEW = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Credentials:
    """The credentials of all processes of a run: a token, and a certificate that the run's authority has signed (PEM).

    A program with these bytes can run code in every process of the run: pass them on by stdin or a file of mode 0600.
    """

    token: str = field(repr=False)
    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def is_token(self, shown: bytes) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(shown, self.token.encode())

    def proof(self, prover: str, nonce: str) -> str:
        """Return a text that proves knowledge of the token without revealing it, different for each `prover`."""
        return hmac.digest(self.token.encode(), f"{prover} {nonce}".encode(), "sha256").hex()

    def is_proof(self, shown: str, prover: str, nonce: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(shown.encode(), self.proof(prover, nonce).encode())

    def to_bytes(self) -> bytes:
        """Serialize for another process of the run (the class says how to pass it on)."""
        fields = {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Credentials":
        """Undo `to_bytes`.

        Raises:
            ValueError: the bytes are not credentials.
        """
        try:
            fields = json.loads(data)
            pems = {name: base64.b64decode(fields[name]) for name in ("authority", "certificate", "key")}
            return cls(token=fields["token"], **pems)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"these {len(data)} bytes are not the credentials of a run: pass the file that its launcher has written"
            ) from error


def generate_credentials() -> Credentials:
    """Make a new authority, one certificate that it has signed, and a random token; takes about a millisecond."""
    from cryptography.hazmat.primitives import serialization  # slow to import; only launchers generate
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    pem = serialization.Encoding.PEM
    return Credentials(
        token=secrets.token_hex(32),
        authority=_certificate(authority_key, authority_key, is_authority=True).public_bytes(pem),
        certificate=_certificate(key, authority_key, is_authority=False).public_bytes(pem),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def token_credentials(token: str) -> Credentials:
    """Return credentials for a plain listener that has a token of its own, and for its clients."""
    return Credentials(token, b"", b"", b"")


def use_credentials(credentials: Credentials | None) -> None:
    """Make this process listen and connect with these credentials; with None it can do neither over TCP."""
    global _current
    _current = credentials


def current_credentials() -> Credentials:
    """Return what was given to `use_credentials`.

    Raises:
        Unauthenticated: `use_credentials` was not called.
    """
    if _current is None:
        raise Unauthenticated(
            "this process has no credentials for connections over TCP: "
            "call lp_pipe.connections.credentials.use_credentials() with those of the run"
        )
    return _current


_current: Credentials | None = None


def _certificate(
    key: "ec.EllipticCurvePrivateKey", signer: "ec.EllipticCurvePrivateKey", *, is_authority: bool
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {RUN_NAME}")])
    subject = issuer if is_authority else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, RUN_NAME)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(RUN_NAME)]), critical=False)
    return builder.sign(signer, hashes.SHA256())
