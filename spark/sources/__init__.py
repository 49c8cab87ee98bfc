"""Where tables are read from: PostgreSQL over ADBC (default) or JDBC, Parquet and CSV folders."""
