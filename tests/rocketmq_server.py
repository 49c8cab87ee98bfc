"""A private RocketMQ server: name server, broker and proxy as two processes on this machine, in a folder.

Tests and benchmarks run it; production has a cluster. Maven fetches the programs (`mvn` and Java 11
or newer are needed, nothing is installed). They listen on free ports of 127.0.0.1 and need about 800 MB of memory.
`kill` is a crash (SIGKILL): the broker still has what it acknowledged after the next `start`, which keeps the ports.
`python -m tests.rocketmq_server FOLDER` runs one until Ctrl-C.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from outbox.errors import BrokerUnavailable, ConfigurationError, OutboxError
from outbox.rocketmq.admin import Admin, brokers_of

VERSION: Final = "5.3.3"
CLUSTER: Final = "DefaultCluster"
# The code of the request for the brokers of all clusters.
_CLUSTERS: Final = 106
_START_SECONDS: Final = 300.0
_ENDS: Final = frozenset({signal.SIGINT, signal.SIGTERM})
HEAP: Final = ("-Xms128m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# Netty and RocketMQ use internals of the JDK.
OPENS: Final = tuple(
    f"--add-{how}=java.base/{package}=ALL-UNNAMED"
    for how, package in [("exports", "sun.nio.ch"), ("opens", "java.nio"), ("opens", "java.lang")]
)
_ARTEFACTS: Final = ("rocketmq-namesrv", "rocketmq-broker", "rocketmq-proxy")

# Sizes for one small machine, and the broker settings that the engine needs: topics of mixed types (see
# docs/engines.md).
_BROKER: Final[Mapping[str, object]] = {
    "brokerClusterName": CLUSTER,
    "brokerName": "private",
    "brokerId": 0,
    "brokerIP1": "127.0.0.1",
    "autoCreateTopicEnable": False,
    "enableMixedMessageType": True,
    "mappedFileSizeCommitLog": 64 * 1024 * 1024,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "mappedFileSizeTimerLog": 1024 * 1024,
    "timerWheelEnable": True,
    "diskMaxUsedSpaceRatio": 98,
    "warmMapedFileEnable": False,
}


def programs_missing() -> str:
    """The programs that a private server lacks on this machine; '' if none."""
    return " and ".join(name for name in ("java", "mvn") if shutil.which(name) is None)


def fetch_programs(folder: Path, version: str = VERSION) -> Path:
    """The folder of the server's jars; Maven fetches missing ones. Raises ConfigurationError."""
    # Maven and Java run in folders of their own.
    jars = folder.resolve() / f"rocketmq-{version}"
    if (jars / "complete").exists():
        return jars
    if missing := programs_missing():
        raise ConfigurationError(f"a RocketMQ server of one's own needs {missing} on the PATH.")
    fetch(jars, dict.fromkeys(_ARTEFACTS, version))
    return jars


