"""What the worker processes run: the broker, the consumers, and check-back."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from outbox import heartbeat
from outbox.broker import deaths, process_log
from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.process import ProcessSettings, run_broker
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.contrib.django import probes
from outbox.contrib.django.broker import get_codecs
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.databases import broker_database
from outbox.contrib.django.engines import require_engine
from outbox.contrib.django.handler_connections import pool_shortages
from outbox.contrib.django.in_tests import refuse_processes_in_tests
from outbox.contrib.django.inbox import InboxInvoker, require_inboxes
from outbox.contrib.django.periodic import passes
from outbox.contrib.django.registry import autodiscover, find_subscriber, subscriptions
from outbox.errors import ConfigurationError, OutboxError
from outbox.periodic import PeriodicPass
from outbox.ports import AnyHandler
from outbox.subscription import Subscription

if TYPE_CHECKING:
    from outbox.rocketmq.consumer import RocketMQConsumers

logger = logging.getLogger(__name__)

_CHECK_ENDS_SECONDS: Final = 5.0


class Role(StrEnum):
    """What a process of a worker does."""

    BROKER = "broker"
    """Sequences and retains, whenever it holds the leader's lease."""
    CONSUMER = "consumer"
    """Runs the project's subscribers."""
    CHECK = "check"
    """Runs check-back, pruning and the audit, each at its interval."""
    MONITOR = "monitor"
    """Serves the worker's health and metrics."""


