"""Encrypts bodies with one key per subject, so that deleting the key erases the bodies in every copy."""
