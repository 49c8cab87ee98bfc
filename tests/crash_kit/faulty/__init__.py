"""Cases with a fault. BREAKS is the line that the report names."""
