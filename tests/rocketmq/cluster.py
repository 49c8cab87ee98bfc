"""A private RocketMQ cluster: the processes that docs/rocketmq-cluster.md starts, each killed and started by its name.

Bash runs the blocks of the page that write the configuration, with ports of the test's own. RocketMQ's programs
(`mqbroker` and the others) are scripts of `write_programs`, because Maven has the jars without the scripts.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outbox.errors import BrokerError
from outbox.rocketmq.admin import Admin, brokers_of
from sample_project.rocketmq_server import HEAP, OPENS
from tests.documents import DOCS, blocks
from tests.rocketmq.disk import Disk
from tests.rocketmq.link import Link
from tests.servers import free_ports
from tests.support import eventually

PAGE: Final = DOCS / "rocketmq-cluster.md"
GROUPS: Final = ("a", "b")
BROKERS: Final = ("a1", "a2", "b1", "b2")
PROXIES: Final = ("p1", "p2")
PORTS: Final = ("NAMES", "CONTROLLER", "A1", "A2", "B1", "B2", "P1", "P2")
_MAIN: Final = {
    "mqnamesrv": "org.apache.rocketmq.namesrv.NamesrvStartup",
    "mqbroker": "org.apache.rocketmq.broker.BrokerStartup",
    "mqproxy": "org.apache.rocketmq.proxy.ProxyStartup",
    "mqadmin": "org.apache.rocketmq.tools.command.MQAdminStartup",
}
_BROKER_CONFIG: Final = 26
_IN_SYNC: Final = 1006
_TOPIC_STATISTICS: Final = 202
# Sizes for a test, with several clusters on one small machine.
_SMALL: Final = {
    "mappedFileSizeCommitLog": 64 * 1024 * 1024,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "mappedFileSizeTimerLog": 1024 * 1024,
    "diskMaxUsedSpaceRatio": 98,
}


def write_programs(folder: Path, jars: Path) -> None:
    """Write RocketMQ's programs, as its distribution has them, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, main in _MAIN.items():
        words = shlex.join(["java", *HEAP, *OPENS, "-cp", f"{jars}/*"])
        program = folder / name
        program.write_text(
            '#!/bin/sh\nexport ROCKETMQ_HOME="${0%/*}" RMQ_PROXY_HOME="${0%/*}"\n'
            f'exec {words} $JAVA_OPT_EXT {main} "$@"\n'
        )
        program.chmod(0o755)


def choose_ports() -> dict[str, int]:
    """Free ports for the variables of the page. Those of the brokers have free neighbours."""
    ports = dict[str, int]()
    while len(ports) < len(PORTS):
        [port] = free_ports(1)
        if all(abs(port - other) > 4 and abs(port + 20 - other) > 4 for other in ports.values()):
            ports[PORTS[len(ports)]] = port
    return ports


