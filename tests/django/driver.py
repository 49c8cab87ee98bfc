"""A producer that is killed: forks a process per line of standard input, `prefix mode faults`, and reports its end.

Each process runs a fixed piece of work: transactions that commit, that roll back, and that roll back to a
savepoint, one order and one message each. The parent has published before it forks, so the processes also inherit
a broker with open connections and a running flusher.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable

import django

ROUNDS = 4
# A body with this text has more bytes than LARGE_BODIES of the tests allows in the broker.
LARGE = "x" * 2_000


class Undone(Exception):
    """Rolls a transaction back."""


def work(prefix: str, mode: str) -> None:
    """Commit `{prefix}-c…`, roll back `{prefix}-r…` and, to a savepoint, `{prefix}-s…`."""
    from django.db import transaction

    place = _MODES[mode]
    for number in range(ROUNDS):
        place(f"{prefix}-c{number}", False)
        with contextlib.suppress(Undone):
            place(f"{prefix}-r{number}", True)
        with transaction.atomic():
            place(f"{prefix}-d{number}", False)
            with contextlib.suppress(Undone):
                place(f"{prefix}-s{number}", True)


def place_plainly(number: str, fail: bool) -> None:
    """publish() inside atomic()."""
    from django.db import transaction

    from outbox.contrib.django import publish
    from tests.django.shop.models import Order

    with transaction.atomic():
        publish("orders", {"number": number}, key=number)
        Order.objects.create(number=number)
        if fail:
            raise Undone


def place_decorated(number: str, fail: bool) -> None:
    """@transactional_message."""
    from outbox.contrib.django import transactional_message
    from tests.django.shop.models import Order

    @transactional_message("orders", key=lambda number: number, body={})
    def place(number: str) -> None:
        Order.objects.create(number=number)
        if fail:
            raise Undone

    place(number)


def place_uniquely(number: str, fail: bool) -> None:
    """publish(…, Unique(…)) inside atomic()."""
    from django.db import transaction

    from outbox.contrib.django import publish
    from outbox.contrib.unique import Unique
    from tests.django.shop.models import Order

    with transaction.atomic():
        receipt = publish("orders", {"number": number}, Unique(number, within=3600), key=number)
        assert receipt.duplicate_of is None
        Order.objects.create(number=number)
        if fail:
            raise Undone


def place_naively(number: str, fail: bool) -> None:
    """The control: send after the commit. It must lose messages when killed in between."""
    from django.db import transaction

    from outbox.contrib.django import get_broker, message
    from outbox.utils.faults import point
    from tests.django.shop.models import Order

    def send() -> None:
        point("producer.after_local_commit")
        get_broker().send([message("orders", {}, key=number)])

    with transaction.atomic():
        Order.objects.create(number=number)
        transaction.on_commit(send)
        if fail:
            raise Undone


def place_largely(number: str, fail: bool) -> None:
    """publish() of a body that is stored outside of the broker."""
    from django.db import transaction

    from outbox.contrib.django import publish
    from tests.django.shop.models import Order

    with transaction.atomic():
        publish("orders", {"number": number, "more": LARGE}, key=number)
        Order.objects.create(number=number)
        if fail:
            raise Undone


def place_torn(number: str, fail: bool) -> None:
    """Like `place_largely`; the process is killed when half of the fourth body is written."""
    from django.core.files.base import ContentFile
    from django.core.files.storage import FileSystemStorage

    whole, saved = FileSystemStorage._save, 0  # type: ignore[attr-defined]

    def save(storage: FileSystemStorage, name: str, content: ContentFile[bytes]) -> str:
        nonlocal saved
        saved += 1
        if saved < 4:
            return str(whole(storage, name, content))
        whole(storage, name, ContentFile(content.read(content.size // 2)))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    FileSystemStorage._save = save  # type: ignore[attr-defined]
    _MODES["torn"] = place_largely
    place_largely(number, fail)


_MODES: dict[str, Callable[[str, bool], None]] = {
    "plain": place_plainly,
    "decorated": place_decorated,
    "unique": place_uniquely,
    "large": place_largely,
    "torn": place_torn,
    "naive": place_naively,
}


def main() -> None:
    """Serve lines until end of file; answer each with how the process ended."""
    django.setup()
    from django.db import connections

    from outbox.contrib.django.engine.broker import flush
    from outbox.utils import faults

    place_plainly(f"parent-{os.getpid()}", False)
    for line in sys.stdin:
        prefix, mode, specification = line.split()
        connections.close_all()
        pid = os.fork()
        if pid == 0:
            if specification.startswith("random:"):
                _kill_some_time(float(specification.partition(":")[2]))
            else:
                faults.arm("" if specification == "-" else specification)
            work(prefix, mode)
            flush(within_seconds=10)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _kill_some_time(within_seconds: float) -> None:
    pause = random.uniform(0, within_seconds)
    threading.Timer(pause, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    main()
