"""The checks that every request passes before a route sees it: host, origin, token or cookie, and the method."""

import hmac
import secrets
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

_TOKEN_BYTES = 16
# The page loads nothing from elsewhere, and runs no script or style that is inside of it. Plots set styles by script.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def new_token() -> str:
    """Return 128 random bits as text."""
    return secrets.token_hex(_TOKEN_BYTES)


class Refused(NamedTuple):
    """A refusal: the HTTP status, and why in words."""

    status: int
    why: str


class Gatekeeper:
    """Knows the token of the first URL and the cookie that a browser gets for it.

    token: of an earlier server, whose pages shall go on; None for a new one.
    names: the hosts by which the page may be asked for. A page of another site whose name is made to point here
    (DNS rebinding) sends another Host.
    """

    def __init__(
        self, names: "list[str]", port: int, scheme: str, *, is_read_only: bool, token: str | None = None
    ) -> None:
        self.token = token or new_token()
        self.is_read_only = is_read_only
        self._session = hmac.new(self.token.encode(), b"session", "sha256").hexdigest()
        self._cookie = f"lp_pipe_{port}"  # cookies do not know ports: two servers must not replace each other's
        self._scheme = scheme
        usual = {"http": 80, "https": 443}[scheme]
        self._hosts = {f"{name}:{port}" for name in names} | ({*names} if port == usual else set())
        self.url = f"{scheme}://{names[0]}:{port}/"

    @property
    def first_url(self) -> str:
        return f"{self.url}?token={self.token}"

    @property
    def set_cookie(self) -> str:
        """The header that a request with the token is answered with."""
        secure = "; Secure" if self._scheme == "https" else ""
        return f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def has_token(self, path: str) -> bool:
        """Return whether the URL has the right token."""
        given = parse_qs(urlsplit(path).query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def refusal(self, method: str, path: str, headers: "Message[str, str]") -> Refused | None:
        """Return why a request gets no answer; None if it gets one. Never says which part of a token is wrong."""
        host = headers.get("Host", "")
        if host.lower() not in self._hosts:
            return Refused(403, f"this server is not {host!r}: open {self.url}")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in {f"{self._scheme}://{host}" for host in self._hosts}:
            return Refused(403, f"requests of pages of {origin!r} are refused")
        if not self._is_known(headers.get("Cookie", "")) and not self.has_token(path):
            return Refused(401, "open the URL that `lp_pipe ui` has printed: it has a token")
        if method == "POST" and self.is_read_only:
            return Refused(403, "this server is read-only")
        # A form of another site cannot send JSON without being asked first, which is refused by the check of Origin.
        if method == "POST" and not headers.get("Content-Type", "").startswith("application/json"):
            return Refused(403, "POST takes JSON")
        return None

    def _is_known(self, header: str) -> bool:
        try:
            morsel = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return False
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self._session.encode())
