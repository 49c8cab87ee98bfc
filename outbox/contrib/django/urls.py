"""`path("outbox/", include("outbox.contrib.django.urls"))`: health/ and status/."""

from __future__ import annotations

from django.urls import path

from outbox.contrib.django import views

urlpatterns = [
    path("health/", views.health, name="outbox_health"),
    path("status/", views.status, name="outbox_status"),
]
