"""Credits loyalty points for what was paid: consumer group points."""
