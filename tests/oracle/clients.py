"""Random transactions of a seed: rows and messages of the same names, with the mistakes of ordinary code around them.

    python -m tests.oracle.clients FIRST_SEED HISTORIES PROGRAMS

Each business row has a message of the same name, and its publish call stands right behind it, so the database runs both
in one transaction, whatever happens before and after. A program writes `try` before a row, then `published`,
`duplicate` or `refused`, and at its end `committed` (the block returned) or `raised`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import django
from django.db import Error, OperationalError, connection, connections, transaction

from tests.oracle.lines import write

KEYS = 5
UNIQUES = 2


class Mistake(Exception):
    """The application's own error."""


class Client:
    """One history: the programs of one seed, one after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.names = 0
        self.pairs: list[str] = []
        self.by_hand = False

    def run(self, count: int) -> None:
        """Run so many programs."""
        for _ in range(count):
            self.act(self.random.choices(PROGRAMS, WEIGHTS)[0])
            time.sleep(self.random.random() * float(os.environ.get("ORACLE_PAUSE", "0.1")))

    def act(self, program: Callable[[Client], None]) -> None:
        """Run a program. An error of a program is the application's own, as in a request."""
        self.pairs, self.by_hand = [], False
        try:
            program(self)
        except Exception as error:
            write(
                "raised",
                names=self.pairs,
                program=program.__name__,
                error=type(error).__name__,
                text=str(error)[:300],
            )
            if isinstance(error, OperationalError):
                time.sleep(1)  # as a user whose server is away
        else:
            write("committed", names=self.pairs, program=program.__name__, by_hand=self.by_hand)
        if connection.in_atomic_block:
            raise AssertionError(f"{program.__name__} has left a block open")
        for one in connections.all():
            one.close_if_unusable_or_obsolete()

    def name(self) -> str:
        """A name that no other row has."""
        self.names += 1
        return f"{self.seed}.{self.names}"

    # -- one row and its message ------------------------------------------------------------------------------

    def pair(self, *, topic: str = "orders", using: str = "default", unique: str | None = None, **options: Any) -> None:
        """A business row, and its message right behind it."""
        from outbox.contrib.django import publish
        from outbox.contrib.unique import Unique
        from tests.oracle.shop.models import Order

        name = self.name()
        self.pairs.append(name)
        body: dict[str, Any] = {"name": name}
        if topic == "steps":
            body["number"] = options.pop("number")
        if topic == "later":
            body["due"] = time.time() + options["delay"]
        once = [] if unique is None else [Unique(unique, within=86_400)]
        write("try", name=name, topic=topic, using=using, unique=unique, by_hand=self.by_hand, key=options.get("key"))
        Order.objects.using(using).create(name=name)
        try:
            receipt = publish(topic, body, *once, using=using, **options)
        except Exception as error:
            write("refused", name=name, error=type(error).__name__, text=str(error)[:300])
            raise
        if receipt.duplicate_of is None:
            write("published", name=name, id=str(receipt.message_id))
        else:
            write("duplicate", name=name, of=str(receipt.duplicate_of))

        self.linger()

    def linger(self) -> None:
        """Do something else in the open block: mostly nothing, and seldom for longer than an immunity or a lease."""
        chance = self.random.random()
        if chance < 0.02:
            time.sleep(self.random.uniform(3, 5))
        elif chance < 0.15:
            time.sleep(self.random.random() / 4)

    def some(self) -> None:
        """One to three pairs."""
        for _ in range(self.random.randint(1, 3)):
            self.pair(key=f"k{self.random.randrange(KEYS)}")

    # -- programs ------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        with transaction.atomic():
            self.some()

    def roll_back(self) -> None:
        with transaction.atomic():
            self.some()
            raise Mistake

    def swallowed(self) -> None:
        with transaction.atomic():
            self.some()
            transaction.set_rollback(True)
        self.pairs = []

    def savepoint(self) -> None:
        with transaction.atomic():
            self.pair()
            undone = len(self.pairs)
            try:
                with transaction.atomic():
                    self.some()
                    if self.random.random() < 0.7:
                        raise Mistake
            except Mistake:
                self.pairs = self.pairs[:undone]
            self.pair()

    def savepoint_by_hand(self) -> None:
        with transaction.atomic():
            self.pair()
            undone = len(self.pairs)
            point = transaction.savepoint()
            self.some()
            transaction.savepoint_rollback(point)
            self.pairs = self.pairs[:undone]

    def failed_statement(self) -> None:
        with transaction.atomic():
            self.pair()
            try:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1 / 0")
            except Error:
                pass
            self.pair()

    def caught_refusal(self) -> None:
        from outbox.contrib.django import publish

        with transaction.atomic():
            self.pair()
            try:
                publish("no.such.topic", {})
            except Exception as error:
                write("expected", error=type(error).__name__)
        # A failed publish call takes its block with it, whatever the caller catches.
        self.pairs = []

    def raw(self) -> None:
        word = self.random.choice(["COMMIT", "ROLLBACK", "ROLLBACK; BEGIN", "COMMIT AND CHAIN"])
        self.by_hand = True
        with transaction.atomic():
            self.some()
            with connection.cursor() as cursor:
                cursor.execute(word)
            if self.random.random() < 0.5:
                self.pair()

    def closed(self) -> None:
        self.by_hand = True
        with transaction.atomic():
            self.pair()
            connection.close()
            self.pair()

    def decorated(self) -> None:
        from outbox.contrib.django import transactional_message
        from tests.oracle.shop.models import Order

        name, fails = self.name(), self.random.random() < 0.3

        @transactional_message("orders", key=name, body={"name": name})
        def place() -> None:
            Order.objects.create(name=name)
            if fails:
                raise Mistake

        self.pairs.append(name)
        write("try", name=name, topic="orders", using="default", unique=None, by_hand=False, key=name)
        place()

    def decorated_async(self) -> None:
        from outbox.contrib.django import transactional_message
        from tests.oracle.shop.models import Order

        name, fails = self.name(), self.random.random() < 0.3

        @transactional_message("orders", key=name, body={"name": name})
        async def place() -> None:
            await Order.objects.acreate(name=name)
            if fails:
                raise Mistake

        self.pairs.append(name)
        write("try", name=name, topic="orders", using="default", unique=None, by_hand=False, key=name)
        asyncio.run(place())

    def many(self) -> None:
        from outbox.contrib.django import publish_many
        from tests.oracle.shop.models import Order

        names = [self.name() for _ in range(self.random.randint(2, 6))]
        self.pairs += names
        with transaction.atomic():
            for name in names:
                write("try", name=name, topic="orders", using="default", unique=None, by_hand=False, key=name)
                Order.objects.create(name=name)
            publish_many("orders", [{"name": name} for name in names])
            if self.random.random() < 0.2:
                raise Mistake

    def unique(self) -> None:
        # All clients use the same few keys at the same time.
        with transaction.atomic():
            self.pair(unique=f"u{int(time.time() / 2)}.{self.random.randrange(UNIQUES)}")
            if self.random.random() < 0.3:
                raise Mistake

    def double_click(self) -> None:
        """The same request twice at the same time, with one unique key."""
        key = f"d{self.name()}"

        def click(client: Client) -> None:
            with transaction.atomic():
                client.pair(unique=key)
                time.sleep(client.random.random() / 10)
                if client.random.random() < 0.3:
                    raise Mistake

        def serve(number: int) -> None:
            client = Client(self.seed)
            client.random.seed(f"{key} {number}")
            client.names = 1000 * self.names + number
            client.act(click)
            connections.close_all()

        threads = [threading.Thread(target=serve, args=[number]) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ordered(self) -> None:
        from tests.oracle.shop.models import Counter

        key = f"s{self.random.randrange(KEYS)}"
        with transaction.atomic():
            Counter.objects.get_or_create(key=key)
            counter = Counter.objects.select_for_update().get(key=key)
            for _ in range(self.random.randint(1, 2)):
                counter.number += 1
                counter.save()
                self.pair(topic="steps", key=key, number=counter.number)
            time.sleep(self.random.random() / 50)
            if self.random.random() < 0.2:
                raise Mistake

    def ordered_late(self) -> None:
        """The number comes after the publish call, so only the product's own lock keeps two transactions apart."""
        from tests.oracle.shop.models import Counter, Order

        key = f"t{self.random.randrange(2)}"
        with transaction.atomic():
            self.pair(topic="steps", key=key, number=0)
            time.sleep(self.random.random() / 10)
            Counter.objects.get_or_create(key=key)
            counter = Counter.objects.select_for_update().get(key=key)
            counter.number += 1
            counter.save()
            Order.objects.filter(name=self.pairs[-1]).update(number=counter.number)
            if self.random.random() < 0.2:
                raise Mistake

    def delayed(self) -> None:
        with transaction.atomic():
            self.pair(topic="later", delay=self.random.choice([0.5, 1.5, 4]))

    def second_database(self) -> None:
        with transaction.atomic(using="second"):
            self.pair(using="second")
            if self.random.random() < 0.3:
                raise Mistake

    def two_databases(self) -> None:
        with transaction.atomic():
            self.pair()
            with transaction.atomic(using="second"):
                self.pair(using="second")

    def poisoned(self) -> None:
        with transaction.atomic():
            self.pair(headers={"poison": "yes"})

    def book(self) -> None:
        from tests.oracle.shop.models import Booking
        from tests.oracle.shop.subscribers import booking

        name = self.name()
        write("book", name=name)
        with transaction.atomic():
            record = Booking.objects.create(name=name, refused=self.random.random() < 0.5)
            booking.start(record)
            if self.random.random() < 0.2:
                raise Mistake


PROGRAMS: list[Callable[[Client], None]] = [
    Client.commit, Client.roll_back, Client.swallowed, Client.savepoint, Client.savepoint_by_hand,
    Client.failed_statement, Client.caught_refusal, Client.raw, Client.closed, Client.decorated,
    Client.decorated_async, Client.many, Client.unique, Client.double_click, Client.ordered, Client.ordered_late,
    Client.delayed, Client.second_database, Client.two_databases, Client.poisoned, Client.book,
]  # fmt: skip
WEIGHTS = [14, 4, 3, 5, 3, 3, 3, 5, 3, 8, 3, 4, 4, 4, 10, 8, 4, 4, 4, 1, 3]


def main(first: int, histories: int, programs: int) -> None:
    """Run the histories of so many seeds, one after the other."""
    django.setup()
    for seed in range(first, first + histories):
        write("history", seed=seed)
        Client(seed).run(programs)
        write("history_over", seed=seed)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))
