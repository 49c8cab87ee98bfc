"""Receiving: `outbox_worker --role receive` stores messages of other systems in topics.

Add `outbox.contrib.receiving` to INSTALLED_APPS, and declare the sources in OUTBOX['RECEIVE'] (docs/forwarding.md). The
sources in `outbox.contrib.receiving.sources` need no Django. The schema of a CloudEvent becomes headers of
the part `events`.
"""
