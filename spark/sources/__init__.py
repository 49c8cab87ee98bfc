"""The sources of tables are PostgreSQL over ADBC (the default), databases over JDBC, and Parquet and CSV folders."""
