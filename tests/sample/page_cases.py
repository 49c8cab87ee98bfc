"""The pages through Django's test client; test_pages.py runs them in a process that has the sample's settings."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid5

from django.conf import settings
from django.contrib.auth.models import User
from django.core import mail
from django.test import Client, TransactionTestCase, override_settings
from django.urls import reverse

from outbox.contrib.django import publish
from outbox.contrib.django.testing import OutboxTestMixin
from outbox.contrib.schedules.testing import run_schedule
from sample_project import provider, request_id
from sample_project.cart.models import Clearance, Item
from sample_project.catalogue.models import Product
from sample_project.logistics.models import Shipment
from sample_project.orders.models import Order, Status
from sample_project.payments.models import Charge, Statement
from sample_project.points.models import Entry


def _offer(slug: str, name: str, price: str) -> None:
    # The migration's articles are there until the first flush.
    Product.objects.update_or_create(slug=slug, defaults={"name": name, "description": "", "price": Decimal(price)})


class Shopping(OutboxTestMixin, TransactionTestCase):
    """A shop with two articles and a broker in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.provider = self.enterContext(provider.running(slow_every=1000))
        self.enterContext(override_settings(PAYMENT_PROVIDER=self.provider.url))
        _offer("ink", "Iron gall ink", "16.80")
        _offer("pen", "Pen <b>", "48.00")

    def add(self, *slugs: str) -> None:
        for slug in slugs:
            answer = self.client.post(reverse("storefront:add"), {"product": slug})
            self.assertRedirects(answer, reverse("storefront:shop"))

    def check_out(self) -> Order:
        answer = self.client.post(reverse("storefront:check_out"))
        order = Order.objects.latest("id")
        self.assertRedirects(answer, reverse("storefront:order", args=[order.pk]))
        return order

    def pay(self, order: Order, card: str = "good") -> str:
        answer = self.client.post(reverse("storefront:pay", args=[order.pk]), {"card": card}, follow=True)
        return answer.content.decode()

    def page(self, name: str, *args: Any) -> str:
        answer = self.client.get(reverse(f"storefront:{name}", args=args))
        assert answer.status_code == 200
        return answer.content.decode()


class ShopAndCart(Shopping):
    """Looking around and filling the cart."""

    def test_the_shop_shows_articles_escaped_and_gives_no_name_to_a_mere_visitor(self) -> None:
        page = self.page("shop")
        assert "Iron gall ink" in page
        assert "Pen &lt;b&gt;" in page
        assert "sessionid" not in self.client.cookies

    def test_a_second_check_out_finds_the_cart_empty(self) -> None:
        self.add("ink")
        self.check_out()
        self.assertRedirects(self.client.post(reverse("storefront:check_out")), reverse("storefront:cart"))
        assert Order.objects.count() == 1


class Paying(Shopping):
    """From the payment to the four states."""

    def test_four_states_arrive_by_messages_alone(self) -> None:
        self.add("pen", "ink")
        order = self.check_out()
        page = self.pay(order)
        assert 'data-paid="true"' in page
        assert page.count("step done") == 1
        self.outbox.drain()
        page = self.page("progress", order.pk)
        assert page.count("step done") == 4
        assert "64 credited, 64 in all" in page
        order.refresh_from_db()
        assert order.status == Status.SHIPPED
        assert Shipment.objects.get().order_id == order.pk
        assert Clearance.objects.get().customer == order.customer
        assert not Item.objects.exists()

    def test_a_paid_order_is_charged_once_although_its_first_answer_was_lost(self) -> None:
        self.add("ink")
        order = self.check_out()
        self.pay(order)
        message = self.outbox.messages("order.paid")[0]
        self.provider.charge(str(uuid5(message.message_id, "payments")), order.pk, "16.80")
        self.outbox.drain()
        [made] = self.provider.charges()
        assert (made["order"], made["amount"]) == (order.pk, "16.80")
        assert Charge.objects.values_list("order_id", "number").get() == (order.pk, made["number"])

    def test_each_charge_is_in_one_nightly_statement(self) -> None:
        for count in (2, 1):
            for _ in range(count):
                self.add("ink")
                self.pay(self.check_out())
            self.outbox.drain()
            run_schedule("statement")
            self.outbox.drain()
        assert list(Statement.objects.order_by("id").values_list("charges", "amount")) == [
            (2, Decimal("33.60")),
            (1, Decimal("16.80")),
        ]

    def test_a_provider_that_does_not_answer_leaves_the_other_apps_alone(self) -> None:
        self.add("ink")
        order = self.check_out()
        self.pay(order)
        with override_settings(PAYMENT_PROVIDER="http://127.0.0.1:1"):
            self.outbox.drain(raise_errors=False)
            assert not Charge.objects.exists()
        self.outbox.broker.advance(3600)
        self.outbox.drain()
        assert Charge.objects.get().order_id == order.pk
        assert Shipment.objects.get().order_id == order.pk

    def test_a_declined_card_leaves_no_trace_but_a_rolled_back_half_message(self) -> None:
        self.add("ink")
        order = self.check_out()
        assert "The card was declined" in self.pay(order, "empty")
        self.outbox.drain()
        order.refresh_from_db()
        assert (order.status, order.paid_at) == (Status.NEW, None)
        assert self.outbox.messages("order.paid") == []
        assert not (Shipment.objects.exists() or Entry.objects.exists() or Clearance.objects.exists())
        assert 'data-paid="true"' in self.pay(order)

    def test_paying_twice_publishes_once(self) -> None:
        self.add("ink")
        order = self.check_out()
        self.pay(order)
        assert "This order is paid already" in self.pay(order)
        assert len(self.outbox.messages("order.paid")) == 1

    def test_the_message_has_the_paid_amount(self) -> None:
        self.add("ink", "ink")
        order = self.check_out()
        self.pay(order)
        order.refresh_from_db()
        assert order.paid_at is not None
        message = self.outbox.messages("order.paid")[0]
        assert message.key == str(order.pk)
        assert message.headers["outbox-event-version"] == "2"
        self.assertJSONEqual(
            message.body.decode(),
            {
                "order_id": order.pk,
                "customer": order.customer,
                "amount": "33.60",
                "currency": "EUR",
                "paid_at": order.paid_at.isoformat(),
            },
        )

    def test_an_order_is_shown_to_its_customer_only(self) -> None:
        self.add("ink")
        order = self.check_out()
        stranger = Client()
        for name in ("order", "progress"):
            assert stranger.get(reverse(f"storefront:{name}", args=[order.pk])).status_code == 404
        assert stranger.post(reverse("storefront:pay", args=[order.pk]), {"card": "good"}).status_code == 404
        assert "You have not ordered anything yet" in stranger.get(reverse("storefront:orders")).content.decode()
        assert f"Order {order.pk}" in self.page("orders")


