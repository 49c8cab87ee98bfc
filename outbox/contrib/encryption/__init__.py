"""Encrypts bodies with one key per subject, so that deleting the key erases the bodies in every copy.

INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.encryption"]

publish("customer.moved", {"address": …}, Subject(customer.pk))
"""

from __future__ import annotations

from outbox.contrib.encryption.subject import Subject as Subject
