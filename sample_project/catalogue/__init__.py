"""The products of the shop."""
