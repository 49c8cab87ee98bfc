"""Where benchmarks/pages.py finds the page."""

from __future__ import annotations

from django.urls import include, path

urlpatterns = [path("outbox/", include("outbox.contrib.console.urls"))]
