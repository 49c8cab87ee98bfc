"""Messages of several tenants in turn, so that the many messages of one tenant do not delay those of the others.
docs/fair-share.md is its page.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.fair_share"]

    @subscriber("order.paid", group="mail", options=[FairShare(header="tenant")])

A program without Django only imports this module.
"""

from outbox import hooks
from outbox.contrib.fair_share.declaration import FairShare

__all__ = ["FairShare"]

# Here and not in the app: a process that knows a subscription with the option obeys it, whatever INSTALLED_APPS says.
hooks.add_lane(FairShare, "outbox.contrib.fair_share.lane.FairLane")