def supervisor(roles: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> Supervisor:
    """What keeps the processes of a worker alive. Raises ConfigurationError where one of them could never work."""
    return Supervisor(child_specs(roles), environment=environment, drain_seconds=get_settings().drain_seconds)


def child_specs(roles: Sequence[str] = ()) -> list[ChildSpec]:
    """The processes for `roles`: by default all, but for consumers in a project without subscribers.

    One for the broker, which has check-back beside it, and as many consumers as OUTBOX['CONSUMER_PROCESSES'].
    """
    refuse_processes_in_tests()
    settings = get_settings()
    wanted = {Role(role) for role in roles} or set(Role) - {Role.MONITOR}
    if settings.is_rocketmq and not roles:
        # It is the broker.
        wanted.discard(Role.BROKER)
    processes: dict[str, list[Role]] = {}
    if Role.BROKER in wanted or Role.CHECK in wanted:
        together = [role for role in Role if role in wanted & {Role.BROKER, Role.CHECK}]
        processes[together[0]] = together
    if Role.CONSUMER in wanted and (roles or _has_subscribers()):
        required_subscriptions()
        numbers = range(1, settings.consumer_processes + 1)
        processes.update((f"consumer-{number}", [Role.CONSUMER]) for number in numbers)
    signs = probes.expect(processes)
    specs = [_child(name, its_roles, signs[name]) for name, its_roles in processes.items()]
    if settings.health_address is not None or Role.MONITOR in wanted:
        specs.append(_child("monitor", [Role.MONITOR], probes.of_monitor()))
    return specs


def _child(name: str, roles: Sequence[Role], environment: Mapping[str, str]) -> ChildSpec:
    in_database = Role.CONSUMER in roles and get_settings().has_database
    record = (lambda death: deaths.record(broker_database(), death)) if in_database else None
    argv = [sys.executable, "-m", "outbox.contrib.django.child", *roles]
    return ChildSpec(name=name, argv=argv, environment=environment, on_death=record)


def _has_subscribers() -> bool:
    if autodiscover():
        return True
    logger.info("no consumer process is started: there is no @subscriber in this project")
    return False


def run_broker_role(stop: threading.Event) -> None:
    """Sequence and retain, whenever this process holds the leader's lease, until `stop`."""
    run_broker(broker_database(), stop, settings=ProcessSettings(check=get_settings().check))


def consumer_runtime(
    *, groups: Sequence[str] = (), wrap: Callable[[AnyHandler], AnyHandler] | None = None
) -> ConsumerRuntime:
    """A runtime for the project's subscribers, or for what `wrap` makes of each handler.

    Raises ConfigurationError when there are none.
    """
    wanted = required_subscriptions(groups=groups)
    require_inboxes([subscription for subscription, _ in wanted])
    for shortage in pool_shortages(filter(None, (find_subscriber(subscription) for subscription, _ in wanted))):
        logger.warning("%s", shortage)
    settings = get_settings()
    return ConsumerRuntime(
        broker_database(settings),
        [(subscription, wrap(handler) if wrap else handler) for subscription, handler in wanted],
        invoker=InboxInvoker(lease_seconds=settings.lease_seconds),
        codecs=get_codecs(),
        lease_seconds=settings.lease_seconds,
    )


def rocketmq_consumers(*, groups: Sequence[str] = ()) -> RocketMQConsumers:
    """The project's subscribers on RocketMQ. Raises ConfigurationError for what it cannot serve."""
    from outbox.rocketmq.consumer import RocketMQConsumers

    settings = get_settings()
    wanted = required_subscriptions(groups=groups)
    require_engine(settings)
    require_inboxes([subscription for subscription, _ in wanted])
    return RocketMQConsumers(
        settings.broker,
        wanted,
        topics=[declared.topic for declared in settings.topics.values()],
        invoker=InboxInvoker(lease_seconds=settings.lease_seconds),
        codecs=get_codecs(),
        on_tick=partial(heartbeat.beat, ready=True),
    )


def required_subscriptions(*, groups: Sequence[str] = ()) -> list[tuple[Subscription, AnyHandler]]:
    """What the project subscribes to. Raises ConfigurationError when that is nothing."""
    autodiscover()
    wanted = subscriptions(groups=groups)
    if not wanted:
        raise ConfigurationError(
            f"there is no @subscriber in this project: workers look into {get_settings().subscriber_module!r} of "
            f"each of INSTALLED_APPS (OUTBOX['SUBSCRIBER_MODULE']). Without any, leave out the role consumer "
            f"(--outbox-roles broker,check)."
        )
    return wanted


def run_consumer_role(stop: threading.Event, *, groups: Sequence[str] = ()) -> None:
    """Consume for the project's subscribers until `stop`, then finish what is held."""
    if get_settings().is_rocketmq:
        rocketmq_consumers(groups=groups).run(stop)
    else:
        consumer_runtime(groups=groups).run(stop)


def run_monitor_role(stop: threading.Event) -> None:
    """Serve /live, /ready and /metrics until `stop`."""
    with probes.served():
        stop.wait()


def run_check_role(stop: threading.Event) -> None:
    """Run the periodic passes, each at its own interval, until `stop`."""
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


def run_broker_and_check_roles(stop: threading.Event) -> None:
    """Both in one process, which costs a thread instead of 40 MB. Raises what either of them raises."""
    failed: list[BaseException] = []

    def check() -> None:
        try:
            run_check_role(stop)
        except BaseException as error:
            failed.append(error)
            stop.set()

    # A daemon: the look-up of an application that hangs does not hold up the end of the process.
    checking = threading.Thread(target=check, name="outbox-check", daemon=True)
    checking.start()
    try:
        run_broker_role(stop)
    finally:
        stop.set()
        checking.join(_CHECK_ENDS_SECONDS)
    if failed:
        raise failed[0]


def run_all(stop: threading.Event) -> None:
    """Supervise all roles as processes of their own until `stop`."""
    log = process_log.told_to_children(level=logging.getLogger().getEffectiveLevel(), file=None)
    processes = supervisor(environment=log)
    processes.start()
    try:
        stop.wait()
        processes.stop()
    except BaseException:
        # A second Ctrl-C: whoever gives it does not want to wait.
        processes.kill()
        raise


def _by_itself(name: str, role: Callable[[], None]) -> None:
    with probes.alone(name):
        role()


# What `outbox_worker --role` offers: functions of the stop event and the groups named.
ROLES: Final[Mapping[str, Callable[[threading.Event, Sequence[str]], None]]] = {
    "all": lambda stop, groups: run_all(stop),
    Role.BROKER: lambda stop, groups: _by_itself("broker", lambda: run_broker_role(stop)),
    Role.CONSUMER: lambda stop, groups: _by_itself("consumer", lambda: run_consumer_role(stop, groups=groups)),
    Role.CHECK: lambda stop, groups: run_check_role(stop),
    Role.MONITOR: lambda stop, groups: run_monitor_role(stop),
}
