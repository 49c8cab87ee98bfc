"""A blind trial of the operations page: `python -m tests.sample.blind_trial NUMBER...`.

The sample project runs with real processes and a customer who buys every few seconds. Then each named fault is planted
(1 to 6; `--secret SEED` chooses two faults and does not tell which). A person who has only the page in a browser says
what is wrong, and settles it. The kit prints when a fault was planted and when it was settled, and the seconds between.

The faults:
1  a dead letter whose body cannot be read                          settled: no unsettled dead letter is left
2  a consumer group that an operator has paused                     settled: the group runs and has no lag
3  the leader was killed, and no other broker process runs          settled: a process leads
4  a limit that binds for long                                      settled: no message waits for the limit
5  an endpoint that has answered 410, and works again               settled: the endpoint is enabled and gets messages
6  a half message of a service of which no process answers checks   settled: the transaction is decided

Fault 3 cannot be ended by a page. The person who has found it asks a colleague with a shell: type `start a broker` or
`start a worker`, then Enter. Other lines are noted as what the person says. Ctrl-C or SIGTERM ends the trial, with all
of its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any, Final
from uuid import uuid4

import psycopg

from outbox.broker import embedded
from outbox.broker.database.executor import Executor
from outbox.broker.operations.changes import pause
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message
from outbox.transaction import HalfTransaction
from sample_project import server
from sample_project.demo.processes import Services, exclusive
from sample_project.demo.shopper import NoAnswer, Shopper, UnexpectedAnswer
from tests.servers import free_ports

ROOT: Final = Path(__file__).resolve().parents[2]
_START_SECONDS: Final = 90.0
_BUY_SECONDS: Final = 2.0
# The service manager starts a process again after this time. It never starts the broker process again.
_RESTART_SECONDS: Final = 3.0
_ROLES: Final = ("consumer", "check", "forward")


class _Endpoint(BaseHTTPRequestHandler):
    """An endpoint that answers 410 while `gone` is set."""

    gone: threading.Event
    received: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(self.headers["webhook-id"])
        self.send_response(410 if self.gone.is_set() else 204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@dataclass
class Trial:
    """The running processes, and what the faults need of them."""

    services: Services
    broker_url: str
    orders_url: str
    gone: threading.Event
    received: list[str]
    environment: Mapping[str, str]
    pids: dict[str, int] = field(default_factory=dict)
    planted: dict[str, Any] = field(default_factory=dict)

    def sql(self, statement: str, *values: object, orders: bool = False) -> list[tuple[Any, ...]]:
        """Run a statement on the broker's database, or on that of the orders."""
        with psycopg.connect(self.orders_url if orders else self.broker_url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def start_worker(self, role: str) -> None:
        """Start one role of the worker as a process of its own."""
        self.pids[role] = self.services.start(
            role, "sample_project.manage", "outbox_worker", "--role", role, environment=self.environment
        )


# -- the faults ------------------------------------------------------------------------------------


def _poison(trial: Trial) -> None:
    trial.sql(
        "SELECT outbox.publish_bytes('shipment.created', %s, 'application/json', 'order-4711', wake => true)",
        b'{"order_id": 4711, "carrier": \xff\xfe',
    )


def _poison_settled(trial: Trial) -> bool:
    [(left, settled)] = trial.sql(
        "SELECT count(*) FILTER (WHERE replayed_at IS NULL AND discarded_at IS NULL), count(discarded_at)"
        " FROM outbox.dead_letter"
    )
    return not left and settled > 0


def _paused(trial: Trial) -> None:
    with psycopg.connect(trial.broker_url, autocommit=True) as connection:
        pause(Executor(connection, "outbox"), "points")


def _paused_settled(trial: Trial) -> bool:
    return trial.sql("SELECT paused FROM outbox.consumer_group WHERE name = 'points'") == [(False,)]


def _no_broker(trial: Trial) -> None:
    trial.planted["killed"] = trial.pids["broker"]
    os.kill(trial.pids["broker"], signal.SIGKILL)


def _broker_settled(trial: Trial) -> bool:
    # The lease of the killed process lasts for a few seconds.
    return trial.pids["broker"] != trial.planted["killed"] and _leads(trial)


def _leads(trial: Trial) -> bool:
    return bool(
        trial.sql("SELECT 1 FROM outbox.leader_lease WHERE role = 'sequencer' AND expires_at > clock_timestamp()")
    )


def _limit(trial: Trial) -> None:
    trial.sql(
        "SELECT count(outbox.publish('offer.made', jsonb_build_object('customer', 'customer-' || number), 'many'))"
        " FROM generate_series(1, 1500) AS number"
    )


def _limit_settled(trial: Trial) -> bool:
    return trial.sql(
        "SELECT override IS NOT NULL FROM outbox.subscription_limit JOIN outbox.consumer_group USING (group_id)"
        " WHERE name = 'offers.mail'"
    ) == [(True,)]


def _gone(trial: Trial) -> None:
    trial.gone.set()

    def back() -> None:
        """The endpoint works again as soon as it has been disabled."""
        # The trial may end meanwhile, and the database with it.
        with contextlib.suppress(psycopg.Error):
            while not trial.sql("SELECT 1 FROM outbox_endpoint WHERE disabled_at IS NOT NULL", orders=True):
                time.sleep(0.5)
            trial.gone.clear()
            trial.planted["received"] = len(trial.received)

    threading.Thread(target=back, daemon=True).start()


def _gone_settled(trial: Trial) -> bool:
    return "received" in trial.planted and len(trial.received) > trial.planted["received"]


def _half(trial: Trial) -> None:
    from outbox.broker.database.connection import BrokerDatabase

    broker = PostgresBroker(BrokerDatabase(trial.broker_url, schema="outbox"))
    message = Message(topic="order.enriched", body=b'{"order_id": 815}', key="order-815")
    half = HalfTransaction(producer_group="invoicing", messages=[message], ledger_id=uuid4(), immunity_seconds=1)
    broker.send_half(half)
    trial.planted["half"] = half.transaction_id


def _half_settled(trial: Trial) -> bool:
    return bool(trial.sql("SELECT 1 FROM outbox.op_log WHERE transaction_id = %s", trial.planted["half"]))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and whether it is settled."""

    plant: Callable[[Trial], None]
    is_settled: Callable[[Trial], bool]


FAULTS: Final[Mapping[int, Fault]] = {
    1: Fault(_poison, _poison_settled),
    2: Fault(_paused, _paused_settled),
    3: Fault(_no_broker, _broker_settled),
    4: Fault(_limit, _limit_settled),
    5: Fault(_gone, _gone_settled),
    6: Fault(_half, _half_settled),
}


# -- the processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(port: int, directory: Path) -> Iterator[Trial]:
    """The sample with a customer, on real processes."""
    os.environ[server.DIRECTORY_VARIABLE] = str(directory)
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    [endpoint_port, provider_port] = free_ports(2)
    handler = type("Endpoint", (_Endpoint,), {"gone": threading.Event(), "received": []})
    endpoint = ThreadingHTTPServer(("127.0.0.1", endpoint_port), handler)
    threading.Thread(target=endpoint.serve_forever, daemon=True).start()
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.sample.trial_settings",
        "TRIAL_ENDPOINT": f"http://127.0.0.1:{endpoint_port}/",
        "SAMPLE_PATH": "two-phase",
        "SAMPLE_BIND": f"127.0.0.1:{port}",
        "SAMPLE_PAYMENT_PROVIDER": f"http://127.0.0.1:{provider_port}",
        "SAMPLE_LEASE_SECONDS": "5",
        "SAMPLE_CHECK_INTERVAL_SECONDS": "2",
        "PYTHONPATH": str(ROOT),
    }
    stopping = threading.Event()
    services: Services | None = None
    try:
        server.start()
        # Its processes get the variables that the start of the server has set.
        services = Services(logs, environment)
        server.drop_databases()
        server.create_databases()
        trial = Trial(
            services=services,
            broker_url=embedded.database_url(server.url(), server.BROKER),
            orders_url=embedded.database_url(server.url(), server.ORDERS),
            gone=handler.gone,  # type: ignore[attr-defined]
            received=handler.received,  # type: ignore[attr-defined]
            environment=environment,
        )
        services.run("migrate", "sample_project.demo.tables", "default", "broker", timeout_seconds=_START_SECONDS)
        services.start("provider", "sample_project.provider", str(provider_port))
        services.start("site", "gunicorn", "--config=python:sample_project.gunicorn_conf")
        for role in ("broker", *_ROLES):
            trial.start_worker(role)
        for target in (_manage, _buy):
            threading.Thread(target=target, args=(trial, port, stopping), daemon=True).start()
        yield trial
    finally:
        stopping.set()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if services is not None:
            services.stop()
        endpoint.shutdown()
        server.stop()


def _manage(trial: Trial, port: int, stopping: threading.Event) -> None:
    """A service manager that starts a worker again when it has ended."""
    while not stopping.wait(_RESTART_SECONDS):
        for role in _ROLES:
            if _has_ended(trial.pids[role]):
                trial.start_worker(role)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _buy(trial: Trial, port: int, stopping: threading.Event) -> None:
    number = 0
    while not stopping.wait(_BUY_SECONDS):
        number += 1
        with contextlib.closing(Shopper(port)) as shopper, contextlib.suppress(NoAnswer, UnexpectedAnswer):
            shopper.fill_cart(number)
            shopper.pay(shopper.order(), "good")


# -- the trial -------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def _wait_until_healthy(trial: Trial) -> None:
    """Wait until orders flow to every group and to the endpoint."""
    deadline = time.monotonic() + _START_SECONDS
    while not (trial.received and _leads(trial)):
        if time.monotonic() > deadline:
            raise SystemExit(f"the sample did not start; its logs are in {trial.services.logs}")
        time.sleep(0.5)


def _listen(trial: Trial) -> None:
    for line in sys.stdin:
        said = line.strip()
        _say(f"noted: {said}")
        if said.startswith("start a ") and said.rpartition(" ")[2] in ("broker", "worker"):
            trial.start_worker("broker")


def run(numbers: list[int], port: int, directory: Path, *, told: bool) -> None:
    """Start the sample, plant the faults, and wait until all are settled."""
    _say("the sample starts; this takes up to a minute")
    with _running(port, directory) as trial:
        _wait_until_healthy(trial)
        _say(f"the page: http://127.0.0.1:{port}/operations/  (user operator, password operator)")
        threading.Thread(target=_listen, args=(trial,), daemon=True).start()
        began: dict[int, float] = {}
        for number in numbers:
            FAULTS[number].plant(trial)
            began[number] = time.monotonic()
            _say(f"planted fault {number if told else '?'}")
        while began:
            time.sleep(0.5)
            for number in list(began):
                if FAULTS[number].is_settled(trial):
                    seconds = time.monotonic() - began.pop(number)
                    _say(f"settled fault {number if told else '?'} after {seconds:.0f} s")
        _say(f"all faults are settled: {numbers}. Ctrl-C ends the trial")
        threading.Event().wait()


def main() -> None:
    """Parse the arguments and run the trial."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sample.blind_trial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", type=int, metavar="FAULT", help="the faults to plant, 1 to 6")
    parser.add_argument("--secret", type=int, metavar="SEED", help="plant two faults that the seed chooses, untold")
    parser.add_argument("--port", type=int, default=8020, help="port of the site (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=ROOT / "var" / "trial", help="databases and logs")
    given = parser.parse_args()
    # SIGINT too: a shell that starts this in the background makes it ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    numbers = given.faults
    if given.secret is not None:
        numbers = random.Random(given.secret).sample(sorted(FAULTS), 2)
    if not numbers or not FAULTS.keys() >= set(numbers):
        parser.error("name one or more of the faults 1 to 6, or give --secret SEED")
    with exclusive(given.directory), contextlib.suppress(KeyboardInterrupt):
        run(numbers, given.port, given.directory, told=given.secret is None)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, so that all processes are stopped on the way out."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
