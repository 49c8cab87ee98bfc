-- Name this start of this server.
CREATE OR REPLACE FUNCTION this_server() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT concat_ws(' ', system_identifier, substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8),
                     extract(epoch FROM pg_postmaster_start_time()))
    FROM pg_control_system()
$$;
