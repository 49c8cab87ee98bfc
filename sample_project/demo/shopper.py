"""Customers: they shop over HTTP and know only what the pages show."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Final
from urllib.parse import urlencode

GOODS: Final = ("writing-paper", "envelopes", "fountain-pen", "ink", "sealing-wax", "letter-opener", "notebook")
# Every customer of this interval pays with a card that is declined after the message was stored.
DECLINE_EVERY: Final = 10
_ORDER: Final = re.compile(r"/orders/(\d+)/")


class NoAnswer(Exception):
    """The connection ended before an answer: the outcome is unknown to the customer."""


class UnexpectedAnswer(Exception):
    """The site gave an answer that no customer should see."""


class Shopper:
    """One customer with a connection, cookies and cards."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self._cookies = SimpleCookie()

    def fill_cart(self, number: int) -> None:
        """View the shop and put two articles into the cart."""
        self.request("GET", "/")
        for article in (GOODS[number % len(GOODS)], GOODS[(number // 3) % len(GOODS)]):
            self.request("POST", "/cart/add/", {"product": article})

    def order(self) -> int:
        """Check out; returns the number of the order."""
        found = _ORDER.fullmatch(self.request("POST", "/orders/new/", {})[1])
        if found is None:
            raise UnexpectedAnswer("checking out did not lead to an order")
        return int(found[1])

    def pay(self, order_id: int, card: str) -> bool:
        """Pay, and read from the order's page whether it is paid."""
        self.request("POST", f"/orders/{order_id}/pay/", {"card": card})
        return 'data-paid="true"' in self.request("GET", f"/orders/{order_id}/")[0]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def request(self, method: str, path: str, form: dict[str, str] | None = None) -> tuple[str, str]:
        """Send one request; returns the text of the answer and its redirect target."""
        headers = {"Cookie": "; ".join(f"{name}={morsel.coded_value}" for name, morsel in self._cookies.items())}
        body = None
        if form is not None:
            token = self._cookies["csrftoken"].value if "csrftoken" in self._cookies else ""
            body = urlencode({**form, "csrfmiddlewaretoken": token})
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise NoAnswer(f"{method} {path}: {error!r}") from error
        for header in answer.headers.get_all("Set-Cookie", []):
            self._cookies.load(header)
        if answer.status >= 400:
            raise UnexpectedAnswer(f"{method} {path} answered {answer.status}")
        return text, answer.headers.get("Location", "")


@dataclass
class Answers:
    """The answers to customers, by order number. `interrupted` counts those who lost their connection earlier."""

    paid: set[int] = field(default_factory=set)
    declined: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    interrupted: int = 0
    unexpected: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """The number of attempts to pay."""
        return len(self.paid) + len(self.declined) + len(self.unanswered)

    def with_others(self, others: Answers) -> Answers:
        """The answers to both crowds of customers."""
        return Answers(
            paid=self.paid | others.paid,
            declined=self.declined | others.declined,
            unanswered=self.unanswered | others.unanswered,
            interrupted=self.interrupted + others.interrupted,
            unexpected=self.unexpected + others.unexpected,
        )


class Crowd:
    """`shoppers` threads that together pay `orders` orders. Threads, because each waits for its answers.

    The customers go to the sites at these ports in turn.
    """

    def __init__(self, *ports: int, orders: int, shoppers: int) -> None:
        self._ports = ports
        self.served = 0
        """The number of customers who came."""
        self._numbers = iter(range(1, orders + 1))
        self._lock = threading.Lock()
        self._leave = threading.Event()
        self._threads = [threading.Thread(target=self._shop, name=f"shopper-{n}", daemon=True) for n in range(shoppers)]
        self.answers = Answers()

    def start(self) -> None:
        """Start the first customer; returns at once.

        The others wait for `start_others`: six of them would take the CPU from the worker while it still starts.
        """
        self._threads[0].start()

    def start_others(self) -> None:
        """Start the other customers; returns at once."""
        for thread in self._threads[1:]:
            thread.start()

    def done(self) -> bool:
        """Whether all customers have left."""
        return not any(thread.is_alive() for thread in self._threads)

    def send_home(self) -> None:
        """Let all customers leave after their present order."""
        self._leave.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _next(self) -> Iterable[int]:
        while not self._leave.is_set():
            with self._lock:
                number = next(self._numbers, None)
                if number is None:
                    return
                self.served += 1
            yield number

    def _shop(self) -> None:
        for number in self._next():
            while not self._buy(number) and not self._leave.is_set():
                # The connection was lost before paying: the customer tries again.
                self._leave.wait(0.05)

    def _buy(self, number: int) -> bool:
        """One customer's visit; False if it was interrupted before the payment."""
        with contextlib.closing(Shopper(self._ports[number % len(self._ports)])) as shopper:
            try:
                shopper.fill_cart(number)
                order_id = shopper.order()
            except NoAnswer:
                with self._lock:
                    self.answers.interrupted += 1
                return False
            except UnexpectedAnswer as error:
                self._note_unexpected(error)
                return True
            self._pay(shopper, order_id, "empty" if number % DECLINE_EVERY == 0 else "good")
        return True

    def _pay(self, shopper: Shopper, order_id: int, card: str) -> None:
        try:
            heard = self.answers.paid if shopper.pay(order_id, card) else self.answers.declined
        except NoAnswer:
            heard = self.answers.unanswered
        except UnexpectedAnswer as error:
            self._note_unexpected(error)
            return
        with self._lock:
            heard.add(order_id)

    def _note_unexpected(self, error: UnexpectedAnswer) -> None:
        with self._lock:
            self.answers.unexpected[str(error)] += 1
