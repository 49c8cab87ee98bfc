"""Forwarding: consumer groups whose messages `outbox_worker --role forward` sends to other systems.

Add `outbox.contrib.forwarding` to INSTALLED_APPS, and declare the groups in OUTBOX['FORWARD'] (docs/forwarding.md). The
sinks in `outbox.contrib.forwarding.sinks` need no Django. CloudEvents name the schemas of the part `events`.
"""
