"""A private RocketMQ cluster: brokers with a replica each, a controller that promotes replicas, and two proxies.

Seven Java processes on this machine, of about 300 MB each. A write is acknowledged when both replicas have it; with
`flush="SYNC_FLUSH"` also when it is on disk. Every process can be killed and started again by its name.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from outbox.errors import BrokerError
from outbox.rocketmq.admin import Admin, brokers_of
from sample_project.rocketmq_server import java_command
from tests.servers import free_ports
from tests.support import eventually

CLUSTER: Final = "tests"
GROUPS: Final = ("a", "b")
_BROKER_CONFIG: Final = 26
_IN_SYNC: Final = 1006
_TOPIC_STATISTICS: Final = 202


class RocketMQCluster:
    """The processes: `names` (name server and controller), `a1`, `a2`, `b1`, `b2` (brokers), `p1`, `p2` (proxies)."""

    def __init__(self, folder: Path, jars: Path, *, flush: str = "ASYNC_FLUSH", **settings: object) -> None:
        self._folder = folder.resolve()
        self._jars = jars.resolve()
        self._settings = {"flushDiskType": flush, **settings}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        ports = iter(free_ports(14))
        brokers = [f"{group}{number}" for group in GROUPS for number in (1, 2)]
        self._names, self._controller = next(ports), next(ports)
        self._listen = {name: next(ports) for name in brokers}
        self._replicates = {name: next(ports) for name in brokers}
        self._proxies = {name: next(ports) for name in ("p1", "p2")}
        self._remoting = {name: next(ports) for name in ("p1", "p2")}

    @property
    def url(self) -> str:
        """The value of OUTBOX['BROKER']."""
        proxies = ",".join(f"127.0.0.1:{port}" for port in self._proxies.values())
        replicas = ("|".join(f"127.0.0.1:{self._listen[f'{group}{number}']}" for number in (1, 2)) for group in GROUPS)
        return f"rocketmq://{proxies}?brokers={','.join(replicas)}"

    @property
    def admins(self) -> list[Admin]:
        """The administration ports of both groups of replicas."""
        return brokers_of(self.url)

    def masters(self) -> list[str]:
        """The names of the brokers that are masters now; one for each group that has one."""
        return [name for name in self._listen if self._role(name) == "0"]

    def _role(self, name: str) -> str | None:
        try:
            _, _, body = Admin("127.0.0.1", self._listen[name], timeout_seconds=2).ask(_BROKER_CONFIG, {})
        except BrokerError:
            return None
        lines = (line.partition("=") for line in body.decode().splitlines())
        return {name: value for name, _, value in lines}.get("brokerId")

    def start(self, *names: str) -> None:
        """Start the processes (default: all), and wait until both groups have a master and a replica of it."""
        for name in names or ("names", *self._listen, *self._proxies):
            self._start(name)
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until both groups have a master, and a replica that may be promoted."""
        self.wait_for_masters()
        eventually(
            lambda: [len(self._in_sync(group)) for group in GROUPS] == [2, 2],
            within_seconds=180,
            what=lambda: f"in sync: {[self._in_sync(group) for group in GROUPS]}",
        )

    def wait_for_topics(self, topics: Sequence[str]) -> None:
        """Wait until the replicas have the topics: they copy topics, groups and offsets every few seconds only."""
        eventually(
            lambda: all(self._has(name, topic) for name in self._listen for topic in topics),
            within_seconds=60,
            what="the replicas have the topics",
        )

    def _has(self, name: str, topic: str) -> bool:
        broker = Admin("127.0.0.1", self._listen[name])
        status, _, _ = broker.ask(_TOPIC_STATISTICS, {"topic": broker.name(topic)})
        return status == 0

    def wait_for_masters(self) -> None:
        """Wait until both groups have a master: after the death of one, until its replica is promoted."""
        eventually(
            lambda: {name[0] for name in self.masters()} == set(GROUPS),
            within_seconds=180,
            what=lambda: f"masters {self.masters()}",
        )

    def _in_sync(self, group: str) -> list[object]:
        """The replicas of a group that have every acknowledged message, as the controller knows them."""
        asked = json.dumps([group]).encode()
        try:
            answer = Admin("127.0.0.1", 0)._ask(("127.0.0.1", self._controller), _IN_SYNC, {}, asked)
        except BrokerError:
            return []
        replicas: list[object] = json.loads(answer)["replicasInfoTable"][group]["inSyncReplicas"]
        return replicas

    def kill(self, name: str) -> None:
        """Kill one process, as a crash does."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Kill everything."""
        for name in list(self._running):
            self.kill(name)

    def _start(self, name: str) -> None:
        home = self._folder / name
        home.mkdir(parents=True, exist_ok=True)
        main, arguments = {"n": self._name_server, "p": self._proxy}.get(name[0], self._broker)(name, home)
        environment = {**os.environ, "ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}
        with (home / "out").open("ab") as output:
            self._running[name] = subprocess.Popen(
                java_command(home, self._jars, main, *arguments),
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _name_server(self, name: str, home: Path) -> tuple[str, list[str]]:
        conf = {
            "listenPort": self._names,
            "rocketmqHome": home,
            "enableControllerInNamesrv": True,
            "controllerDLegerGroup": "controller",
            "controllerDLegerPeers": f"n0-127.0.0.1:{self._controller}",
            "controllerDLegerSelfId": "n0",
            "controllerStorePath": home / "controller",
            "scanNotActiveBrokerInterval": 1000,
            "notifyBrokerRoleChanged": True,
        }
        return "org.apache.rocketmq.namesrv.NamesrvStartup", ["-c", _written(home / "conf", conf)]

    def _broker(self, name: str, home: Path) -> tuple[str, list[str]]:
        conf = {
            "brokerClusterName": CLUSTER,
            "brokerName": name[0],
            "brokerId": -1,
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "listenPort": self._listen[name],
            "haListenPort": self._replicates[name],
            "namesrvAddr": f"127.0.0.1:{self._names}",
            "rocketmqHome": home,
            "storePathRootDir": home / "store",
            "storePathCommitLog": home / "store" / "commitlog",
            "enableControllerMode": True,
            "controllerAddr": f"127.0.0.1:{self._controller}",
            "controllerHeartBeatTimeoutMills": 3000,
            "allAckInSyncStateSet": True,
            "autoCreateTopicEnable": False,
            "enableMixedMessageType": True,
            "mappedFileSizeCommitLog": 64 * 1024 * 1024,
            "mappedFileSizeConsumeQueue": 6_000_000,
            "mappedFileSizeTimerLog": 1024 * 1024,
            "timerWheelEnable": True,
            "diskMaxUsedSpaceRatio": 98,
            **self._settings,
        }
        return "org.apache.rocketmq.broker.BrokerStartup", ["-c", _written(home / "conf", conf)]

    def _proxy(self, name: str, home: Path) -> tuple[str, list[str]]:
        conf = {
            "rocketMQClusterName": CLUSTER,
            "proxyClusterName": CLUSTER,
            "namesrvAddr": f"127.0.0.1:{self._names}",
            "localServeAddr": "127.0.0.1",
            "grpcServerPort": self._proxies[name],
            "remotingListenPort": self._remoting[name],
            "enableTopicMessageTypeCheck": True,
        }
        (home / "proxy.json").write_text(json.dumps(conf), encoding="utf-8")
        names = f"127.0.0.1:{self._names}"
        arguments = ["-pm", "cluster", "-n", names, "-pc", str(home / "proxy.json")]
        return "org.apache.rocketmq.proxy.ProxyStartup", arguments


def _written(path: Path, conf: Mapping[str, object]) -> str:
    lines = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in conf.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
