"""Sends webhooks: one POST per message, signed by the Standard Webhooks scheme, in order per key.

For each request, the sink resolves the host name once, checks each address, and connects to a checked address. So an
attacker cannot change the address between the check and the connection (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

import httpx

from outbox.contrib.forwarding.sinks import signatures
from outbox.contrib.forwarding.sinks.sink import NotAcknowledged, Outgoing, Rejected, one_by_one
from outbox.errors import ConfigurationError, ServiceUnavailable
from outbox.utils.safe_text import error_line, shown_text

Address = IPv4Address | IPv6Address

# The well-known prefix of NAT64. The last 32 bits of such an address are an IPv4 address.
_NAT64: Final = IPv6Network("64:ff9b::/96")

_MOST_RESPONSE_BYTES: Final = 64 * 1024
_SHOWN_CHARACTERS: Final = 200
_LONGEST_PAUSE_SECONDS: Final = 3600.0
# Standard Webhooks asks for 15 to 30 seconds.
TIMEOUT_SECONDS: Final = 20.0
_GONE: Final = 410

# Statuses about the whole endpoint: another message would fail in the same way. A redirect is such a status too.
_ENDPOINT: Final = frozenset((401, 403, 404, 405, 407, 425, 429, 502, 503))
# Statuses that concern one attempt only. If other messages fail with the same status, the endpoint is down.
_ATTEMPT: Final = frozenset((408, 421, 423))


class WebhookSink:
    """Sends messages to one URL.

    `secrets` are `whsec_…` texts. With two secrets, each request has both signatures, so that the receiver
    can change from one secret to the other. Private addresses, plain http and another certificate authority (`ca_file`)
    must be allowed explicitly. The sink follows no redirects and ignores the proxies of the environment, so a request
    goes only to the declared URL. `timeout_seconds` limits connecting, and each wait for the receiver. An endpoint that
    answers 410 is asked again after an hour.
    """

    binding = "http"
    batch = 1
    threads = 8

    def __init__(
        self,
        *,
        url: str,
        secrets: Sequence[str],
        allow_private: bool = False,
        allow_http: bool = False,
        ca_file: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = _checked(url, allow_http)
        if isinstance(secrets, str) or not secrets:
            raise ConfigurationError(f"webhook {self._url.host}: secrets must be a list of at least one whsec_… text.")
        self._keys = [signatures.secret_bytes(secret) for secret in secrets]
        self._headers = dict(headers or {})
        for name, value in self._headers.items():
            if value != value.strip() or not value.isprintable():
                # The text does not contain the value, which may be a secret.
                raise ConfigurationError(
                    f"webhook {self._url.host}: the value of the header {name!r} begins or ends with a space, or "
                    "contains a character that HTTP does not allow, such as the end of a line. Remove it."
                )
        self._clock = clock
        self._client = httpx.Client(
            transport=PinnedTransport(allow_private=allow_private, ca_file=ca_file, connections=64),
            timeout=timeout_seconds,
            follow_redirects=False,
            trust_env=False,
        )

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send one request per message. Raises ServiceUnavailable if the endpoint is unavailable."""
        return one_by_one(messages, self._post)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, message: Outgoing) -> Exception | None:
        request = self._request(message)
        try:
            with self._client.stream("POST", self._url, content=message.body, headers=request) as response:
                return self._verdict(message, response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, AddressRefused) as error:
            raise ServiceUnavailable(f"webhook {self._url.host} cannot be reached: {shown_text(error)}") from error
        except httpx.LocalProtocolError as error:
            # Nothing was sent: HTTP does not allow a header of this message, such as its content type.
            return Rejected(f"message {message.message_id} cannot be sent by this sink: {error_line(error)}")
        except httpx.HTTPError as error:
            return NotAcknowledged(f"webhook {self._url.host} did not answer: {error_line(error)}")

    def _request(self, message: Outgoing) -> dict[str, str]:
        stamp, message_id = int(self._clock()), str(message.message_id)
        return {
            **self._headers,
            **message.headers,
            "content-type": message.content_type,
            "webhook-id": message_id,
            "webhook-timestamp": str(stamp),
            "webhook-signature": signatures.sign(self._keys, message_id, stamp, message.body),
        }

    def _verdict(self, message: Outgoing, response: httpx.Response) -> Exception | None:
        status, text = response.status_code, _beginning(response)
        if 200 <= status < 300:
            return None
        said = f"webhook {self._url.host} answered {status}"
        pause = retry_after_seconds(response.headers.get("retry-after"), self._clock())
        if 300 <= status < 400:
            raise ServiceUnavailable(
                f"{said}, which is a redirect. The sink follows no redirects: declare the target URL of the redirect"
            )
        if status == _GONE:
            raise ServiceUnavailable(
                f"{said}: it exists no more. If it is gone for good, remove its entry from FORWARD, then run "
                "`outbox_group delete GROUP`",
                pause_seconds=_LONGEST_PAUSE_SECONDS,
            )
        if status in _ENDPOINT or (pause is not None and status >= 500):
            raise ServiceUnavailable(said, pause_seconds=pause)
        if status >= 500 or status in _ATTEMPT:
            # The error text has no message id, because outbox detects an outage by failures in a row, of different
            # messages, with the same error text.
            return NotAcknowledged(said)
        return Rejected(f"{said} to message {message.message_id}: {text[:_SHOWN_CHARACTERS]!r}")


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """Return the pause in seconds that the header Retry-After requests by a number or a date.

    The longest result is an hour. If the text is neither a number nor a date, return None.
    """
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        seconds = float(value)
    else:
        try:
            moment = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            # The C library refuses a date with a number that is too large.
            return None
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
    return min(max(0.0, seconds), _LONGEST_PAUSE_SECONDS)


