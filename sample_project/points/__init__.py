"""Credits loyalty points for paid orders: consumer group points."""
