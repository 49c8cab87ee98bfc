-- Return how many messages were stored since the leader last counted, if that is longer ago than a minute; else null. While
-- no process leads, no group's backlog is known, so this number stands for all of them.
CREATE OR REPLACE FUNCTION uncounted_messages() RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('commit_log', 'log_id')::regclass), 0)
           - coalesce((SELECT (totals ->> 'stored')::bigint FROM summary ORDER BY summary_id DESC LIMIT 1), 0)
    WHERE NOT EXISTS (SELECT FROM summary WHERE at > clock_timestamp() - interval '1 minute')
$$;