class RocketMQCluster:
    """The processes: `names` (name server and controller), `a1`, `a2`, `b1`, `b2` (brokers), `p1`, `p2` (proxies).

    `settings` are added to the configuration of each broker. Clients reach the proxies through `links`, which a test
    can cut.
    """

    def __init__(self, folder: Path, jars: Path, **settings: object) -> None:
        self._folder = folder.resolve()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = choose_ports()
        self._programs = self._folder / "programs"
        write_programs(self._programs, jars.resolve())
        (_, write, *_) = blocks(PAGE, "sh")
        variables = "\n".join(f"{name}={port}" for name, port in self.ports.items())
        script = f"FOLDER={shlex.quote(str(self._folder))}\n{variables}\n{write}"
        subprocess.run(["bash", "-euc", script], cwd=self._folder, check=True)
        lines = "".join(f"{name}={_text(value)}\n" for name, value in {**_SMALL, **settings}.items())
        for name in BROKERS:
            with (self._folder / f"{name}.conf").open("a", encoding="utf-8") as conf:
                conf.write(lines)
        self.disks: dict[str, Disk] = {}
        self.links = {name: Link(self.ports[name.upper()]) for name in PROXIES}

    @property
    def url(self) -> str:
        """The value of OUTBOX['BROKER']."""
        proxies = ",".join(f"127.0.0.1:{link.port}" for link in self.links.values())
        return f"rocketmq://{proxies}?brokers={brokers_part(self.ports)}"

    @property
    def admins(self) -> list[Admin]:
        """The administration ports of both groups of brokers."""
        return brokers_of(self.url)

    def masters(self) -> list[str]:
        """The names of the brokers that are masters now; one for each group that has one."""
        return [name for name in BROKERS if self._role(name) == "0"]

    def master(self, group: str) -> str:
        """The name of the master of a group."""
        [found] = [name for name in self.masters() if name[0] == group]
        return found

    def _role(self, name: str) -> str | None:
        if name not in self._running:
            return None
        try:
            _, _, body = Admin("127.0.0.1", self.ports[name.upper()], timeout_seconds=2).ask(_BROKER_CONFIG, {})
        except BrokerError:
            return None
        lines = (line.partition("=") for line in body.decode().splitlines())
        return {name: value for name, _, value in lines}.get("brokerId")

    def start(self, *names: str) -> None:
        """Start processes (default: all that do not run), and wait until both groups have a master and a replica."""
        for name in names or ("names", *BROKERS, *PROXIES):
            if name not in self._running:
                self._start(name)
        self.wait_until_whole()

    def begin(self, name: str) -> None:
        """Start one process without waiting."""
        self._start(name)

    def _start(self, name: str) -> None:
        home = self._folder / name
        home.mkdir(exist_ok=True)
        if name == "names":
            command = ["mqnamesrv", "-c", str(self._folder / "names.conf")]
        elif name in BROKERS:
            command = ["mqbroker", "-c", str(self._folder / f"{name}.conf")]
        else:
            servers = f"127.0.0.1:{self.ports['NAMES']}"
            command = ["mqproxy", "-pm", "cluster", "-n", servers, "-pc", str(self._folder / f"{name}.json")]
        with (home / "out").open("ab") as output:
            self._running[name] = subprocess.Popen(
                [str(self._programs / command[0]), *command[1:]],
                cwd=home,
                env={**os.environ, "JAVA_OPT_EXT": f"-Duser.home={home}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def wait_until_whole(self) -> None:
        """Wait until both groups have a master and a replica that may be promoted, and each proxy listens."""
        self.wait_for_masters()
        eventually(
            lambda: [len(self.in_sync(group)) for group in GROUPS] == [2, 2],
            within_seconds=180,
            what=lambda: f"in sync: {[self.in_sync(group) for group in GROUPS]}, {self._ends()}",
        )
        eventually(
            lambda: all(self.links[name].answers() for name in PROXIES), within_seconds=120, what=lambda: self._ends()
        )

    def wait_for_masters(self) -> None:
        """Wait until both groups have a master: after the death of one, until its replica is promoted."""
        eventually(
            lambda: {name[0] for name in self.masters()} == set(GROUPS),
            within_seconds=180,
            what=lambda: f"masters {self.masters()}, {self._ends()}",
        )

    def wait_for_topics(self, topics: Sequence[str]) -> None:
        """Wait until the replicas have the topics: they copy topics, groups and offsets every few seconds."""
        eventually(
            lambda: all(self.has(name, topic) for name in BROKERS for topic in topics),
            within_seconds=60,
            what=lambda: f"{ {name: [self.has(name, topic) for topic in topics] for name in BROKERS} }",
        )

    def has(self, name: str, topic: str) -> bool:
        """Whether a broker has a topic."""
        broker = Admin("127.0.0.1", self.ports[name.upper()])
        status, _, _ = broker.ask(_TOPIC_STATISTICS, {"topic": broker.name(topic)})
        return status == 0

    def in_sync(self, group: str) -> list[object]:
        """The brokers of a group that have every acknowledged message, as the controller knows them."""
        asked = json.dumps([group]).encode()
        try:
            answer = Admin("127.0.0.1", 0)._ask(("127.0.0.1", self.ports["CONTROLLER"]), _IN_SYNC, {}, asked)
        except BrokerError:
            return []
        table = json.loads(answer).get("replicasInfoTable", {})
        found: list[object] = table.get(group, {}).get("inSyncReplicas") or []
        return found

    def kill(self, name: str) -> None:
        """Kill one process, as a crash does."""
        self.kill_at_once(name)

    def kill_at_once(self, *names: str) -> None:
        """Kill several processes at the same moment."""
        processes = [self._running.pop(name) for name in names]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    def freeze(self, name: str) -> None:
        """Stop a process without ending it."""
        self._running[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Continue a frozen process."""
        self._running[name].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill everything."""
        for name in list(self._running):
            self.kill(name)
        for link in self.links.values():
            link.close()
        for disk in self.disks.values():
            disk.close()

    def _ends(self) -> str:
        found = []
        for name, process in self._running.items():
            if process.poll() is not None:
                found.append(f"{name} ended: {(self._folder / name / 'out').read_text(errors='replace')[-1500:]}")
        return " ".join(found)


def brokers_part(ports: dict[str, int]) -> str:
    """The value of ?brokers= for the ports of a cluster."""
    groups = (f"127.0.0.1:{ports[f'{group}1']}|127.0.0.1:{ports[f'{group}2']}" for group in ("A", "B"))
    return ",".join(groups)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
