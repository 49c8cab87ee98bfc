"""The phases of a run: set up, sell, crash, settle, judge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from outbox.broker import embedded
from sample_project import server
from sample_project.demo import figures, reconcile, rocketmq, verdicts
from sample_project.demo.display import Display
from sample_project.demo.figures import Figures
from sample_project.demo.options import Options
from sample_project.demo.processes import DemoFailed, Services, child_of
from sample_project.demo.shopper import Crowd
from sample_project.demo.verdicts import Verdict, exactly
from sample_project.rocketmq_server import PrivateRocketMQ

SETTLE_SECONDS: Final = 90.0
# Short for a demonstration; the defaults are 6 s, 60 s and 30 s.
_CHECK_BACK: Final = {
    "SAMPLE_IMMUNITY_SECONDS": "2",
    "SAMPLE_CHECK_RETRY_SECONDS": "2",
    "SAMPLE_CHECK_INTERVAL_SECONDS": "2",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The resources of a run."""

    options: Options
    display: Display
    services: Services
    directory: Path
    port: int
    orders_url: str
    broker_url: str
    rocketmq: PrivateRocketMQ | None = None

    @property
    def two_phase(self) -> bool:
        """Whether the broker has a database of its own."""
        return self.options.path == "two-phase" and self.rocketmq is None

    def figures(self, orders: psycopg.Connection, broker: psycopg.Connection) -> Figures:
        """Count now."""
        return figures.read(orders, broker if self.rocketmq is None else None, log=self.services.log("worker"))

    @property
    def site(self) -> str:
        """The address of the shop."""
        return f"http://127.0.0.1:{self.port}/"

    def marker(self, point: str) -> Path:
        """The file written by the process that a fault point kills."""
        return self.directory / f"killed.{point}"


def run(options: Options, display: Display, directory: Path) -> None:
    """Run the demo once. Raises DemoFailed on any failure or wrong figure; always stops the processes it started."""
    with (
        _database(display),
        rocketmq.running(options, display, directory) as broker_server,
        _stage(options, display, directory, broker_server) as stage,
    ):
        _migrate(stage)
        celery = _open_shop(stage)
        with (
            psycopg.connect(stage.orders_url, autocommit=True) as orders,
            psycopg.connect(stage.broker_url, autocommit=True) as broker,
        ):
            crowd, leader_killed = _sell(stage, celery, orders, broker)
            late = _settle(stage, crowd, orders, broker)
            found = stage.figures(orders, broker)
            paid = figures.paid_orders(orders)
        display.states(found)
        results = [
            *verdicts.of_orders(found),
            *verdicts.of_customers(crowd.answers, paid, options.orders),
            *_of_crashes(stage, leader_killed=leader_killed),
            *(verdicts.of_check_back(found) if stage.two_phase else []),
        ]
        failure = late
        if options.reconcile and failure is None and stage.rocketmq is None:
            try:
                results += _reconcile(stage, found.paid)
            except DemoFailed as error:
                failure = error
        display.result(results)
        wrong = [result.name for result in results if not result.good]
        if failure is not None or wrong:
            raise failure or DemoFailed(f"wrong figures: {', '.join(wrong)}", log=stage.services.log("worker"))
        display.step("all figures are right")
        if options.keep:
            _keep(stage)


@contextlib.contextmanager
def _database(display: Display) -> Iterator[None]:
    own = embedded.URL_VARIABLE in os.environ
    display.step(f"{'using your' if own else 'starting'} PostgreSQL; the sample's databases are made anew")
    try:
        server.start()
        server.drop_databases()
        server.create_databases()
        server.create_queues()
        yield
    finally:
        with _uninterrupted():
            server.stop()


