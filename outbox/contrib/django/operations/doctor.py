"""Finds problems in settings, databases, ledgers and retention, and names a remedy for each problem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
from django.core.checks import ERROR, WARNING
from django.db.utils import DatabaseError, OperationalError

from outbox.broker.log.topics import list_topics
from outbox.broker.operations.conditions import Condition, Severity, of_check, of_text
from outbox.broker.operations.diagnosis import diagnose
from outbox.broker.operations.rules import unusable
from outbox.broker.schema import grants
from outbox.broker.schema.grants import Role
from outbox.contrib.django.database.aliases import broker_database, broker_executor, on_broker
from outbox.contrib.django.database.transactions import is_missing_table
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection
from outbox.contrib.django.ledger.pruning import LEDGER_KEEP_SECONDS
from outbox.contrib.django.operations import known_conditions
from outbox.contrib.django.operations.checks import check_databases, check_settings
from outbox.contrib.django.operations.granting import check_rights
from outbox.contrib.django.operations.sessions import demands
from outbox.contrib.django.operations.watching import survey_project
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.contrib.django.subscribers.registry import autodiscover, subscriptions
from outbox.errors import ConfigurationError, OutboxError
from outbox.subscription import Subscription
from outbox.topic import Topic


def examine_rights(role: Role) -> list[Condition]:
    """Return whether the connected roles have the rights of `role` in each database, and nothing else."""
    try:
        return on_broker(lambda run: list(check_rights(run, role)))
    except (OutboxError, DatabaseError) as error:
        return [of_text(f"rights to {role}", Severity.CRITICAL, str(error).strip(), "Correct this, then try again.")]


def examine() -> list[Condition]:
    """Return all results of the examination, good and bad, and the broker's conditions that hold.

    If the broker does not answer, one of the results says so.
    """
    of_publisher = _as_publisher()
    found = list(_system_checks(reads_databases=not of_publisher))
    if of_publisher:
        return [*found, *of_publisher]
    try:
        settings = get_settings()
        found += _ledgers()
        # `check_databases` warns of the others.
        found += [
            of_text("sessions of workers", Severity.OK, str(one)) for one in demands(settings) if not one.is_too_much
        ]
        if (observer := known_conditions.observer()) is not None:
            return [*found, *observer.examine()]
        with broker_executor() as run:
            found += diagnose(run, broker_database(settings))
            found += _retention(settings, list_topics(run))
            # Last: in an open transaction, its limit for lock waits applies to all later statements.
            found += survey_project(run).verdict.conditions
    except OutboxError as error:
        # A missing right is a ConfigurationError too, but its cause is an error of the database.
        if isinstance(error, ConfigurationError) and not isinstance(error.__cause__, psycopg.Error):
            found.append(of_text("settings", Severity.CRITICAL, str(error), "Correct OUTBOX in the settings."))
        else:
            found += unusable(error).conditions
    return found


def _as_publisher() -> list[Condition]:
    """Return the results for a login that may only publish and so cannot read the broker's tables; none for others."""
    try:
        if known_conditions.observer() is not None:
            return []
        with broker_executor() as run:
            if grants.lesser_role(run) is not Role.PUBLISH:
                return []
            text = "was not examined: this login only publishes, and cannot read the broker's tables"
            remedy = "Run `outbox_doctor` with the login of a worker."
            return [*check_rights(run, Role.PUBLISH), of_text("broker", Severity.WARNING, text, remedy)]
    except (OutboxError, DatabaseError):
        # The examination reports the error itself.
        return []


def _system_checks(*, reads_databases: bool) -> Iterator[Condition]:
    """Return the messages of `manage.py check` about outbox, if `reads_databases` also of those that read databases."""
    aliases = {*ledger_aliases(), *_broker_alias()} if reads_databases else set[str]()
    found = [*check_settings(), *check_databases(databases=aliases)]
    messages = [message for message in found if not message.is_silenced()]
    for message in messages:
        if message.level >= ERROR:
            severity = Severity.CRITICAL
        else:  # What only informs is no fault.
            severity = Severity.WARNING if message.level >= WARNING else Severity.OK
        remedy = message.hint or "Do what the text of this check says."
        yield of_text(f"check {message.id}", severity, message.msg, remedy)
    if not messages:
        yield of_text("settings and aliases", Severity.OK, f"checked for {', '.join(sorted(aliases)) or 'no database'}")


def _broker_alias() -> list[str]:
    try:
        return [get_settings().broker]
    except OutboxError:
        return []


