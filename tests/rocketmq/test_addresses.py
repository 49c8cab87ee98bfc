"""Wrong addresses, without a server of RocketMQ's."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox.errors import BrokerUnavailable
from outbox.rocketmq.address import HostPort
from outbox.rocketmq.admin import Admin
from outbox.topic import Topic

NAME_SERVER = json.dumps({"code": 3, "remark": "request type 17 not supported"}).encode()


def frame(header: bytes) -> bytes:
    return struct.pack(">II", 4 + len(header), len(header)) + header


@contextmanager
def answering(answer: bytes) -> Iterator[Admin]:
    """A server with one answer for every client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # There may be no client at all, if a test fails early.
        listening.settimeout(20)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Admin("127.0.0.1", listening.getsockname()[1])
        finally:
            thread.join()


def test_another_servers_port_is_named_as_such() -> None:
    for answer in (
        # The first frame of HTTP/2, as the proxy begins.
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(0x12),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        # The header is longer than the frame.
        struct.pack(">II", 8, 100) + bytes(100),
        frame(b"\xff\xfe"),
        frame(b"{}"),
        frame(b"[]"),
        frame(b'{"code": null}'),
        frame(NAME_SERVER),
    ):
        with (
            answering(answer) as admin,
            pytest.raises(BrokerUnavailable, match=r"does not answer like a RocketMQ broker: .*10911.*8081"),
        ):
            admin.create_topic(Topic(name="order.paid"))


def test_requests_go_to_the_replica_that_is_the_master_now() -> None:
    """The first does not answer, the second is a replica, the third is the master."""
    with (
        answering(settings_of("brokerId=2\nbrokerRole=SLAVE\n")) as replica,
        answering(settings_of("brokerName=a\nbrokerId=0\n")) as master,
    ):
        others = (HostPort(replica.host, replica.port), HostPort(master.host, master.port))
        assert Admin("127.0.0.1", 1, replicas=others)._place() == (master.host, master.port)
    with answering(settings_of("brokerId=1\n")) as only:
        with pytest.raises(BrokerUnavailable, match=r"none of 127.0.0.1:1, .* is the master"):
            Admin("127.0.0.1", 1, replicas=(HostPort(only.host, only.port),))._place()


def settings_of(text: str) -> bytes:
    """The answer of a broker that is asked for its settings."""
    header, body = b'{"code": 0}', text.encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
