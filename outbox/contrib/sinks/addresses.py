"""Decides which addresses are allowed, and connects only to an address that it has checked.

A name is resolved once per request and each of its addresses is checked. The request then goes to a checked address by
its number. A name that resolves differently a moment later (DNS rebinding) has no effect.
"""

from __future__ import annotations

import socket
import ssl
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

import httpx

Address = IPv4Address | IPv6Address

# Well-known prefix of NAT64: the last 32 bits are an IPv4 address.
_NAT64: Final = IPv6Network("64:ff9b::/96")


class AddressRefused(httpx.TransportError):
    """The name resolves only to private, local or reserved addresses."""


def is_public(address: Address) -> bool:
    """Whether it is an address of the public internet, also if it contains an IPv4 address."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a host name, or the address itself. Raises httpx.ConnectError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx.ConnectError(f"{host!r} cannot be resolved: {error}") from error
    return list(dict.fromkeys(ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))


class PinnedTransport(httpx.HTTPTransport):
    """Connects to allowed addresses only; the certificate and the Host header are still checked against the name."""

    def __init__(self, *, allow_private: bool, ca_file: str | None, connections: int) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        super().__init__(verify=ssl.create_default_context(cafile=ca_file), limits=limits, trust_env=False)
        self._allow_private = allow_private

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Try the allowed addresses in turn until one can be connected to."""
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
