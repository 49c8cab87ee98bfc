"""Charges paid orders at the payment provider: consumer group payments."""
