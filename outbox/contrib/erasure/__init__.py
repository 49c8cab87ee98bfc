"""Erases the personal data of messages everywhere, and repeats erasures that a restored backup has undone.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.erasure"]

    manage.py outbox_erase customer.moved --key 4711 --reason 'request 17'

See docs/operations/erasure.md.
"""
