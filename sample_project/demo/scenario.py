"""The phases of a run: set up, sell, crash, settle, judge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psycopg

from outbox.broker import embedded
from outbox.retry import LONGEST_WAIT_SECONDS
from sample_project import server
from sample_project.demo import charges, deployment, figures, reconcile, verdicts
from sample_project.demo.charges import PaymentKill
from sample_project.demo.deployment import Deployment
from sample_project.demo.display import Display
from sample_project.demo.options import Options
from sample_project.demo.processes import DemoFailed, Services, child_of
from sample_project.demo.shopper import Answers, Crowd
from sample_project.demo.verdicts import Verdict, exactly

SETTLE_SECONDS: Final = 90.0
# The time for the kill in a payment after the last customer has left.
_KILL_SECONDS: Final = 30.0
# Short for a demonstration; the defaults are 10 s, 6 s, 60 s and 30 s.
_TIMES: Final = {
    "SAMPLE_LEASE_SECONDS": "5",
    "SAMPLE_IMMUNITY_SECONDS": "2",
    "SAMPLE_CHECK_INTERVAL_SECONDS": "1",
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
    provider_url: str

    @property
    def two_phase(self) -> bool:
        """Whether the broker has a database of its own."""
        return self.options.path == "two-phase"

    @property
    def site(self) -> str:
        """The address of the shop."""
        return f"http://127.0.0.1:{self.port}/"

    def marker(self, point: str) -> Path:
        """The file written by the process that a fault point kills."""
        return self.directory / f"killed.{point}"


def run(options: Options, display: Display, directory: Path) -> None:
    """Run the demo once. Raises DemoFailed on any failure or wrong figure; always stops the processes it started."""
    with _database(display), _stage(options, display, directory) as stage:
        _migrate(stage)
        celery = _open_shop(stage)
        with (
            psycopg.connect(stage.orders_url, autocommit=True) as orders,
            psycopg.connect(stage.broker_url, autocommit=True) as broker,
        ):
            crowd, kill = _sell(stage, celery, orders, broker)
            answers, customers = crowd.answers, options.orders
            deployed = _deploy(stage, broker) if options.long else None
            if deployed is not None:
                stage = replace(stage, port=deployed.port)
                answers, customers = answers.with_others(deployed.answers), customers + deployed.customers
                display.expect(customers)
            late = _settle(stage, answers, orders, broker)
            found = figures.read(orders, broker)
            paid = figures.paid_orders(orders)
            of_versions = [] if deployed is None else deployment.verdicts(deployed, broker, found.paid)
            in_statements = _statement(stage, orders) if late is None else None
        display.states(found)
        results = [
            *verdicts.of_orders(found),
            *verdicts.of_customers(answers, paid, customers),
            *verdicts.of_charges(charges.read(stage.provider_url), paid, kill),
            *([] if in_statements is None else [exactly("charges in the statement", in_statements, len(paid))]),
            *_of_crashes(stage, kill),
            *of_versions,
            *(verdicts.of_check_back(found) if stage.two_phase else []),
        ]
        failure = late
        if options.reconcile and failure is None:
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
    # The demo drops its databases, so it never uses those of another shop.
    os.environ.pop(server.APPLICATION_VARIABLE, None)
    try:
        server.start()
        server.drop_databases()
        server.create_databases()
        yield
    finally:
        with _uninterrupted():
            server.stop()


@contextlib.contextmanager
def _stage(options: Options, display: Display, directory: Path) -> Iterator[Stage]:
    logs = directory / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    url = server.url()
    port, provider_url = options.port or _free_port(), f"http://127.0.0.1:{_free_port()}"
    environment = {
        "DJANGO_SETTINGS_MODULE": "sample_project.settings",
        "SAMPLE_PATH": options.path,
        "SAMPLE_RECONCILE_OUTPUT": str(reconcile.output(directory)),
        "SAMPLE_PAYMENT_PROVIDER": provider_url,
        "SAMPLE_BIND": f"127.0.0.1:{port}",
        **_TIMES,
    }
    orders_url = embedded.database_url(url, server.ORDERS)
    stage = Stage(
        options=options,
        display=display,
        services=Services(logs, environment),
        directory=directory,
        port=port,
        orders_url=orders_url,
        broker_url=embedded.database_url(url, server.BROKER) if options.path == "two-phase" else orders_url,
        provider_url=provider_url,
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
    stage.display.step("creating the tables, the queues of Celery, and the user of the operations page")
    stage.services.run("migrate", "sample_project.demo.tables", "default", *(["broker"] if stage.two_phase else []))


def _open_shop(stage: Stage) -> int:
    """Start the site and the worker; returns the worker's process id."""
    stage.display.step("starting the site (gunicorn), the worker (celery with beat and --outbox), the payment provider")
    provider_port = stage.provider_url.rpartition(":")[2]
    stage.services.start("provider", "sample_project.provider", provider_port)
    before = deployment.OLD if stage.options.long else {}
    for point in ("producer.before_local_commit", "producer.after_local_commit"):
        stage.marker(point).unlink(missing_ok=True)
    stage.services.start(
        "site",
        "gunicorn",
        "--config=python:sample_project.gunicorn_conf",
        environment={"OUTBOX_FAULTS": _faults(stage), **before},
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
        environment=before,
    )
    stage.services.wait_until(lambda: _answers(stage.port), what="the site's answer", log="site", within_seconds=30)
    stage.services.wait_until(
        lambda: _answers(int(provider_port)), what="the provider's answer", log="provider", within_seconds=30
    )
    return celery


