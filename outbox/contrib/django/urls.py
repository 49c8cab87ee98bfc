"""`path("outbox/", include("outbox.contrib.django.urls"))`: health/, status/ and metrics/."""

from __future__ import annotations

from django.urls import path

from outbox.contrib.django import views

app_name = "outbox"

urlpatterns = [
    path("health/", views.health, name="health"),
    path("status/", views.status, name="status"),
    path("metrics/", views.metrics, name="metrics"),
]
