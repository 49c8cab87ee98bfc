"""The cart's functions for the storefront."""

from __future__ import annotations

from decimal import Decimal

from django.db import transaction
from django.db.models import F, QuerySet, Sum

from sample_project.cart.models import Item

MOST_OF_ONE_ARTICLE = 99


def open_items(customer: str) -> QuerySet[Item]:
    """The items that are not in an order yet."""
    return Item.objects.filter(customer=customer, order_id=None)


def ordered_items(customer: str) -> QuerySet[Item]:
    """The items of orders whose payment has not reached the cart yet."""
    return Item.objects.filter(customer=customer, order_id__isnull=False)


def count(customer: str) -> int:
    """The number of articles in the cart."""
    total: int = open_items(customer).aggregate(total=Sum("quantity", default=0))["total"]
    return total


def add(customer: str, product_slug: str, name: str, unit_price: Decimal) -> None:
    """Add one of an article to the cart, up to MOST_OF_ONE_ARTICLE."""
    with transaction.atomic():
        item, created = Item.objects.select_for_update().get_or_create(
            customer=customer,
            product_slug=product_slug,
            order_id=None,
            defaults={"name": name, "unit_price": unit_price},
        )
        if not created and item.quantity < MOST_OF_ONE_ARTICLE:
            item.quantity = F("quantity") + 1
            item.save(update_fields=["quantity"])


def remove(customer: str, item_id: int) -> None:
    """Remove an article from the cart."""
    open_items(customer).filter(pk=item_id).delete()


def reserve(customer: str, item_ids: list[int], order_id: int) -> None:
    """Mark items as part of an order; its payment will clear them."""
    open_items(customer).filter(pk__in=item_ids).update(order_id=order_id)
