"""The sources of tables: PostgreSQL over ADBC (the default), databases over JDBC, and Parquet and CSV folders."""
