"""A Kafka of the tests' own: one node (KRaft), whose programs Maven brings."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.rocketmq_server import fetch, programs_missing
from tests.servers import free_ports
from tests.support import eventually

VERSION: Final = "4.1.0"
JARS: Final = Path(__file__).resolve().parents[1] / "var" / f"kafka-{VERSION}"
_HEAP: Final = ("-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def programs() -> Path:
    """The folder of the server's jars, fetched once for all processes. Skips the test where that cannot be."""
    if missing := programs_missing():
        pytest.skip(f"Kafka needs {missing} on the PATH")
    fetch(JARS, {"org.apache.kafka:kafka_2.13": VERSION})
    return JARS


class Kafka:
    """One node in `folder`, which can be killed and started again."""

    def __init__(self, folder: Path, *, makes_topics: bool = False) -> None:
        self._java = ["java", *_HEAP, "-cp", f"{programs()}/*"]
        self._log = folder / "output"
        self._port, controller = free_ports(2)
        self.servers = f"127.0.0.1:{self._port}"
        self._properties = folder / "server.properties"
        self._properties.write_text(
            "\n".join(
                (
                    "process.roles=broker,controller",
                    "node.id=1",
                    f"controller.quorum.voters=1@127.0.0.1:{controller}",
                    f"listeners=PLAINTEXT://{self.servers},CONTROLLER://127.0.0.1:{controller}",
                    f"advertised.listeners=PLAINTEXT://{self.servers}",
                    "controller.listener.names=CONTROLLER",
                    f"log.dirs={folder / 'logs'}",
                    "offsets.topic.replication.factor=1",
                    "offsets.topic.num.partitions=1",
                    "transaction.state.log.replication.factor=1",
                    "transaction.state.log.min.isr=1",
                    "group.initial.rebalance.delay.ms=0",
                    f"auto.create.topics.enable={str(makes_topics).lower()}",
                )
            )
        )
        cluster = ["-t", "MkU3OEVBNTcwNTJENDM2Qk", "-c", str(self._properties)]
        subprocess.run([*self._java, "kafka.tools.StorageTool", "format", *cluster], check=True, capture_output=True)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        with self._log.open("wb") as output:
            command = [*self._java, "kafka.Kafka", str(self._properties)]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        eventually(self._is_up, within_seconds=120, what=self._log.read_text)

    def create(self, topic: str, *, partitions: int = 4) -> None:
        """A topic, once it is there."""
        admin = AdminClient({"bootstrap.servers": self.servers})
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(60)

    def kill(self) -> None:
        """End it without warning."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    stop = kill

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._port)) == 0
