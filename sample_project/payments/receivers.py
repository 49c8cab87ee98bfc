"""The payments' receivers of signals."""

from __future__ import annotations

from typing import Any

from django.core.mail import send_mail
from django.dispatch import receiver

from outbox.contrib.django.signals import message_dead_lettered


@receiver(message_dead_lettered)
def tell_accounting(group: str, key: str, error: str, **arguments: Any) -> None:
    """Mail to the accounting department that a paid order is not charged.

    The signal is sent at most once, so a process that dies loses this mail. The dead letter itself stays until an
    operator replays or discards it.
    """
    if group == "payments":
        send_mail(f"Order {key} is paid, but not charged", error, None, ["accounting@example.org"])