class Options(Shopping):
    """The effects of the options that the shop uses besides its plain handlers."""

    def buy(self, *slugs: str) -> Order:
        self.add(*slugs)
        order = self.check_out()
        self.pay(order)
        return order

    def mails_to(self, address: str) -> list[mail.EmailMessage]:
        return [one for one in mail.outbox if one.to == [address]]

    def test_a_customer_gets_one_offer_a_day_and_other_customers_get_theirs(self) -> None:
        customers = [self.buy("ink").customer, self.buy("pen").customer]
        self.client = Client()
        customers.append(self.buy("ink").customer)
        self.outbox.drain()
        assert len(set(customers)) == 2
        assert [len(self.mails_to(f"{customer}@example.org")) for customer in customers] == [1, 1, 1]

    def test_an_offer_that_the_mail_service_did_not_take_within_an_hour_is_not_mailed(self) -> None:
        unreachable = {"EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend", "EMAIL_PORT": 1}
        for waited_seconds, mails in ((600, 1), (3601, 0)):
            with self.subTest(waited_seconds=waited_seconds):
                self.client = Client()
                order = self.buy("ink")
                with override_settings(**unreachable):
                    self.outbox.drain(raise_errors=False)
                assert Shipment.objects.filter(order_id=order.pk).exists()
                self.outbox.broker.advance(waited_seconds)
                self.outbox.drain()
                assert len(self.mails_to(f"{order.customer}@example.org")) == mails

    def test_accounting_gets_a_mail_about_a_charge_that_the_provider_refuses(self) -> None:
        order = self.buy(*["pen"] * 21)
        self.outbox.drain(raise_errors=False)
        [told] = self.mails_to("accounting@example.org")
        assert told.subject == f"Order {order.pk} is paid, but not charged"
        assert "the limit of a charge is 1000 euro" in told.body
        assert [letter.group for letter in self.outbox.broker.dead_letters] == ["payments"]
        assert self.provider.charges() == []

    def test_messages_have_the_id_of_the_request_that_has_caused_them(self) -> None:
        self.add("ink")
        address = reverse("storefront:pay", args=[self.check_out().pk])
        answer = self.client.post(address, {"card": "good"})
        self.outbox.drain()
        for topic in ("order.paid", "shipment.created", "offer.made"):
            [message] = self.outbox.messages(topic)
            assert message.headers[request_id.HEADER] == answer.headers[request_id.HEADER], topic


class Operations(TransactionTestCase):
    """The pages for staff, on a real broker."""

    databases = "__all__"

    def test_an_operator_of_the_shop_logs_in_and_sees_its_messages(self) -> None:
        page = reverse("outbox:search")
        self.assertRedirects(self.client.get(page), f"{reverse('storefront:login')}?next=%2Foperations%2Fmessages%2F")
        User.objects.create_superuser("operator", password="operator")
        given = {"username": "operator", "password": "operator", "next": page}
        self.assertRedirects(self.client.post(reverse("storefront:login"), given), page)
        publish("order.paid", {"order_id": 7}, key="order-7", at_once=True)
        self.assertContains(self.client.get(page), "order-7")
        self.assertContains(self.client.get(reverse("storefront:shop")), f'href="{reverse("outbox:overview")}"')

    def test_the_newest_report_of_the_reconciliation_is_linked_once_there_is_one(self) -> None:
        with TemporaryDirectory() as folder, override_settings(RECONCILE_OUTPUT=folder):
            link = reverse("storefront:report")
            self.assertNotContains(self.client.get(reverse("storefront:orders")), link)
            assert self.client.get(link).status_code == 404
            Path(folder, "report.html").write_text("<!doctype html><title>clean</title>", encoding="utf-8")
            self.assertContains(self.client.get(reverse("storefront:orders")), f'href="{link}"')
            self.assertContains(self.client.get(link), "<title>clean</title>")

    def test_a_broker_that_cannot_be_used_stops_payments_and_nothing_else(self) -> None:
        _offer("ink", "Iron gall ink", "16.80")
        with override_settings(OUTBOX={**settings.OUTBOX, "SCHEMA": "elsewhere"}):
            self.client.post(reverse("storefront:add"), {"product": "ink"})
            self.client.post(reverse("storefront:check_out"))
            order = Order.objects.get()
            page = self.client.post(reverse("storefront:pay", args=[order.pk]), {"card": "good"}, follow=True)
        self.assertContains(page, "Payments cannot be taken at the moment. Nothing was charged")
        order.refresh_from_db()
        assert order.status == Status.NEW
