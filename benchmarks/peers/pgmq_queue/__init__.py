"""pgmq, its SQL from the package of its Python client, without its extension; web process and worker are psycopg."""
