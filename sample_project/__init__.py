"""An order service whose parts talk only through messages: orders, logistics, points and cart."""
