"""Income per minute: orders are enriched, added up by the minute, and shown; each stage consumes the one before."""