def _ledgers() -> Iterator[Condition]:
    """Check that every alias has a ledger of its own, with an identity."""
    owners: dict[object, str] = {}
    for alias in ledger_aliases():
        try:
            with closing(open_connection(alias)) as connection:
                identity = ledger.identity(connection)
        except DatabaseError as error:
            yield of_text(f"ledger of {alias!r}", Severity.WARNING, str(error).strip(), _unreadable(alias, error))
            continue
        if identity is None:
            remedy = f"Run `manage.py migrate --database={alias}`, which gives the ledger an identity."
            yield of_text(f"ledger of {alias!r}", Severity.CRITICAL, "has no identity", remedy)
        elif identity.ledger_id in owners:
            # Workers of a copy would answer checks of the original.
            remedy = (
                "If one database is a copy of the other, make the copy harmless before its workers start "
                "(docs/operations/restore.md#a-copy-for-staging)."
            )
            text = (
                f"has the same identity as the ledger of {owners[identity.ledger_id]!r} (the same database, or a copy)"
            )
            yield of_text(f"ledger of {alias!r}", Severity.WARNING, text, remedy)
        else:
            owners[identity.ledger_id] = alias
            yield of_text(f"ledger of {alias!r}", Severity.OK, f"is {identity.ledger_id}")


def _unreadable(alias: str, error: DatabaseError) -> str:
    """Return the next step for a ledger that was not read."""
    if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
        return "`manage.py outbox_doctor --for work` (or watch) names the missing rights."
    # SQLite reports a missing table as an OperationalError, too.
    if isinstance(error, OperationalError) and not is_missing_table(error):
        return f"Check that the server of {alias!r} runs, and the address and the login of this alias in DATABASES."
    return (
        f"Check that {alias!r} leads to the database of the application. If it does, run `manage.py migrate "
        f"--database={alias}`, or remove the alias from DATABASES."
    )


def _retention(settings: OutboxSettings, topics: list[Topic]) -> Iterator[Condition]:
    """Check that topics and inbox keep their rows for long enough.

    The broker must keep a decision for longer than the ledger keeps the row of the same transaction, because pruning
    removes the row only if the broker has the decision. The inbox must keep a row for as long as the message may be
    delivered again.
    """
    short = [topic.name for topic in topics if topic.retention_seconds < 2 * LEDGER_KEEP_SECONDS]
    remedy = (
        f"Set the retention of these topics to at least {2 * LEDGER_KEEP_SECONDS:.0f} s: pruning removes a ledger row "
        "only if the broker still has the decision."
    )
    text = (
        f"these topics keep messages for too short a time: {', '.join(short)}"
        if short
        else "is longer than the retention of ledger rows"
    )
    yield of_check("retention of topics", not short, text, remedy, Severity.WARNING)
    yield _inbox_retention(settings, topics)
    horizon = settings.check.max_age_seconds
    early = [topic.name for topic in topics if topic.retention_seconds < horizon]
    remedy = f"Set the retention of these topics to at least {horizon:.0f} s, or reduce MAX_CHECK_AGE_SECONDS."
    text = (
        f"retention removes decisions of these topics before check-back ends: {', '.join(early)}"
        if early
        else "the broker keeps decisions until check-back has ended"
    )
    yield of_check("check horizon", not early, text, remedy, Severity.WARNING)


def _inbox_retention(settings: OutboxSettings, topics: list[Topic]) -> Condition:
    """Check the inbox's retention: a restored broker may deliver messages again that are not in the log any more.

    Pruning keeps the inbox rows of messages that are in the log.
    """
    kept, longest = settings.inbox_retention_seconds, max((topic.retention_seconds for topic in topics), default=0)
    autodiscover()
    needed = longest + max((_retry_seconds(one) for one, _ in subscriptions()), default=0.0)
    is_enough = kept >= needed
    text = (
        f"is {kept:.0f} s; a delivery with all attempts takes at most {needed:.0f} s, and pruning keeps the rows of "
        "messages in the log"
        if is_enough
        else f"is {kept:.0f} s, but the broker may deliver a message for {needed:.0f} s"
    )
    remedy = (
        f"Set OUTBOX['INBOX_RETENTION_SECONDS'] to at least {needed:.0f}: otherwise a message may take effect twice if "
        "a restored broker delivers it again, or if it is sent again with its id."
    )
    return of_check("retention of the inbox", is_enough, text, remedy, Severity.WARNING)


def _retry_seconds(subscription: Subscription) -> float:
    """Return the sum of the waits between a subscription's attempts; without a limit, between the first sixteen."""
    attempts = subscription.retry.max_attempts or 16
    return sum(subscription.retry.delay_seconds(attempt) for attempt in range(1, attempts))
