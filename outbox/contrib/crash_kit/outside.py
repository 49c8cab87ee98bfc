"""Calls to the world outside of the databases, which are recorded so that the record survives the kill."""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend

_MAIL = "django.core.mail"


class OutsideCalls:
    """A file with one line per call. Its lines stay if the process that wrote them is killed."""

    # The record of the running crash test, in which `RecordingMailBackend` stores the mails.
    current: ClassVar[OutsideCalls | None] = None

    def __init__(self, file: Path) -> None:
        self._file = file
        # Set in the process that runs the scenario: each recorded call is a step.
        self.reached: Callable[[str], None] = lambda name: None

    def clear(self) -> None:
        """Forget all calls."""
        self._file.write_bytes(b"")

    def record(self, name: str, value: Any) -> None:
        """Record a call. `value` is anything that JSON can store."""
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, (json.dumps([name, value]) + "\n").encode())
        finally:
            os.close(descriptor)
        shown = "send_mail" if name == _MAIL else repr(name)
        self.reached(f"after the call {shown}")

    def values(self, name: str) -> list[Any]:
        """Return the values that were recorded under this name, in order."""
        if not self._file.exists():
            return []
        lines = self._file.read_text().splitlines()
        return [value for recorded, value in map(json.loads, lines) if recorded == name]

    def record_mail(self, message: EmailMessage) -> None:
        """Record a mail."""
        alone = copy.copy(message)
        alone.connection = None
        self.record(_MAIL, base64.b64encode(pickle.dumps(alone)).decode())

    def mails(self) -> list[EmailMessage]:
        """Return the recorded mails."""
        return [pickle.loads(base64.b64decode(value)) for value in self.values(_MAIL)]


class RecordingMailBackend(BaseEmailBackend):
    """A mail backend that records each mail in the running crash test."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Record the mails and return their number."""
        if OutsideCalls.current is not None:
            for message in email_messages:
                OutsideCalls.current.record_mail(message)
        return len(email_messages)