def _checked(text: str, allow_http: bool) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"webhook url={text!r} is not a valid URL: {shown_text(error)}.") from error
    if url.userinfo:
        raise ConfigurationError(
            f"webhook {url.host}: the URL must not contain a user and password. Use the option headers instead."
        )
    if not url.host or url.scheme not in ("https", *(["http"] if allow_http else [])):
        raise ConfigurationError(f"webhook url={text!r} must begin with https:// (allow_http=True allows http).")
    return url


def _beginning(response: httpx.Response) -> str:
    """Return the first bytes of the answer, not decompressed, so that a receiver cannot fill the memory.

    If the answer was read completely, the connection stays open. If it breaks off, its status counts all the same.
    """
    body = b""
    with contextlib.suppress(httpx.HTTPError):
        for chunk in response.iter_raw(4096):
            body += chunk
            if len(body) >= _MOST_RESPONSE_BYTES:
                break
    return body.decode(errors="replace")


# -- addresses -----------------------------------------------------------------------------------------


class AddressRefused(httpx.TransportError):
    """The host name resolves only to private, local or reserved addresses."""


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet.

    For an IPv6 address with an IPv4 address in it, check the IPv4 address.
    """
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a host name. If `host` is an address, return this address. Raises httpx.ConnectError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx.ConnectError(f"{host!r} cannot be resolved: {shown_text(error)}") from error
    return list(dict.fromkeys(ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))


class PinnedTransport(httpx.HTTPTransport):
    """Connects to allowed addresses only. The certificate and the Host header still use the host name."""

    def __init__(self, *, allow_private: bool, ca_file: str | None, connections: int) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        super().__init__(verify=ssl.create_default_context(cafile=ca_file), limits=limits, trust_env=False)
        self._allow_private = allow_private

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Try the allowed addresses one after the other, until a connection succeeds."""
        host, url = request.url.host, request.url
        found = resolve(host, url.port or {"http": 80, "https": 443}[url.scheme])
        allowed = [address for address in found if self._allow_private or is_public(address)]
        if not allowed:
            raise AddressRefused(
                f"{host!r} resolves to {', '.join(map(str, found))}, and private addresses are not allowed; "
                "allow_private=True allows them"
            )
        for number, address in enumerate(allowed, 1):
            request.url = url.copy_with(host=str(address))
            request.extensions = {**request.extensions, "sni_hostname": host}
            try:
                return super().handle_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(allowed):
                    raise
        raise AssertionError("unreachable")
