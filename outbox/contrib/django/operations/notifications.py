"""Notifications of OUTBOX['NOTIFY']: stored with the change that they report, and sent until the receiver confirms.

A notification is sent at least once. A process takes a notification by moving its `due_at`, sends it, and deletes it.
If the process dies in between, another process sends the notification again, with the same id. The sending does not use
the broker, because the broker may be what fails.

See decision 208.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.mail import EmailMessage
from django.db import connections, router
from django.utils import timezone

from outbox.broker.operations.conditions import Condition, Severity, of_text
from outbox.contrib.django.models import Notification
from outbox.contrib.django.settings.conf import (
    MAIL,
    SLACK_FORM,
    DeclaredNotify,
    NotifyWebhook,
    get_settings,
)
from outbox.contrib.sinks import signatures
from outbox.errors import ConfigurationError, ServiceUnavailable
from outbox.utils.backoff import Backoff
from outbox.utils.safe_text import error_line, printable, shown_text

logger = logging.getLogger(__name__)

# No other process sends a notification that a process has taken less than this time ago.
TAKEN_SECONDS: Final = 120.0
BACKOFF: Final = Backoff(first_seconds=30, longest_seconds=3600)
# After this time, a notification that no receiver confirms is deleted.
GIVE_UP_SECONDS: Final = 3 * 24 * 3600.0
_MOST_AT_ONCE: Final = 100
_LONGEST_ERROR: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The content of a notification. `event` is "raised", "cleared" or "test"."""

    event: str
    name: str
    severity: str
    meaning: str
    next_step: str
    facts: Sequence[str] = ()

    @property
    def subject(self) -> str:
        """One line."""
        if self.event == "test":
            return "outbox: a test notification"
        return f"outbox: {self.name} {'is over' if self.event == 'cleared' else f'({self.severity})'}"


def store(reports: Iterable[Report], now: datetime) -> None:
    """Store one notification per report and channel, in the open transaction of the change."""
    declared = get_settings().notify
    if declared is None:
        return
    Notification.objects.using(router.db_for_write(Notification)).bulk_create(
        Notification(channel=channel, content=asdict(report), created_at=now, due_at=now)
        for report in reports
        for channel in declared.channels
    )


# -- sending ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_thread: threading.Thread | None = None


def deliver_soon() -> None:
    """Send the due notifications on a thread of their own, because a receiver may hang and check-back must go on."""
    global _thread
    if get_settings().notify is None:
        return
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_deliver, name="outbox-notifications", daemon=True)
            _thread.start()


def _deliver() -> None:
    try:
        deliver_once()
    except Exception as error:
        logger.error("notifications could not be sent; the next pass tries again", exc_info=printable(error))
    finally:
        connections.close_all()


def deliver_once(now: datetime | None = None) -> dict[str, int]:
    """Send the due notifications. Return how many were sent and how many failed.

    After a failure, the other notifications of that channel wait for the next pass.
    """
    now = now or timezone.now()
    declared = get_settings().notify
    rows = Notification.objects.using(router.db_for_write(Notification))
    counts, failing = {"sent": 0, "failed": 0}, set()
    for one in rows.filter(due_at__lte=now).order_by("due_at", "created_at")[:_MOST_AT_ONCE]:
        if one.channel in failing:
            continue
        until = now + timedelta(seconds=TAKEN_SECONDS)
        if not rows.filter(pk=one.pk, due_at=one.due_at).update(due_at=until, attempts=one.attempts + 1):
            continue
        if declared is None or one.channel not in declared.channels:
            logger.warning("the notification %s is deleted: NOTIFY has no %r any more", one.id, one.channel)
            rows.filter(pk=one.pk).delete()
            continue
        try:
            _send(declared, one.channel, one.id, Report(**one.content))
        except Exception as error:
            failing.add(one.channel)
            counts["failed"] += 1
            _put_off(one, error, now)
        else:
            counts["sent"] += 1
            rows.filter(pk=one.pk).delete()
    return counts


