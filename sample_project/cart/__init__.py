"""Carts, cleared once their order is paid: consumer group cart."""
