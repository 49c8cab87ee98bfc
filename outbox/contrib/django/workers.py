"""What the worker processes run: the broker, the consumers, and check-back where no Celery beat drives it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.process import ProcessSettings, run_broker
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.contrib.django import probes
from outbox.contrib.django.broker import get_codecs
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.databases import broker_database
from outbox.contrib.django.in_tests import refuse_processes_in_tests
from outbox.contrib.django.inbox import InboxInvoker, require_inboxes
from outbox.contrib.django.periodic import passes
from outbox.contrib.django.registry import autodiscover, subscriptions
from outbox.errors import ConfigurationError, OutboxError
from outbox.periodic import PeriodicPass

logger = logging.getLogger(__name__)


def child_specs() -> list[ChildSpec]:
    """The processes to keep alive: one broker, and as many consumers as OUTBOX['CONSUMER_PROCESSES']."""
    refuse_processes_in_tests()
    settings = get_settings()
    consumers = [f"consumer-{number}" for number in range(1, settings.consumer_processes + 1)]
    roles = {"broker": "broker", **dict.fromkeys(consumers, "consumer")}
    signs = probes.expect(roles)
    children = [_child(name, role, signs[name]) for name, role in roles.items()]
    if settings.health_address is None:
        return children
    return [*children, _child("monitor", "monitor", probes.of_monitor())]


def _child(name: str, role: str, environment: Mapping[str, str]) -> ChildSpec:
    return ChildSpec(
        name=name, argv=[sys.executable, "-m", "outbox.contrib.django.child", role], environment=environment
    )


def run_broker_role(stop: threading.Event) -> None:
    """Sequence and retain, whenever this process holds the leader's lease, until `stop`."""
    run_broker(broker_database(), stop, settings=ProcessSettings(check=get_settings().check))


def consumer_runtime(*, groups: Sequence[str] = ()) -> ConsumerRuntime:
    """A runtime for the project's subscribers. Raises ConfigurationError when there are none."""
    autodiscover()
    wanted = subscriptions(groups=groups)
    if not wanted:
        raise ConfigurationError(
            "there is no @subscriber in this project: workers look into the modules 'subscribers' and 'handlers' of "
            "INSTALLED_APPS. Without any, start the broker role only."
        )
    require_inboxes([subscription for subscription, _ in wanted])
    settings = get_settings()
    return ConsumerRuntime(
        broker_database(settings),
        wanted,
        invoker=InboxInvoker(lease_seconds=settings.lease_seconds),
        codecs=get_codecs(),
        lease_seconds=settings.lease_seconds,
    )


def run_consumer_role(stop: threading.Event, *, groups: Sequence[str] = ()) -> None:
    """Consume for the project's subscribers until `stop`, then finish what is held."""
    consumer_runtime(groups=groups).run(stop)


def run_monitor_role(stop: threading.Event) -> None:
    """Serve /live, /ready and /metrics until `stop`."""
    with probes.served():
        stop.wait()


def run_check_role(stop: threading.Event) -> None:
    """Run the periodic passes, each at its own interval, until `stop`. For projects without Celery beat."""
    due = {item.name: 0.0 for item in passes()}
    while not stop.is_set():
        for item in passes():
            if time.monotonic() >= due[item.name]:
                due[item.name] = time.monotonic() + item.interval_seconds
                run_pass(item)
        stop.wait(max(0.05, min(due.values()) - time.monotonic()))


def run_pass(item: PeriodicPass) -> None:
    """One pass; an error is logged, the next one tries again."""
    try:
        logger.debug("%s: %s", item.name, item.run())
    except OutboxError as error:
        logger.warning("%s failed, it runs again in %.0f s: %s", item.name, item.interval_seconds, error)
    except Exception:
        logger.exception("%s failed, it runs again in %.0f s", item.name, item.interval_seconds)


def run_all(stop: threading.Event) -> None:
    """Supervise the broker and the consumers as processes of their own and run the periodic passes here."""
    supervisor = Supervisor(child_specs())
    supervisor.start()
    try:
        run_check_role(stop)
    finally:
        supervisor.stop()


def _by_itself(name: str, role: Callable[[], None]) -> None:
    with probes.alone(name):
        role()


# What `outbox_worker --role` offers: functions of the stop event and the groups named.
ROLES: Final[Mapping[str, Callable[[threading.Event, Sequence[str]], None]]] = {
    "all": lambda stop, groups: run_all(stop),
    "broker": lambda stop, groups: _by_itself("broker", lambda: run_broker_role(stop)),
    "consumer": lambda stop, groups: _by_itself("consumer", lambda: run_consumer_role(stop, groups=groups)),
    "check": lambda stop, groups: run_check_role(stop),
    "monitor": lambda stop, groups: run_monitor_role(stop),
}
