"""Publish from SQLAlchemy 2 in the transaction of a session. docs/sqlalchemy.md is the page of this part.

    session.add(order)
    publish(session, "order.paid", {"number": order.number}, key=order.number)
    session.commit()                                         # the row and the message, or neither

With an AsyncSession: `await apublish(session, …)`. Django is not needed; the broker's tables must be in the database of
the session.
"""

from __future__ import annotations

from outbox.contrib.sqlalchemy.installation import install as install
from outbox.contrib.sqlalchemy.publishing import Publisher as Publisher

_default = Publisher()
publish = _default.publish
apublish = _default.apublish

__all__ = ["Publisher", "apublish", "install", "publish"]
