"""A private RocketMQ cluster: the processes that docs/engines.md starts, each killed and started by its name.

Bash runs the blocks of the page that write the configuration, with ports of the test's own. RocketMQ's programs
(`mqbroker` and the others) are scripts of `write_programs`, because Maven has the jars without the scripts.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from outbox.errors import BrokerError
from outbox.rocketmq.admin import Admin, brokers_of
from tests.documents import DOCS, blocks
from tests.rocketmq_server import OPENS, is_free
from tests.support import eventually

PAGE: Final = DOCS / "engines.md"
GROUPS: Final = ("a", "b")
BROKERS: Final = ("a1", "a2", "b1", "b2")
PROXIES: Final = ("p1", "p2")
_PORTS: Final = {"NAMES": 0, "CONTROLLER": 1, "A1": 5, "A2": 10, "B1": 15, "B2": 20, "P1": 25, "P2": 26}
_MAIN: Final = {
    "mqnamesrv": "org.apache.rocketmq.namesrv.NamesrvStartup",
    "mqbroker": "org.apache.rocketmq.broker.BrokerStartup",
    "mqproxy": "org.apache.rocketmq.proxy.ProxyStartup",
    "mqadmin": "org.apache.rocketmq.tools.command.MQAdminStartup",
}
# Each thread of a broker that stores messages takes a direct buffer of 4 MiB. Without memory for them, a broker refuses
# all messages. A process without heap ends, so that a test names it instead of waiting for it.
_JAVA: Final = (
    *("-Xms128m", "-Xmx512m", "-XX:MaxDirectMemorySize=1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    "-XX:+ExitOnOutOfMemoryError",
)
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
        words = shlex.join(["nice", "-n", "10", "java", *_JAVA, *OPENS, "-cp", f"{jars}/*"])
        program = folder / name
        program.write_text(
            '#!/bin/sh\nexport ROCKETMQ_HOME="${0%/*}" RMQ_PROXY_HOME="${0%/*}"\n'
            f'exec {words} $JAVA_OPT_EXT {main} "$@"\n'
        )
        program.chmod(0o755)


def choose_ports() -> dict[str, int]:
    """Free ports for the variables of the page. A broker also uses neighbours, a proxy the port 20 above its own."""
    while True:
        first = random.randrange(15_000, 32_000)
        if all(is_free(port) for port in range(first, first + 48)):
            return {name: first + place for name, place in _PORTS.items()}


class RocketMQCluster:
    """The processes: `names` (name server and controller), `a1`, `a2`, `b1`, `b2` (brokers), `p1`, `p2` (proxies).

    `settings` are added to the configuration of each broker. The folder of each process has its log.
    """

    def __init__(self, folder: Path, jars: Path, **settings: object) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
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

    @property
    def url(self) -> str:
        """The value of OUTBOX['BROKER']."""
        ports = [self.ports[name.upper()] for name in PROXIES]
        groups = (
            "|".join(f"127.0.0.1:{self.ports[f'{group.upper()}{number}']}" for number in (1, 2)) for group in GROUPS
        )
        return f"rocketmq://{','.join(f'127.0.0.1:{port}' for port in ports)}?brokers={','.join(groups)}"

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
        wanted = [name for name in names or ("names", *BROKERS, *PROXIES) if name not in self._running]
        for name in wanted:
            if name not in PROXIES:
                self._start(name)
        # A proxy that finds no master when it starts ends with an error.
        self.wait_for_masters()
        for name in wanted:
            if name in PROXIES:
                self._start(name)
        self.wait_until_whole()

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
        self._wait(
            lambda: [len(self.in_sync(group)) for group in GROUPS] == [2, 2],
            lambda: f"in sync: {[self.in_sync(group) for group in GROUPS]}",
        )
        self._wait(
            lambda: not any(is_free(self.ports[name.upper()]) for name in PROXIES), lambda: "a proxy does not listen"
        )

    def wait_for_masters(self) -> None:
        """Wait until both groups have a master: after the death of one, until its replica is promoted."""
        self._wait(lambda: {name[0] for name in self.masters()} == set(GROUPS), lambda: f"masters {self.masters()}")

    def _wait(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait for a condition, at most until a process ends by itself."""
        eventually(lambda: condition() or self._ends(), within_seconds=600, what=what)
        assert self._ends() == ""

    def wait_for_topics(self, topics: Sequence[str]) -> None:
        """Wait until the replicas have the topics: they copy topics, groups and offsets every few seconds."""
        eventually(
            lambda: all(self.has(name, topic) for name in BROKERS for topic in topics),
            within_seconds=300,
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
        status, _, answer = Admin("127.0.0.1", self.ports["CONTROLLER"]).ask(_IN_SYNC, {}, asked)
        if status != 0:
            return []
        table = json.loads(answer).get("replicasInfoTable", {})
        found: list[object] = table.get(group, {}).get("inSyncReplicas") or []
        return found

    def kill(self, *names: str) -> None:
        """Kill processes at the same moment, as a crash does."""
        processes = [self._running.pop(name) for name in names]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    def stop(self) -> None:
        """Kill everything, and remove the messages. The logs stay."""
        self.kill(*self._running)
        for name in BROKERS:
            shutil.rmtree(self._folder / name / "store", ignore_errors=True)

    def _ends(self) -> str:
        found = []
        for name, process in self._running.items():
            if process.poll() is not None:
                found.append(f"{name} ended: {(self._folder / name / 'out').read_text(errors='replace')[-1500:]}")
        return " ".join(found)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
