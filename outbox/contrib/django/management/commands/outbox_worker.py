"""`manage.py outbox_worker`: runs the broker, the consumers, check-back and the roles of parts, without Celery."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from outbox import hooks
from outbox.broker.process_log import write_log
from outbox.broker.supervisor import HUNG_EXIT_CODE, end_within, stop_on_signals
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations import signals
from outbox.contrib.django.worker import probes
from outbox.contrib.django.worker.drain import drain_after_others, run_until_drained
from outbox.contrib.django.worker.roles import Role, known_roles
from outbox.contrib.django.worker.workers import run_all, run_roles
from outbox.errors import HandlersHung

_HUNG_SECONDS: Final = 5.0


class Command(OutboxCommand):
    help = "Run the broker, the consumers and check-back until SIGTERM, then drain. Or run one role."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--role",
            choices=sorted(["all", *known_roles()]),
            default="all",
            help="; ".join(
                [
                    "all (default): start and supervise one process for the roles broker and check, and the consumer "
                    "processes",
                    *(f"{name}: {role.help}" for name, role in hooks.roles.items()),
                ]
            ),
        )
        for option, roles in _limited_roles().items():
            parser.add_argument(
                f"--{option}",
                action="append",
                default=[],
                help=f"only with --role {' or '.join(roles)}: work only for this {option} (repeatable)",
            )
        parser.add_argument(
            "--drain",
            action="store_true",
            help="do all work that is due now in this process, then end",
        )
        parser.add_argument(
            "--until-drained",
            action="store_true",
            help="end as soon as no message of this project waits on the broker; used before a move to another broker",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        _refuse(options)
        if options["drain"]:
            self._drain(options)
            return
        role = options["role"]
        write_log(role if role in hooks.roles else "worker")
        stop = threading.Event()
        before = stop_on_signals(stop)
        try:
            if options["until_drained"]:
                self._until_drained(stop)
            elif role == "all":
                # The supervisor does no work of its own: each of its processes sends its signals.
                run_all(stop)
            else:
                has_probe = role not in (Role.CHECK, Role.MONITOR)
                with signals.working([role]), probes.alone(role) if has_probe else nullcontext():
                    run_roles([role], stop, names=_names(options))
        except HandlersHung:
            end_within(_HUNG_SECONDS, HUNG_EXIT_CODE)
            raise
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _drain(self, options: Mapping[str, Any]) -> None:
        role = hooks.roles.get(options["role"])
        if role is not None and role.drain is not None:
            self.say(hooks.resolved(role.drain)(_names(options)))
        else:
            counts = drain_after_others()
            self.say(f"messages queued: {counts.queued}, deliveries handled: {counts.handled}")
            if counts.elsewhere:
                self.say(f"{counts.elsewhere} messages wait in queues of other running consumer processes")

    def _until_drained(self, stop: threading.Event) -> None:
        left = run_until_drained(stop)
        if left.waiting:
            raise CommandError(f"stopped before the broker was drained: {'; '.join(left.waiting)}.")
        if staying := "; ".join(left.staying):
            raise CommandError(f"no message waits on the broker any more, but an operator must decide: {staying}.")
        self.say("nothing is left on the broker")


def _limited_roles() -> Mapping[str, Sequence[str]]:
    """Return the options that limit a role to some names, each with the roles that have it."""
    found = {"group": ["consumer"]}
    for name, role in hooks.roles.items():
        if role.option is not None:
            found.setdefault(role.option, []).append(name)
    return found


def _names(options: Mapping[str, Any]) -> Sequence[str]:
    """Return the names that the role is limited to. None: all."""
    of_role = (option for option, roles in _limited_roles().items() if options["role"] in roles)
    return next((options[option] for option in of_role), [])


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise CommandError if the command got options that cannot be used together."""
    role, drains = options["role"], options["drain"]
    for option, roles in _limited_roles().items():
        if options[option] and (role not in roles or options["until_drained"]):
            raise CommandError(f"--{option} needs --role {' or '.join(roles)}: no other role can be limited so.")
    drains_itself = role in hooks.roles and hooks.roles[role].drain is not None
    if (options["until_drained"] and role != "all") or (drains and role != "all" and not drains_itself):
        option = "--drain" if drains else "--until-drained"
        raise CommandError(f"{option} does the work of all roles: leave --role out.")
    if drains and options["until_drained"]:
        raise CommandError(
            "--drain does the work that is due now, and --until-drained also waits for later work: pass only one of "
            "the two options."
        )
