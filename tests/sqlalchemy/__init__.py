"""The part for SQLAlchemy, with each driver of PostgreSQL that it is tested with."""
