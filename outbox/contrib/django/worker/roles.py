"""The processes of a worker: their roles, and their files in OUTBOX['HEALTH_DIRECTORY']."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from outbox import hooks
from outbox.broker import deaths
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.database.in_tests import refuse_processes_in_tests
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover, subscriptions
from outbox.errors import ConfigurationError
from outbox.ports import AnyHandler
from outbox.subscription import Subscription
from outbox.utils import heartbeat
from outbox.utils.process_identity import process_identity

logger = logging.getLogger(__name__)

# With the option --shared-lead, the worker's consumer process is the leader, and the broker process of the worker is
# the standby.
SHARED_LEAD: Final = "--shared-lead"

SUFFIX: Final = ".heartbeat"
# The file with the identity of the worker's first process. If this process ends, its other processes end too.
FIRST_PROCESS: Final = "worker.process"


class Role(StrEnum):
    """The role of a process in a worker. Parts add further roles (`hooks.add_role`)."""

    BROKER = "broker"
    """The process sequences messages and runs retention, while it holds the leader's lease."""
    CONSUMER = "consumer"
    """Runs the project's subscribers."""
    CHECK = "check"
    """Runs check-back, pruning and the audit, each at its interval."""
    MONITOR = "monitor"
    """Answers the requests at HEALTH_ADDRESS."""


def known_roles() -> list[str]:
    return [*Role, *hooks.roles]


def refuse_unknown(roles: Sequence[str]) -> None:
    """Raise ConfigurationError if a role is unknown."""
    if unknown := [role for role in roles if role not in known_roles()]:
        raise ConfigurationError(f"there is no role {', '.join(unknown)}; choose from {', '.join(known_roles())}.")


def supervisor(roles: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> Supervisor:
    """Return the supervisor of a worker's processes. Raises ConfigurationError if a process could never work."""
    specs = child_specs(roles)
    consume = any(spec.name.startswith(Role.CONSUMER) for spec in specs)
    groups: dict[str, list[str]] = {}
    for subscription, _ in subscriptions() if consume else ():
        groups.setdefault(subscription.group, []).append(subscription.topic)
    return Supervisor(
        specs,
        environment=environment,
        drain_seconds=get_settings().drain_seconds,
        consumes=[f"{', '.join(topics)} for group {group}" for group, topics in sorted(groups.items())],
    )


def child_specs(roles: Sequence[str] = ()) -> list[ChildSpec]:
    """Return the processes that run `roles`.

    By default a worker runs all roles, but no consumers in a project without subscribers, and of the roles of parts
    those that are needed.

    One process runs the roles broker and check. OUTBOX['CONSUMER_PROCESSES'] processes run consumers. A worker's only
    consumer process also leads the broker, and its broker process is the standby (docs/decisions/163).
    """
    refuse_processes_in_tests()
    refuse_unknown(roles)
    settings = get_settings()
    needed = [name for name, one in hooks.roles.items() if one.is_needed and hooks.resolved(one.is_needed)()]
    wanted = set(roles) or {*Role, *needed} - {Role.MONITOR}
    engine = engine_of(settings)
    if not roles and not engine.has_broker_process:
        wanted.discard(Role.BROKER)
    processes: dict[str, list[str]] = {}
    if Role.BROKER in wanted or Role.CHECK in wanted:
        together = [role for role in Role if role in wanted & {Role.BROKER, Role.CHECK}]
        processes[together[0]] = [*together]
    if Role.CONSUMER in wanted and (roles or _has_subscribers()):
        required_subscriptions()
        numbers = range(1, settings.consumer_processes + 1)
        processes.update((f"consumer-{number}", [Role.CONSUMER]) for number in numbers)
    processes.update((name, [name]) for name in hooks.roles if name in wanted)
    left = prepare_health_files(processes)
    options = [SHARED_LEAD] if _shares_lead(processes) else []
    specs = [_child(name, [*its_roles, *options], left[name]) for name, its_roles in processes.items()]
    if settings.health_address is not None or Role.MONITOR in wanted:
        specs.append(_child("monitor", [Role.MONITOR], monitor_environment()))
    return specs


def _shares_lead(processes: Mapping[str, Sequence[str]]) -> bool:
    consumers = [name for name, roles in processes.items() if Role.CONSUMER in roles]
    return len(consumers) == 1 and Role.BROKER in processes


def _child(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ChildSpec:
    in_database = Role.CONSUMER in arguments and get_settings().has_database
    record = (lambda death: deaths.record(broker_database(), death)) if in_database else None
    argv = [sys.executable, "-m", "outbox.contrib.django.worker.child", *arguments]
    return ChildSpec(name=name, argv=argv, environment=environment, on_death=record)


def _has_subscribers() -> bool:
    if autodiscover():
        return True
    logger.info("no consumer process is started: there is no @subscriber in this project")
    return False


def required_subscriptions(*, groups: Sequence[str] = ()) -> list[tuple[Subscription, AnyHandler]]:
    """Return the project's subscriptions and handlers. Raises ConfigurationError if no subscription exists."""
    autodiscover()
    wanted = subscriptions(groups=groups)
    if not wanted:
        raise ConfigurationError(
            "there is no @subscriber in this project: workers look for subscribers in the module 'subscribers' of each "
            "of INSTALLED_APPS. If the project needs no subscribers, leave out the role consumer (--outbox-roles "
            "broker,check)."
        )
    return wanted


def prepare_health_files(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Prepare the directory for processes with these names, and return the environment variables of each process.

    Files of an earlier worker are removed. Each process gets a first heartbeat, so that the probe notices a process
    whose loop never runs. Without OUTBOX['HEALTH_DIRECTORY'] the processes get no environment variables.
    """
    folder = get_settings().health_directory
    if folder is None:
        return {name: {} for name in names}
    shared = _shared_folders(folder)
    for path in map(Path, (folder, *shared.values())):
        path.mkdir(parents=True, exist_ok=True)
    for left in (*Path(folder).glob(f"*{SUFFIX}"), *(one for path in shared.values() for one in Path(path).iterdir())):
        left.unlink(missing_ok=True)
    (Path(folder) / FIRST_PROCESS).write_text(process_identity())
    variables = {}
    for name in names:
        path = Path(folder) / f"{name}{SUFFIX}"
        path.touch()
        variables[name] = {heartbeat.VARIABLE: str(path), **shared}
    return variables


def monitor_environment() -> dict[str, str]:
    """Return the environment variables of the process that answers requests about the other processes."""
    folder = get_settings().health_directory
    return _shared_folders(folder) if folder else {}


def _shared_folders(folder: str) -> dict[str, str]:
    return {variable: str(Path(folder) / name) for variable, name in hooks.shared_folders.items()}
