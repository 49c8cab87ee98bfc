"""Views of these tests."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse
from django.urls import include, path

from outbox.contrib.django import publish, transactional_message
from tests.django.shop.models import Order
from tests.part_apps import part_urls


class Refused(Exception):
    """The view failed after it had published."""


def create(request: HttpRequest, number: str) -> HttpResponse:
    """A plain view; with ATOMIC_REQUESTS its transaction is the request's."""
    Order.objects.create(number=number)
    publish("orders", {"number": number}, key=number)
    if "fail" in request.GET:
        raise Refused
    return HttpResponse(status=201)


@transactional_message("orders", key=lambda number: number, body=lambda number: {"number": number})
def create_decorated(request: HttpRequest, number: str) -> HttpResponse:
    """The decorator on a view."""
    Order.objects.create(number=number)
    if "fail" in request.GET:
        raise Refused
    return HttpResponse(status=201)


@transactional_message("orders", key=lambda number: number, body=lambda number, result: {"status": result.status_code})
async def create_async(request: HttpRequest, number: str) -> HttpResponse:
    """The decorator on an async view, with the async ORM."""
    await Order.objects.acreate(number=number)
    await sync_to_async(Order.objects.filter(number=number).update)(status="paid")
    if "fail" in request.GET:
        raise Refused
    return HttpResponse(status=201)


urlpatterns = [
    *(path("outbox/", include(urls)) for urls in ("outbox.contrib.django.urls", *part_urls())),
    path("create/<number>", create),
    path("decorated/<number>", create_decorated),
    path("async/<number>", create_async),
]