@contextlib.contextmanager
def _stage(
    options: Options, display: Display, directory: Path, broker_server: PrivateRocketMQ | None
) -> Iterator[Stage]:
    logs = directory / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    url = server.url()
    environment = {
        "DJANGO_SETTINGS_MODULE": "sample_project.settings",
        "SAMPLE_PATH": options.path,
        "SAMPLE_RECONCILE_OUTPUT": str(reconcile.output(directory)),
        **_CHECK_BACK,
        **({"SAMPLE_BROKER": broker_server.url} if broker_server is not None else {}),
    }
    orders_url = embedded.database_url(url, server.ORDERS)
    stage = Stage(
        options=options,
        display=display,
        services=Services(logs, environment),
        directory=directory,
        port=options.port or _free_port(),
        orders_url=orders_url,
        broker_url=embedded.database_url(url, server.BROKER) if options.path == "two-phase" else orders_url,
        rocketmq=broker_server,
    )
    try:
        yield stage
    finally:
        display.close()
        display.step("stopping")
        with _uninterrupted():
            left = stage.services.stop()
        if left:
            display.note(f"these processes did not end when asked and were killed: {left}", style="red")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore further Ctrl-C while stopping, so that no process is left behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _migrate(stage: Stage) -> None:
    stage.display.step("creating the tables and the user of the operations page")
    stage.services.run("migrate", "sample_project.demo.tables", "default", *(["broker"] if stage.two_phase else []))
    if stage.rocketmq is not None:
        address = f"{stage.rocketmq.admin.host}:{stage.rocketmq.admin.port}"
        stage.services.run("topics", "sample_project.manage", "outbox_install", f"--create={address}")


def _open_shop(stage: Stage) -> int:
    """Start the site and the worker; returns the worker's process id."""
    stage.display.step("starting the site (gunicorn) and the worker (celery with beat and --outbox)")
    for point in ("producer.before_local_commit", "producer.after_local_commit"):
        stage.marker(point).unlink(missing_ok=True)
    stage.services.start(
        "site",
        "gunicorn",
        "--config=python:sample_project.gunicorn_conf",
        environment={"SAMPLE_BIND": f"127.0.0.1:{stage.port}", "OUTBOX_FAULTS": _faults(stage)},
    )
    schedule = stage.directory / "celerybeat-schedule"
    for old in stage.directory.glob("celerybeat-schedule*"):
        old.unlink()
    celery = stage.services.start(
        "worker",
        "celery",
        *("--app=sample_project", "worker", "--outbox", "--beat", f"--schedule={schedule}"),
        *(f"--queues={','.join(server.CELERY_QUEUES)}", "--concurrency=1", "--loglevel=INFO"),
        *("--without-gossip", "--without-mingle"),
    )
    stage.services.wait_until(lambda: _answers(stage.port), what="the site's answer", log="site", within_seconds=30)
    return celery


