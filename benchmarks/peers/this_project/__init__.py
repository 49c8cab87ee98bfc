"""This project, on the atomic path (one database) or the two-phase path (two)."""
