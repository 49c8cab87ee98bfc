"""The work of a worker's processes: broker, consumers, and periodic passes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from django.db import OperationalError, close_old_connections, connections

from outbox import hooks
from outbox.broker import process_log
from outbox.broker.database.notify import RECONNECT
from outbox.broker.leading import LeaderSettings
from outbox.broker.process import run_broker
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.engine.broker import get_engine
from outbox.contrib.django.operations.checks import warn_of_new_groups
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.inbox import pool_shortages, require_inboxes
from outbox.contrib.django.subscribers.middleware import with_middleware, with_options
from outbox.contrib.django.subscribers.registry import find_subscriber
from outbox.contrib.django.worker import probes
from outbox.contrib.django.worker.periodic import end_notes, keep_notes, passes
from outbox.contrib.django.worker.roles import Role, required_subscriptions, supervisor
from outbox.errors import BrokerUnavailable, OutboxError, ServiceUnavailable
from outbox.ports import AnyHandler, Consumers
from outbox.utils import heartbeat
from outbox.utils.periodic import PeriodicPass
from outbox.utils.safe_text import printable, shown_text

logger = logging.getLogger(__name__)

_CHECK_ENDS_SECONDS: Final = 5.0
_BEAT_SECONDS: Final = 1.0
# A preparation or a pass runs between two heartbeats, so it is announced as a step of up to this duration. Otherwise a
# probe would judge that the process hangs, and its successor, which begins the same step, would be restarted, too.
_STEP_SECONDS: Final = 3600.0


def run_broker_role(stop: threading.Event, *, stands_in: bool = False) -> None:
    """Sequence messages and run retention until `stop` is set.

    The process works only while it holds the leader's lease.

    With `stands_in` the process leads only while no consumer process leads.
    """
    run_broker(broker_database(), stop, settings=LeaderSettings(check=get_settings().check, stands_in=stands_in))


def consumer_runtime(
    *,
    groups: Sequence[str] = (),
    wrap: Callable[[AnyHandler], AnyHandler] | None = None,
    leads: bool = False,
    is_prepared: bool = False,
) -> Consumers:
    """Return the consumers of the project's subscribers. For each handler, `wrap` returns the function to call.

    With `leads` the consumer process is also the leader, which sequences messages (outbox.broker.leading). First it
    does what parts do before a process consumes (`hooks.add_preparation`), unless the caller has done it.

    Raises ConfigurationError if the project has no subscribers, if a middleware is wrong, or if the engine refuses a
    subscriber. Raises the errors of the preparations.
    """
    if not is_prepared:
        prepare_to_consume()
    wanted = required_subscriptions(groups=groups)
    require_inboxes([subscription for subscription, _ in wanted])
    for shortage in pool_shortages(filter(None, (find_subscriber(subscription) for subscription, _ in wanted))):
        logger.warning("%s", shortage)
    warn_of_new_groups([subscription.group for subscription, _ in wanted])
    wrapped = [(subscription, with_options(subscription, with_middleware(handler))) for subscription, handler in wanted]
    chosen = [(subscription, wrap(handler) if wrap else handler) for subscription, handler in wrapped]
    return get_engine().consumers(chosen, leads=leads)


def run_consumer_role(stop: threading.Event, *, groups: Sequence[str] = (), leads: bool = False) -> None:
    """Run the project's subscribers until `stop` is set, then finish the messages whose handlers run.

    With `leads` the process is also the leader, which sequences messages.
    """
    wait_until_prepared(stop)
    if not stop.is_set():
        consumers = consumer_runtime(groups=groups, leads=leads, is_prepared=True)
        # This thread needs no session any more: each handler thread has its own.
        connections.close_all()
        consumers.run(stop)


def prepare_to_consume() -> None:
    """Do what parts do before a process handles or forwards messages (`hooks.add_preparation`). Raises their errors."""
    for work in hooks.preparations.values():
        hooks.resolved(work)()


def wait_until_prepared(stop: threading.Event) -> None:
    """Do the same as `prepare_to_consume`, and wait for what does not answer.

    If a database or another service does not answer, the function tries again until `stop` is set. The process counts
    as alive meanwhile: neither an unreachable database nor a long preparation is a reason to restart the worker.
    """
    for what, work in hooks.preparations.items():
        failures = 0
        while not stop.is_set():
            heartbeat.busy(_STEP_SECONDS)
            try:
                hooks.resolved(work)()
                break
            except (BrokerUnavailable, OperationalError, ServiceUnavailable) as error:
                close_old_connections()
                failures += 1
                heartbeat.beat(ready=False)
                pause = RECONNECT.pause_seconds(failures)
                logger.warning(
                    "consuming cannot begin yet: %s failed, trying again in %.1f s: %s", what, pause, shown_text(error)
                )
                stop.wait(pause)


def _compare_topics() -> None:
    """Log each difference between the server's topics and the declared topics.

    The check runs at the start of the process, so the log shows a problem before the server refuses a message.
    """
    engine = get_engine()
    try:
        for problem in engine.server_problems():
            logger.error("%s", problem)
    except OutboxError as error:
        logger.warning(
            "the topics of %s cannot be compared with the declared topics: %s", engine.refusals.engine, error
        )


def run_check_role(stop: threading.Event, *, alone: bool = True) -> None:
    """Run the periodic passes, each at its own interval, until `stop` is set.

    With `alone` this loop writes the heartbeats, because no other loop of this process writes them.
    """
    _compare_topics()
    due = {item.name: 0.0 for item in passes()}
    try:
        while not stop.is_set():
            if alone:
                heartbeat.beat(ready=get_engine().is_asked())
            for item in passes():
                # A pass that a receiver of a signal needs appears when the receiver is connected.
                if time.monotonic() >= due.setdefault(item.name, 0.0):
                    began = time.monotonic()
                    if alone:
                        heartbeat.busy(_STEP_SECONDS)
                    has_more = run_pass(item).get("more")
                    due[item.name] = began if has_more else began + item.interval_seconds
            keep_notes()
            # Some passes use this thread's Django connections. Django renews the connections of a thread only at the
            # start of a request.
            close_old_connections()
            pause = max(0.05, min(due.values()) - time.monotonic())
            stop.wait(min(pause, _BEAT_SECONDS) if alone else pause)
    finally:
        end_notes()
        connections.close_all()


def run_pass(item: PeriodicPass) -> Mapping[str, Any]:
    """Run one pass and return its counts. If the pass fails, log the error. The pass runs again after its interval."""
    try:
        counts = item.run()
        logger.debug("%s: %s", item.name, counts)
        return counts
    except OutboxError as error:
        logger.warning(
            "the pass %s failed and runs again in %.0f s: %s", item.name, item.interval_seconds, shown_text(error)
        )
    except Exception as error:
        logger.error(
            "the pass %s failed and runs again in %.0f s", item.name, item.interval_seconds, exc_info=printable(error)
        )
    return {}


def run_broker_and_check_roles(stop: threading.Event, *, stands_in: bool = False) -> None:
    """Run the roles broker and check in one process, because a thread needs 40 MB less than a process.

    Raises the error of the role that fails.
    """
    failed: list[BaseException] = []

    def check() -> None:
        try:
            run_check_role(stop, alone=False)
        except BaseException as error:
            failed.append(error)
            stop.set()

    # A daemon thread, so that the process can end while a request to a ledger's database hangs.
    checking = threading.Thread(target=check, name="outbox-check", daemon=True)
    checking.start()
    try:
        run_broker_role(stop, stands_in=stands_in)
    finally:
        stop.set()
        checking.join(_CHECK_ENDS_SECONDS)
    if failed:
        raise failed[0]


def run_roles(
    roles: Sequence[str], stop: threading.Event, *, names: Sequence[str] = (), shared_lead: bool = False
) -> None:
    """Run one role of the core or of a part, or broker and check, in this process until `stop` is set.

    `names`: what the role works for, such as groups; empty for all. `shared_lead`: whether the consumer process of the
    worker leads, and its broker process is the standby.
    """
    if (part := hooks.roles.get(roles[0])) is not None:
        hooks.resolved(part.run)(stop, names)
    elif Role.CONSUMER in roles:
        run_consumer_role(stop, groups=names, leads=shared_lead)
    elif Role.MONITOR in roles:
        with probes.served():
            stop.wait()
    elif len(set(roles)) > 1:
        run_broker_and_check_roles(stop, stands_in=shared_lead)
    elif Role.BROKER in roles:
        run_broker_role(stop, stands_in=shared_lead)
    else:
        run_check_role(stop)


def run_all(stop: threading.Event) -> None:
    """Run all roles in their own processes, under a supervisor, until `stop` is set."""
    log = process_log.told_to_children(level=logging.getLogger().getEffectiveLevel(), file=None)
    processes = supervisor(environment=log)
    processes.start()
    try:
        stop.wait()
        processes.stop()
    except BaseException:
        # On a second Ctrl-C end the processes at once, because the operator does not want to wait.
        processes.kill()
        raise