def _faults(stage: Stage) -> str:
    """Kill one web process after its local commit and another before it, each on a later visit to that step."""
    visits = max(2, stage.options.orders // 12)
    before, after = stage.marker("producer.before_local_commit"), stage.marker("producer.after_local_commit")
    return (
        f"producer.after_local_commit=kill@{visits}?{after};"
        f"producer.before_local_commit=kill@{visits + visits // 2}?{before}"
    )


def _sell(stage: Stage, celery: int, orders: psycopg.Connection, broker: psycopg.Connection) -> tuple[Crowd, bool]:
    """Run the customers; meanwhile the fault points kill web processes, and the demo kills the sequencing process."""
    options, display = stage.options, stage.display
    display.step(f"{options.orders} customers come to {stage.site}; the first one alone, until the worker has started")
    display.note(f"the operations page: {stage.site}operations/ (operator, with the password operator)")
    crowd = Crowd(stage.port, orders=options.orders, shoppers=options.shoppers)
    told: set[str] = set()
    killed = first_told = False
    pause = threading.Event()
    display.open()
    crowd.start()
    try:
        while not crowd.done():
            stage.services.check_alive()
            found = stage.figures(orders, broker)
            display.show(crowd.answers.total, found)
            if not first_told and found.shipments:
                first_told = True
                _tell_first_order(stage, orders)
                crowd.start_others()
            _tell_kills(stage, told)
            if not killed and crowd.answers.total >= options.orders // 2:
                killed = _kill_leader(stage, celery)
            pause.wait(0.25)
    finally:
        crowd.send_home()
        display.close()
    _tell_kills(stage, told)
    return crowd, killed or _kill_leader(stage, celery)


def _tell_first_order(stage: Stage, orders: psycopg.Connection) -> None:
    order = figures.first_shipped(orders)
    stage.display.step(f"the first order has arrived: order {order} was paid, and its message created the shipment")
    if stage.rocketmq is None:
        stage.display.note(f"its messages: {stage.site}operations/messages/?q={order}")
    if stage.options.shoppers > 1:
        stage.display.step(f"{stage.options.shoppers} customers at a time from now on; processes are killed meanwhile")


def _tell_kills(stage: Stage, told: set[str]) -> None:
    words = {
        "producer.after_local_commit": "after its local commit, before its end message",
        "producer.before_local_commit": "before its local commit",
    }
    for point, when in words.items():
        if point not in told and stage.marker(point).exists():
            told.add(point)
            stage.display.note(f"a web process was killed (SIGKILL) {when}")


def _kill_leader(stage: Stage, celery: int) -> bool:
    if stage.rocketmq is not None:
        stage.rocketmq.kill()
        stage.display.note("RocketMQ was killed (SIGKILL); the demo starts it again, and the shop waits for it")
        stage.rocketmq.start()
        return True
    # The worker has one consumer process, which also leads the broker.
    pid = child_of(celery, "outbox.contrib.django.worker.child", "consumer")
    if pid is None:
        return False
    os.kill(pid, signal.SIGKILL)
    stage.display.note("the process that sequences and consumes was killed (SIGKILL); the broker's process takes over")
    return True


def _settle(stage: Stage, crowd: Crowd, orders: psycopg.Connection, broker: psycopg.Connection) -> DemoFailed | None:
    """Wait until all messages are finished; beat's check-back decides the transactions of the killed processes.

    Returns the failure instead of raising it, so that the figures with the missing effects are shown first.
    """
    stage.display.step("waiting for unfinished messages; beat's check-back settles undecided transactions")

    def settled() -> bool:
        found = stage.figures(orders, broker)
        stage.display.show(crowd.answers.total, found)
        return found.settled

    stage.display.open()
    try:
        stage.services.wait_until(settled, what="settling", log="worker", within_seconds=SETTLE_SECONDS)
    except DemoFailed as failure:
        return failure
    finally:
        stage.display.close()
    return None


def _of_crashes(stage: Stage, *, leader_killed: bool) -> list[Verdict]:
    """Verify that the crashes happened: a demo without them would prove little."""
    return [
        exactly("killed after local commit", int(stage.marker("producer.after_local_commit").exists()), 1),
        exactly("killed before local commit", int(stage.marker("producer.before_local_commit").exists()), 1),
        exactly("leading processes killed", int(leader_killed), 1),
    ]


def _reconcile(stage: Stage, paid: int) -> list[Verdict]:
    if not reconcile.is_installed():
        stage.display.step("installing Spark for the report: some 600 MB to download, once")
        with stage.display.waiting("pip installs Spark; the shop stays open meanwhile"):
            reconcile.install(stage.services)
    stage.display.step("Spark compares the orders with the broker's messages and with the effects of the subscribers")
    with stage.display.waiting("Spark starts, reads both databases and writes its report"):
        report = reconcile.run(
            stage.services, stage.directory, orders_url=stage.orders_url, broker_url=stage.broker_url
        )
    stage.display.note(f"its report: {report.page}", style="dim")
    return [
        exactly("orders reconciled", report.right_orders, paid),
        exactly("reconciliation findings", report.findings, 0),
    ]


def _keep(stage: Stage) -> None:
    stage.display.note(f"the shop is open at {stage.site}; Ctrl-C closes it", style="bold green")
    stage.display.note(f"its messages: {stage.site}operations/ (operator, with the password operator)")
    pause = threading.Event()
    with contextlib.suppress(KeyboardInterrupt):
        while not pause.wait(1.0):
            stage.services.check_alive()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
