"""An order service whose apps communicate only by messages; README.md lists them."""
