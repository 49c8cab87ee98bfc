"""Cases without a fault."""
