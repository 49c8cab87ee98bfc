"""A server with access control, encryption and a namespace: one address says it all."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from outbox.errors import BrokerError
from outbox.message import Delivery, Message
from outbox.rocketmq import inspection
from outbox.rocketmq.address import ClusterAddress, HostPort, parse
from outbox.rocketmq.admin import brokers_of
from outbox.rocketmq.broker import RocketMQBroker
from outbox.topic import MessageType, Topic
from outbox.transaction import Answer, Decision, EndTransaction, HalfTransaction
from tests.rocketmq.conftest import QUICK, unique
from tests.rocketmq.test_engine import consuming
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

USER, SECRET = "shop@home", "s:e/c%r@t"
ENCODED = "shop%40home:s%3Ae%2Fc%25r%40t"
AUTH = {
    "authenticationEnabled": True,
    "authenticationProvider": "org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider",
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": USER, "secretKey": SECRET}),
}
LOCAL = "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
# The proxy asks its broker about users.
OF_BROKER = "org.apache.rocketmq.proxy.auth.ProxyAuthenticationMetadataProvider"
ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A key and a certificate of this host, which the clients of this module trust."""
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", str(key), "-out", str(chain)], check=True, capture_output=True)
    before = os.environ.get(ROOTS)
    os.environ[ROOTS] = str(chain)
    yield key, chain
    os.environ.pop(ROOTS)
    if before is not None:
        os.environ[ROOTS] = before


@pytest.fixture(scope="module")
def guarded(programs: Path, certificate: tuple[Path, Path]) -> Iterator[PrivateRocketMQ]:
    """A server that accepts encrypted connections only, and only with the right secret."""
    key, chain = map(str, certificate)
    user = json.dumps({"username": USER, "password": SECRET})
    with tempfile.TemporaryDirectory(prefix="outbox-mq-", ignore_cleanup_errors=True) as folder:
        server = PrivateRocketMQ(
            Path(folder),
            programs,
            broker={**QUICK, **AUTH, "authenticationMetadataProvider": LOCAL, "initAuthenticationUser": user},
            proxy={
                **AUTH,
                "authenticationMetadataProvider": OF_BROKER,
                "tlsTestModeEnable": False,
                "tlsKeyPath": key,
                "tlsCertPath": chain,
            },
            java=[
                "-Dtls.server.mode=enforcing",
                "-Dtls.test.mode.enable=false",
                f"-Dtls.server.keyPath={key}",
                f"-Dtls.server.certPath={chain}",
            ],
            credentials=ENCODED,
            options="namespace=blue&tls=all",
        )
        server.start()
        try:
            yield server
        finally:
            server.kill()


def test_transactions_effects_and_operators_work_with_all_of_it(guarded: PrivateRocketMQ) -> None:
    """A second namespace with the same names sees nothing of it."""
    topic = Topic(name=unique("orders."), queue_count=2)
    green = guarded.url.replace("namespace=blue", "namespace=green")
    for url in (guarded.url, green):
        brokers_of(url)[0].create_topic(topic)
    half = HalfTransaction(producer_group="shop", messages=[Message(topic=topic.name, body=b"1", key="k")])
    undone = HalfTransaction(producer_group="shop", messages=[Message(topic=topic.name, body=b"2", key="u")])
    end = EndTransaction(transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group="shop")
    seen: list[Delivery] = []
    broker = RocketMQBroker(guarded.url, [topic], timeout_seconds=20)
    blue, other = brokers_of(guarded.url), brokers_of(green)
    asked: set[UUID] = set()

    def undecided() -> list[str | None]:
        """Answer RocketMQ's checks as the application does, and return the keys of the half messages that stay open."""
        for check in broker.claim_checks("shop"):
            asked.add(check.transaction_id)
            # RocketMQ stores a half message again before it asks. An end that names the first copy leaves the second.
            if check.transaction_id == half.transaction_id:
                broker.report_answers("shop", [Answer(transaction_id=half.transaction_id, decision=Decision.COMMIT)])
        return [one.message.key for one in inspection.open_halves(blue, "shop")]

    try:
        broker.send_half(half, timeout_seconds=20)
        broker.send_half(undone, timeout_seconds=20)
        broker.end([end])
        with consuming(guarded, topic, seen.append):
            eventually(lambda: seen, within_seconds=60)
        # RocketMQ writes down the end of a half message a moment after it has delivered the message.
        eventually(lambda: undecided() == ["u"], within_seconds=60)
        # The check of the undecided message comes to this process, although the server counts per namespace.
        eventually(lambda: undecided() == ["u"] and undone.transaction_id in asked, within_seconds=60)
    finally:
        broker.close()
    assert {one.message.message_id for one in seen} == {half.messages[0].message_id}
    assert seen[0].message == half.messages[0]
    assert inspection.open_halves(other, "shop") == []
    (written,) = (one.written for one in inspection.topic_figures(blue, [topic.name]))
    assert written >= 1
    assert [one.written for one in inspection.topic_figures(other, [topic.name])] == [0]


@pytest.mark.parametrize(
    ("credentials", "options"),
    [
        (ENCODED.replace("25r", "25x") + "@", "&namespace=blue&tls=all"),
        ("", "&namespace=blue&tls=all"),
        (ENCODED + "@", "&namespace=blue"),
    ],
    ids=["wrong secret", "no credentials", "not encrypted"],
)
def test_it_refuses_all_else(guarded: PrivateRocketMQ, credentials: str, options: str) -> None:
    topic = Topic(name=unique("orders."), queue_count=1)
    guarded.admin.create_topic(topic)
    url = guarded.url_with(credentials, options)
    with pytest.raises(BrokerError):
        brokers_of(url)[0].create_topic(topic)
    broker = RocketMQBroker(url, [topic], timeout_seconds=3)
    try:
        with pytest.raises(Exception, match=r"RocketMQ"):
            broker.send([Message(topic=topic.name, body=b"1")], timeout_seconds=5)
    finally:
        broker.close()


def test_one_of_two_proxies_is_enough(rocketmq: PrivateRocketMQ) -> None:
    """The first address answers nothing."""
    topic = Topic(name=unique("orders."), types=frozenset({MessageType.NORMAL}), queue_count=1)
    rocketmq.admin.create_topic(topic)
    broker = RocketMQBroker(rocketmq.url.replace("rocketmq://", "rocketmq://127.0.0.1:1,"), [topic], timeout_seconds=20)
    try:
        broker.send([Message(topic=topic.name, body=b"1")], timeout_seconds=20)
    finally:
        broker.close()
    assert [one.written for one in inspection.topic_figures([rocketmq.admin], [topic.name])] == [1]


def test_the_parts_of_an_address() -> None:
    found = parse(f"rocketmq://{ENCODED}@10.0.0.1:1,10.0.0.2?brokers=b:3,c:4|d:5&namespace=blue&tls=proxy")
    assert found == ClusterAddress(
        proxies=(HostPort("10.0.0.1", 1), HostPort("10.0.0.2", 8081)),
        brokers=((HostPort("b", 3),), (HostPort("c", 4), HostPort("d", 5))),
        access_key=USER,
        secret=SECRET,
        namespace="blue",
        tls_to_proxy=True,
    )
    assert SECRET not in repr(found) + repr(brokers_of(f"rocketmq://{ENCODED}@h?brokers=b:3"))
