"""The audit of operator actions: stores an entry before the action runs, and adds the outcome afterwards.

A command must work while the application's database is down: it then writes the entry to the log (decision 197).
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, InterfaceError, ProgrammingError, router
from django.utils import timezone

from outbox.contrib.django.actions.declaration import ActionPlan
from outbox.contrib.django.database import deadline
from outbox.contrib.django.models import OperatorAction
from outbox.errors import OutboxError, UsageError
from outbox.utils.safe_text import error_line, for_people, shown_text, storable

logger = logging.getLogger(__name__)


def recorded(action: str, plan: ActionPlan, *, who: str, why: str) -> OperatorAction:
    """Store the audit entry, run the action of a page, and store its outcome. Returns the entry.

    If the action raises OutboxError, the error is stored as the outcome. Every other error is stored and raised. If the
    entry cannot be stored, Django's DatabaseError is raised before the action runs.
    """
    return _run(_entry(action, plan, who=who, why=why), plan, _stored)[0]


def recorded_command(action: str, plan: ActionPlan, *, why: str) -> tuple[OperatorAction, OutboxError | None]:
    """Do the work of `recorded` for a command, and also return the OutboxError of a failed action.

    If the application's database cannot store the entry, the entry is logged as one line of JSON. If the audit table is
    missing, UsageError is raised before the action runs.
    """
    return _run(_entry(action, plan, who=operator(), why=why), plan, _stored_or_logged)


def operator() -> str:
    """The operating system's user and host, marked with `(command)`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The operating system has no entry for this user, as in many containers.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()} (command)"


def _entry(action: str, plan: ActionPlan, *, who: str, why: str) -> OperatorAction:
    return OperatorAction(
        at=timezone.now(), who=storable(who)[:255], why=storable(why), action=action,
        subject=plan.subject, effect=plan.effect, before=_plain(plan.before),
    )  # fmt: skip


def _run(
    entry: OperatorAction, plan: ActionPlan, store: Callable[[OperatorAction], None]
) -> tuple[OperatorAction, OutboxError | None]:
    store(entry)
    failure: OutboxError | None = None
    try:
        _end(entry, OperatorAction.Outcome.DONE, plan.run(entry.why))
    except OutboxError as error:
        failure = error
        _end(entry, OperatorAction.Outcome.FAILED, {"error": for_people(shown_text(error))})
    except Exception as error:
        _end(entry, OperatorAction.Outcome.FAILED, {"error": for_people(error_line(error))})
        store(entry)
        raise
    store(entry)
    return entry, failure


def _end(entry: OperatorAction, outcome: OperatorAction.Outcome, after: Mapping[str, Any]) -> None:
    entry.outcome, entry.after, entry.ended_at = outcome, _plain(after), timezone.now()


def _stored(entry: OperatorAction) -> None:
    with deadline.kept_by_application(router.db_for_write(OperatorAction)):
        entry.save()


def _stored_or_logged(entry: OperatorAction) -> None:
    try:
        _stored(entry)
    except (DatabaseError, InterfaceError) as error:
        said = str(error).strip().partition("\n")[0]
        # SQLite reports a missing table as an OperationalError.
        if entry.ended_at is None and (isinstance(error, ProgrammingError) or "no such table" in said):
            raise UsageError(
                f"{entry.action}: the audit of operator actions cannot be written, so nothing was done: {said}. If the "
                "table outbox_operator_action is missing, run `manage.py migrate`. If a right is missing, use the "
                "login of a worker."
            ) from error
        names = ("at", "who", "why", "action", "subject", "effect", "before", "after", "outcome", "ended_at")
        line = _plain({name: getattr(entry, name) for name in names})
        logger.warning(
            "the application's database did not store the audit entry (%s). The entry is: %s",
            for_people(said), json.dumps(line),
        )  # fmt: skip


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON, without the characters that PostgreSQL's JSON cannot store."""
    text = json.dumps(values, cls=DjangoJSONEncoder, ensure_ascii=False)
    plain: dict[str, Any] = json.loads(storable(text).replace("\\u0000", "\\ufffd"))
    return plain
