"""The operations page: shows the broker's state and runs operator actions.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.console"]
    urlpatterns = [path("outbox/", include("outbox.contrib.console.urls"))]

Conditions, listings and actions of other parts are shown as they are declared.
"""
