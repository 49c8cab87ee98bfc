"""The tables of the cases."""
