"""Placing and paying orders; the producer of order.paid."""