def _put_off(one: Notification, error: Exception, now: datetime) -> None:
    rows = Notification.objects.using(router.db_for_write(Notification)).filter(pk=one.pk)
    text = error_line(error)[:_LONGEST_ERROR]
    if now - one.created_at >= timedelta(seconds=GIVE_UP_SECONDS):
        logger.error("the notification %s is given up after %d attempts: %s", one.id, one.attempts + 1, text)
        rows.delete()
        return
    pause = BACKOFF.pause_seconds(one.attempts + 1)
    logger.error(
        "the notification %s by %s failed and is sent again in %.0f s: %s. It says: %s",
        *(one.id, one.channel, pause, text, Report(**one.content).subject),
    )
    rows.update(due_at=now + timedelta(seconds=pause), error=text)


def _send(declared: DeclaredNotify, channel: str, notification_id: uuid.UUID, report: Report) -> None:
    if channel == MAIL:
        _send_mail(declared, notification_id, report)
    elif declared.webhook is not None:
        _post(declared, declared.webhook, notification_id, report)


def _send_mail(declared: DeclaredNotify, notification_id: uuid.UUID, report: Report) -> None:
    """Send a mail by Django's mail settings. Their timeout limits the wait for the mail server."""
    # If the mail is sent twice, both have the same id.
    headers = {"Message-ID": f"<{notification_id}@outbox>"}
    body = "\n".join(lines(report, declared.page_url))
    EmailMessage(report.subject, body, to=list(declared.mail), headers=headers).send()


def _post(declared: DeclaredNotify, webhook: NotifyWebhook, notification_id: uuid.UUID, report: Report) -> None:
    """Send a signed POST. Its header `webhook-id` is the id of the notification."""
    from outbox.contrib.sinks.sink import Outgoing
    from outbox.contrib.sinks.webhook import WebhookSink

    if webhook.form == SLACK_FORM:
        body: Mapping[str, Any] = {"text": "\n".join([f"*{report.subject}*", *lines(report, declared.page_url)])}
    else:
        service = get_settings().producer_group
        body = {**asdict(report), "subject": report.subject, "service": service, "page_url": declared.page_url}
    outgoing = Outgoing(
        message_id=notification_id,
        topic="notifications",
        key="",
        content_type="application/json",
        body=json.dumps(body).encode(),
        headers={},
    )
    # Slack does not check signatures, because its URL is the secret.
    keys = webhook.secrets or [signatures.PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()]
    with closing(WebhookSink(url=webhook.url, secrets=keys, **webhook.options)) as sink:
        [error] = sink.send([outgoing])
    if error is not None:
        raise error


def lines(report: Report, page_url: str) -> list[str]:
    """Return the text of a notification."""
    service = get_settings().producer_group
    found = [report.meaning, *(f"- {fact}" for fact in report.facts)]
    if report.event != "cleared":
        found.append(f"What to do: {report.next_step}")
    return [*found, *([f"Service: {service}"] if service else []), *([page_url] if page_url else [])]


def send_test() -> Iterator[Condition]:
    """Send a test notification by each channel now. Return a result per channel. Raises ConfigurationError."""
    declared = get_settings().notify
    if declared is None:
        raise ConfigurationError(
            "OUTBOX['NOTIFY'] is not set, so outbox sends no notifications: see docs/hooks.md for its options."
        )
    report = Report(
        event="test",
        name="test",
        severity="ok",
        meaning="An operator has sent this notification to test OUTBOX['NOTIFY'].",
        next_step="Nothing.",
    )
    for channel in declared.channels:
        try:
            _send(declared, channel, uuid.uuid4(), report)
        except Exception as error:
            step = f"Correct OUTBOX['NOTIFY'][{channel!r}], or the receiver."
            said = shown_text(error) if isinstance(error, ServiceUnavailable) else error_line(error)
            yield of_text(f"notification by {channel}", Severity.CRITICAL, said, step)
        else:
            yield of_text(f"notification by {channel}", Severity.OK, "the receiver has taken a test notification")
