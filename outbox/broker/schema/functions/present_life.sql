-- Return the present life. Null if its rows are a copy, or belong to another start of the server, or if other rows were
-- loaded beside its own.
CREATE OR REPLACE FUNCTION present_life() RETURNS uuid
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT life_id FROM life_sign JOIN life USING (life_id)
    WHERE life_sign.server = this_server() AND life.mark = life.xmin AND life.mark = life_sign.xmin
      AND life.table_oid = life.tableoid
      AND life.database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND (SELECT count(*) FROM life_sign) = 1
$$;
