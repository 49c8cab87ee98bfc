"""The pages of the shop. Every POST ends in a redirect."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from outbox.errors import BrokerError
from sample_project.cart import services as cart
from sample_project.catalogue.models import Product
from sample_project.income.models import ShownMinute
from sample_project.orders import gateway
from sample_project.orders.models import Order
from sample_project.orders.services import AlreadyPaid, pay
from sample_project.storefront import customers
from sample_project.storefront.checkout import check_out
from sample_project.storefront.progress import progress

CARDS = {
    "good": (gateway.GOOD_CARD, "Card that pays"),
    "empty": (gateway.EMPTY_CARD, "Card that is declined"),
}
# The period of the income page.
SHOWN_INCOME = timedelta(hours=2)


@require_GET
def shop(request: HttpRequest) -> HttpResponse:
    """The articles for sale."""
    return render(request, "storefront/shop.html", {"products": Product.objects.all()})


@require_GET
@never_cache
def cart_page(request: HttpRequest) -> HttpResponse:
    """The items that the visitor is about to order."""
    customer = customers.known(request)
    items = list(cart.open_items(customer))
    total = sum(item.unit_price * item.quantity for item in items)
    ordered = cart.ordered_items(customer).values_list("order_id", flat=True).distinct().order_by("order_id")
    return render(request, "storefront/cart.html", {"items": items, "total": total, "ordered": ordered})


@require_POST
def add_to_cart(request: HttpRequest) -> HttpResponse:
    """Add one article to the cart."""
    product = get_object_or_404(Product, slug=request.POST.get("product", ""))
    cart.add(customers.identify(request), product.slug, product.name, product.price)
    messages.success(request, f"{product.name} is in your cart.")
    return redirect("storefront:shop")


@require_POST
def remove_from_cart(request: HttpRequest) -> HttpResponse:
    """Remove one article from the cart."""
    item = request.POST.get("item", "")
    if item.isdecimal():
        cart.remove(customers.known(request), int(item))
    return redirect("storefront:cart")


@require_POST
def check_out_cart(request: HttpRequest) -> HttpResponse:
    """Turn the cart into an order."""
    order = check_out(customers.known(request))
    if order is None:
        messages.info(request, "There is nothing in your cart.")
        return redirect("storefront:cart")
    return redirect("storefront:order", order.pk)


@require_GET
@never_cache
def orders_page(request: HttpRequest) -> HttpResponse:
    """The visitor's orders."""
    orders = Order.objects.filter(customer=customers.known(request))
    return render(request, "storefront/orders.html", {"orders": orders, "has_report": _report().is_file()})


@require_GET
@never_cache
def order_page(request: HttpRequest, order_id: int) -> HttpResponse:
    """One order: its lines, its payment, and the arrival of the four states."""
    order = _own_order(request, order_id)
    context = {"order": order, "progress": progress(order), "cards": CARDS}
    return render(request, "storefront/order.html", context)


@require_GET
@never_cache
def order_progress(request: HttpRequest, order_id: int) -> HttpResponse:
    """The part of the order page that changes, for its script."""
    order = _own_order(request, order_id)
    return render(request, "storefront/_progress.html", {"order": order, "progress": progress(order)})


@require_POST
def pay_order(request: HttpRequest, order_id: int) -> HttpResponse:
    """Pay with one of the two cards; a failure leaves the order as it was."""
    order = _own_order(request, order_id)
    card, _ = CARDS.get(request.POST.get("card", ""), CARDS["empty"])
    try:
        pay(order.pk, card)
    except gateway.Declined:
        messages.error(
            request,
            "The card was declined. The order is still open, and the message about its payment, "
            "which was stored before the card was asked, is never delivered.",
        )
    except AlreadyPaid:
        messages.info(request, "This order is paid already.")
    except BrokerError:
        messages.error(request, "Payments cannot be taken at the moment. Nothing was charged; please try again.")
    return redirect("storefront:order", order.pk)


@require_GET
@never_cache
def report_page(request: HttpRequest) -> HttpResponse:
    """The newest report of the reconciliation, which is one file."""
    try:
        return HttpResponse(_report().read_bytes())
    except FileNotFoundError as error:
        raise Http404("no reconciliation has written a report yet") from error


def _report() -> Path:
    return Path(settings.RECONCILE_OUTPUT, "report.html")


def _own_order(request: HttpRequest, order_id: int) -> Order:
    # An unknown visitor is '', and no order has that customer.
    return get_object_or_404(Order, pk=order_id, customer=customers.known(request))


@require_GET
@never_cache
def income_page(request: HttpRequest) -> HttpResponse:
    """The last hours as a plot and as a table."""
    minutes = list(ShownMinute.objects.filter(minute__gte=timezone.now() - SHOWN_INCOME, revision__gt=0))
    return render(request, "storefront/income.html", {"minutes": minutes, "plot": _plot(minutes)})


def _plot(minutes: list[ShownMinute]) -> dict[str, list[Any]]:
    """Columns for the plot: seconds since 1970 and euro; a minute between two others without an order is 0."""
    by_minute = {minute.minute: float(minute.income) for minute in minutes}
    if not by_minute:
        return {"times": [], "income": []}
    first, last = min(by_minute), max(by_minute)
    times = [first + timedelta(minutes=step) for step in range(int((last - first) / timedelta(minutes=1)) + 1)]
    return {"times": [int(time.timestamp()) for time in times], "income": [by_minute.get(time, 0.0) for time in times]}
