"""Cases with a fault. BREAKS is what the report names: a line, or the order of the messages."""
