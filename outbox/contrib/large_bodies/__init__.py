"""Large bodies: an app that stores the bodies of large messages in a storage of Django (docs/large-bodies.md).

INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.large_bodies"]
"""