def _faults(stage: Stage) -> str:
    """Kill one web process after its local commit and another before it, each on a later visit to that step."""
    visits = max(2, stage.options.orders // 12)
    before, after = stage.marker("producer.before_local_commit"), stage.marker("producer.after_local_commit")
    return (
        f"producer.after_local_commit=kill@{visits}?{after};"
        f"producer.before_local_commit=kill@{visits + visits // 2}?{before}"
    )


def _sell(
    stage: Stage, celery: int, orders: psycopg.Connection, broker: psycopg.Connection
) -> tuple[Crowd, PaymentKill | None]:
    """Run the customers; meanwhile the fault points kill web processes, and the demo kills the sequencing process."""
    options, display = stage.options, stage.display
    display.step(f"{options.orders} customers come to {stage.site}; the first one alone, until the worker has started")
    display.note(f"the operations page: {stage.site}operations/ (operator, with the password operator)")
    crowd = Crowd(stage.port, orders=options.orders, shoppers=options.shoppers)
    told: set[str] = set()
    kill: PaymentKill | None = None
    first_told = False
    pause = threading.Event()
    display.open()
    crowd.start()
    try:
        while not crowd.done():
            stage.services.check_alive()
            found = figures.read(orders, broker)
            display.show(crowd.answers.total, found)
            if not first_told and found.shipments:
                first_told = True
                _tell_first_order(stage, orders)
                crowd.start_others()
            _tell_kills(stage, told)
            kill = kill or _killed_in_a_payment(stage, celery)
            pause.wait(0.25)
        # The last customers may have left before the provider was slow.
        deadline = time.monotonic() + _KILL_SECONDS
        while kill is None and time.monotonic() < deadline:
            stage.services.check_alive()
            kill = _killed_in_a_payment(stage, celery)
            pause.wait(0.1)
    finally:
        crowd.send_home()
        display.close()
    _tell_kills(stage, told)
    return crowd, kill


def _tell_first_order(stage: Stage, orders: psycopg.Connection) -> None:
    order = figures.first_shipped(orders)
    stage.display.step(f"the first order has arrived: order {order} was paid, and its message created the shipment")
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


def _killed_in_a_payment(stage: Stage, celery: int) -> PaymentKill | None:
    """Kill the consumer process, which also leads the broker, if it waits for the provider now."""
    pid = child_of(celery, "outbox.contrib.django.worker.child", "consumer")
    charge = charges.unanswered(charges.read(stage.provider_url))
    if pid is None or charge is None:
        return None
    os.kill(pid, signal.SIGKILL)
    stage.display.note(
        f"the process that sequences and consumes was killed (SIGKILL) in the payment of order {charge.order}; "
        "the provider has charged it, and the shop does not know that yet"
    )
    return PaymentKill(number=charge.number, order=charge.order)


def _deploy(stage: Stage, broker: psycopg.Connection) -> Deployment:
    return deployment.deploy(
        stage.services,
        stage.display,
        broker,
        old_port=stage.port,
        new_port=_free_port(),
        shoppers=max(2, stage.options.shoppers),
        answers=_answers,
    )


def _settle(
    stage: Stage, answers: Answers, orders: psycopg.Connection, broker: psycopg.Connection
) -> DemoFailed | None:
    """Wait until all messages are finished; beat's check-back decides the transactions of the killed processes.

    Returns the failure instead of raising it, so that the figures with the missing effects are shown first.
    """
    stage.display.step("waiting for unfinished messages; beat's check-back settles undecided transactions")

    def settled() -> bool:
        found = figures.read(orders, broker)
        stage.display.show(answers.total, found)
        return found.settled

    stage.display.open()
    try:
        # A message that waits for newer code is read again after half of its age, which is at most a minute.
        seconds = SETTLE_SECONDS + (LONGEST_WAIT_SECONDS if stage.options.long else 0)
        stage.services.wait_until(settled, what="settling", log="worker", within_seconds=seconds)
    except DemoFailed as failure:
        return failure
    finally:
        stage.display.close()
    return None


def _statement(stage: Stage, orders: psycopg.Connection) -> int:
    """Run the nightly schedule once, out of its time; returns the number of charges in its statement."""
    stage.display.step("an operator runs the nightly schedule now: one statement of all charges")
    stage.services.run("statement", "sample_project.manage", "outbox_schedule", "run", "statement")
    stage.services.wait_until(
        lambda: bool(charges.statements(orders)), what="the statement", log="worker", within_seconds=30
    )
    return sum(charges.statements(orders))


def _of_crashes(stage: Stage, kill: PaymentKill | None) -> list[Verdict]:
    """Verify that the crashes happened: a demo without them would prove little."""
    return [
        exactly("killed after local commit", int(stage.marker("producer.after_local_commit").exists()), 1),
        exactly("killed before local commit", int(stage.marker("producer.before_local_commit").exists()), 1),
        exactly("leading processes killed", int(kill is not None), 1),
    ]


def _reconcile(stage: Stage, paid: int) -> list[Verdict]:
    if not reconcile.is_installed():
        stage.display.step("installing Spark for the report: some 590 MB to download, once")
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
