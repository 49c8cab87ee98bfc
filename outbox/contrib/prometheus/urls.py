"""`path("outbox/", include("outbox.contrib.prometheus.urls"))`: metrics/."""

from __future__ import annotations

from django.urls import path

from outbox.contrib.prometheus.views import metrics

urlpatterns = [path("metrics/", metrics, name="outbox_metrics")]
