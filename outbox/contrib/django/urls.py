"""`path("outbox/", include("outbox.contrib.django.urls"))`: operations pages, health/, status/, metrics/."""

from __future__ import annotations

from django.urls import path

from outbox.contrib.django import views
from outbox.contrib.django.console.urls import urlpatterns as console

app_name = "outbox"

urlpatterns = [
    path("health/", views.health, name="health"),
    path("status/", views.status, name="status"),
    path("metrics/", views.metrics, name="metrics"),
    *console,
]
