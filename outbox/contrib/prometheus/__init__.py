"""Metrics for Prometheus: of each process, and of the broker's tables; alert rules and a dashboard.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.prometheus"]
    urlpatterns = [path("outbox/", include("outbox.contrib.prometheus.urls"))]

It also shows what other parts declare. `collector` needs no Django.
"""
