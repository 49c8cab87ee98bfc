"""How the house is built: its rooms, which of them are parts, and where the core still names a part."""
