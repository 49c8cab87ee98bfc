"""An order service whose apps communicate only by messages: orders, logistics, points and cart."""
