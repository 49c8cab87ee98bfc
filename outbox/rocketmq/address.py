"""The address of a RocketMQ cluster, as OUTBOX['BROKER'] has it: proxies, credentials and options.

    rocketmq://[ACCESS_KEY:SECRET@]PROXY:8081[,PROXY:8081][?brokers=HOST:10911,HOST:10911|HOST:10911&namespace=NAME]

Special characters in the credentials are percent-encoded, as in every URL.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from outbox.errors import ConfigurationError

SCHEME: Final = "rocketmq"
DEFAULT_PORT: Final = 8081
FORM: Final = (
    "rocketmq://[ACCESS_KEY:SECRET@]PROXY:8081[,PROXY:8081]?brokers=HOST:10911[|REPLICA:10911],HOST:10911"
    "[&namespace=NAME][&tls=proxy] (or &tls=all)"
)
_TLS: Final = ("proxy", "all")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class HostPort:
    """One address of a server. `str` gives HOST:PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAddress:
    """The parts of an address. `brokers` has the administration ports (listenPort) of each broker and its replicas.

    `tls_to_proxy` and `tls_to_brokers`: whether the connections are encrypted, and the server's certificate is
    verified. `secret` is not in `repr`, so that no log contains it.
    """

    proxies: tuple[HostPort, ...]
    brokers: tuple[tuple[HostPort, ...], ...] = ()
    access_key: str = ""
    secret: str = field(default="", repr=False)
    namespace: str = ""
    tls_to_proxy: bool = False
    tls_to_brokers: bool = False


def parse(url: str) -> ClusterAddress:
    """Parse the address of a cluster. Raises ConfigurationError, whose text does not contain the secret."""
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.path.strip("/") or parts.fragment:
        raise _wrong("it must begin with rocketmq:// and have no path")
    credentials, _, hosts = parts.netloc.rpartition("@")
    access_key, _, secret = credentials.partition(":")
    if bool(access_key) != bool(secret):
        raise _wrong("credentials are ACCESS_KEY:SECRET, both or none. Write '@', '/' or ':' in them as %40, %2F, %3A")
    proxies = tuple(_host_port(text, DEFAULT_PORT) for text in hosts.split(","))
    if len(proxies) > 1 and not all(map(_is_ip, proxies)):
        raise _wrong(
            "RocketMQ's client accepts several proxies only as IP addresses. Give IP addresses, or one DNS name that "
            "resolves to all proxies"
        )
    given = parse_qs(parts.query, keep_blank_values=True)
    if unknown := sorted(set(given) - {"brokers", "namespace", "tls"}):
        raise _wrong(f"it has an unknown option {', '.join(map(repr, unknown))}")
    tls = _once(given, "tls")
    if tls and tls not in _TLS:
        raise _wrong(f"?tls={tls} must be 'proxy' (only the connections to the proxies) or 'all' (also ?brokers=)")
    namespace = _once(given, "namespace")
    if "namespace" in given and not _NAMESPACE.fullmatch(namespace):
        raise _wrong(f"?namespace={namespace!r} must have 1 to 64 letters, digits, '-' or '_'")
    return ClusterAddress(
        proxies=proxies,
        brokers=tuple(
            tuple(_host_port(text) for text in replicas.split("|"))
            for value in given.get("brokers", ())
            for replicas in value.split(",")
        ),
        access_key=unquote(access_key),
        secret=unquote(secret),
        namespace=namespace,
        tls_to_proxy=bool(tls),
        tls_to_brokers=tls == "all",
    )


def _host_port(text: str, default: int = 0) -> HostPort:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(default)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise _wrong(f"{text!r} must be HOST:PORT{'' if default else ', the listenPort of a broker (10911)'}")
    return HostPort(host, int(port))


def _is_ip(proxy: HostPort) -> bool:
    try:
        ipaddress.IPv4Address(proxy.host)
    except ValueError:
        return False
    return True


def _once(given: Mapping[str, list[str]], name: str) -> str:
    values = given.get(name, [""])
    if len(values) > 1:
        raise _wrong(f"it has {name}= twice")
    return values[0]


def _wrong(why: str) -> ConfigurationError:
    return ConfigurationError(f"the address of RocketMQ is wrong: {why}. The form is {FORM}.")