def fetch(jars: Path, artefacts: Mapping[str, str]) -> None:
    """Let Maven fetch artefacts (name to version) with their dependencies. Raises ConfigurationError.

    A name without a group (`GROUP:NAME`) is an artefact of RocketMQ.
    """
    jars.mkdir(parents=True, exist_ok=True)
    # Two processes that copy at the same time spoil each other's files.
    with (jars / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (jars / "complete").exists():
            return
        (jars / "pom.xml").write_text(_pom(artefacts), encoding="utf-8")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        done = subprocess.run(["mvn", "-q", "-B", *goal], cwd=jars, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr)[-3000:]
            raise ConfigurationError(f"Maven could not fetch {', '.join(artefacts)}: {said}")
        (jars / "complete").touch()


def _pom(artefacts: Mapping[str, str]) -> str:
    dependencies = "".join(
        f"<dependency><groupId>{name.rpartition(':')[0] or 'org.apache.rocketmq'}</groupId>"
        f"<artifactId>{name.rpartition(':')[2]}</artifactId><version>{version}</version></dependency>"
        for name, version in artefacts.items()
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>outbox</groupId><artifactId>rocketmq-programs</artifactId><version>1</version>"
        f"<packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )


class PrivateRocketMQ:
    """One server in `folder`, with the jars in `jars`; `broker` adds to or replaces lines of its broker.conf.

    `proxy` adds to its rmq-proxy.json, `java` are options of the Java process with broker and proxy. `credentials`
    (KEY:SECRET, percent-encoded) and `options` (without brokers) are the parts of its address.
    """

    def __init__(
        self,
        folder: Path,
        jars: Path,
        *,
        broker: Mapping[str, object] | None = None,
        proxy: Mapping[str, object] | None = None,
        java: Sequence[str] = (),
        credentials: str = "",
        options: str = "",
    ) -> None:
        self.folder = folder.resolve()
        self._jars = jars.resolve()
        self._proxy_settings = dict(proxy or {})
        self._java = tuple(java)
        self._credentials = f"{credentials}@" if credentials else ""
        self._options = f"&{options}" if options else ""
        self._settings = {**_BROKER, **(broker or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._names, self._proxy, self._remoting, self._listen = _free_ports()

    @property
    def url(self) -> str:
        """The value of OUTBOX['BROKER'] for it."""
        return self.url_with(self._credentials, self._options)

    def url_with(self, credentials: str = "", options: str = "") -> str:
        """The address with other credentials (`KEY:SECRET@`) and options (`&name=value`)."""
        return f"rocketmq://{credentials}127.0.0.1:{self._proxy}?brokers=127.0.0.1:{self._listen}{options}"

    @property
    def admin(self) -> Admin:
        """Its administration port."""
        return brokers_of(self.url)[0]

    @property
    def admins(self) -> list[Admin]:
        """The administration ports of all brokers: one."""
        return [self.admin]

    def start(self) -> None:
        """Start it and wait until it accepts clients. Raises BrokerUnavailable with the end of its log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._configure()
        self._run("namesrv", "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", str(self.folder / "namesrv.conf"))
        self._run(
            "proxy",
            *self._java,
            "org.apache.rocketmq.proxy.ProxyStartup",
            *("-pm", "local", "-n", f"127.0.0.1:{self._names}"),
            *("-bc", str(self.folder / "broker.conf"), "-pc", str(self.folder / "proxy.json")),
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_up():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                self.kill()
                raise BrokerUnavailable(f"RocketMQ did not start in {self.folder}: {self._log()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop it in order."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def kill(self) -> None:
        """Stop it as a crash does."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def _configure(self) -> None:
        home = str(self.folder)
        (self.folder / "namesrv.conf").write_text(f"listenPort={self._names}\nrocketmqHome={home}\n", encoding="utf-8")
        settings = {
            **self._settings,
            "listenPort": self._listen,
            "namesrvAddr": f"127.0.0.1:{self._names}",
            "rocketmqHome": home,
            "storePathRootDir": f"{home}/store",
            "storePathCommitLog": f"{home}/store/commitlog",
        }
        lines = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
        (self.folder / "broker.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        proxy = {
            "rocketMQClusterName": CLUSTER,
            "proxyClusterName": CLUSTER,
            "namesrvAddr": f"127.0.0.1:{self._names}",
            "localServeAddr": "127.0.0.1",
            "grpcServerPort": self._proxy,
            "remotingListenPort": self._remoting,
            "enableTopicMessageTypeCheck": True,
            **self._proxy_settings,
        }
        (self.folder / "proxy.json").write_text(json.dumps(proxy), encoding="utf-8")

    def _run(self, name: str, *arguments: str) -> None:
        home = str(self.folder)
        command = ["java", *HEAP, *OPENS, f"-Duser.home={home}", "-cp", f"{self._jars}/*", *arguments]
        environment = {**os.environ, "ROCKETMQ_HOME": home, "RMQ_PROXY_HOME": home}
        with (self.folder / f"{name}.out").open("ab") as output:
            started = subprocess.Popen(
                command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._processes.append(started)

    def _is_up(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._proxy), 1):
                pass
            # The name server needs neither credentials nor encryption.
            _, _, found = Admin("127.0.0.1", self._names).ask(_CLUSTERS, {})
            # The answer is not valid JSON: RocketMQ writes the numbers of brokers as keys without quotes.
            return f'"clusterAddrTable":{{"{CLUSTER}":["'.encode() in found
        except (OSError, BrokerUnavailable):
            return False

    def _log(self) -> str:
        outputs = [self.folder / f"{name}.out" for name in ("namesrv", "proxy")]
        return "".join(output.read_text(encoding="utf-8", errors="replace")[-1500:] for output in outputs)


def _free_ports() -> tuple[int, int, int, int]:
    """Free ports of name server, proxy, the proxy's remoting and broker.

    The broker also uses two neighbours: two below (fast remoting) and one above (HA). The ports are below those that
    Linux gives to clients (32768 to 60999). Otherwise a client's connection could take one before the server does.
    """
    while True:
        first = random.randrange(15_000, 32_000)
        if all(is_free(port) for port in range(first, first + 7)):
            return first, first + 1, first + 2, first + 5


def is_free(port: int) -> bool:
    """Whether no process listens on this port of this machine."""
    with socket.socket() as probe:
        try:
            # On all interfaces, as the name server and the broker do.
            probe.bind(("", port))
        except OSError:
            return False
        return True


def main() -> int:
    """Run a server in a folder until SIGINT or SIGTERM; the next start finds its messages, on other ports."""
    parser = argparse.ArgumentParser(prog="python -m tests.rocketmq_server", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="the folder for its programs and messages")
    folder: Path = parser.parse_args().folder
    try:
        server = PrivateRocketMQ(folder / "data", fetch_programs(folder))
        # Block the signals before there are children: a signal during their start waits until they can be stopped in
        # order.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        server.start()
    except OutboxError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"OUTBOX['BROKER']: {server.url}\nadministration port: {server.admin.host}:{server.admin.port}", flush=True)
    signal.sigwait(_ENDS)
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
