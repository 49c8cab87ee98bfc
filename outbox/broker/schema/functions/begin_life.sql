-- Begin a life unless one is present; returns the present life. Do not call it in a transaction with an older snapshot.
CREATE OR REPLACE FUNCTION begin_life() RETURNS uuid
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    present  uuid;
    own_mark xid;
    own_oid  oid := (SELECT oid FROM pg_database WHERE datname = current_database());
    copied   boolean;
BEGIN
    -- In this order, as a reset of offsets does. A transaction that stores positions or failures under an older lease
    -- ends first, and a later one finds its lease gone.
    LOCK TABLE life, queue_lease, consumer_offset, finished_ahead IN SHARE ROW EXCLUSIVE MODE;
    present := present_life();
    IF present IS NOT NULL THEN
        RETURN present;
    END IF;
    present := gen_random_uuid();
    PERFORM set_config('synchronous_commit', 'on', true);
    -- Rows of copied lives; without marks they report the copy only once.
    UPDATE life SET mark = NULL, table_oid = NULL, database_oid = NULL
    WHERE mark <> xmin OR table_oid <> tableoid OR database_oid <> own_oid;
    copied := FOUND;
    DELETE FROM life_sign;
    INSERT INTO life_sign (life_id, server) VALUES (present, this_server()) RETURNING xmin INTO own_mark;
    -- Not the sequence's next number: a restore takes that back too.
    INSERT INTO life (life_id, ordinal, server, queue_ids, heads, mark, database_oid, table_oid, is_copy, stored_until)
    OVERRIDING SYSTEM VALUE
    SELECT present, (SELECT coalesce(max(ordinal), 0) + 1 FROM life), this_server(),
           coalesce(array_agg(queue_id), '{}'), coalesce(array_agg(head), '{}'),
           own_mark, own_oid, 'life'::regclass, copied,
           (SELECT stored_at FROM commit_log ORDER BY log_id DESC LIMIT 1)
    FROM queue_head WHERE head > 0;
    -- Owners keep their leases until the terms end, because earlier handlers may still be running. A restore takes
    -- epochs back, so new ones continue from the clock: an epoch that a running process still holds never occurs again.
    UPDATE queue_lease
    SET epoch = greatest(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    -- Positions stored from memory of an earlier life. `moved` keeps the sum of the counters true.
    INSERT INTO consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled, filtered, skipped,
                                 sent_back, dead, expired, moved)
    SELECT group_id, queue_id, queue_lease.epoch, 0, head, least(start_offset, head), handled, filtered, skipped,
           sent_back, dead, expired,
           head - least(start_offset, head) - (next_offset - start_offset - moved)
    FROM queue_lease JOIN queue_head USING (queue_id)
    CROSS JOIN LATERAL (
        SELECT * FROM consumer_offset stored
        WHERE stored.group_id = queue_lease.group_id AND stored.queue_id = queue_lease.queue_id
        ORDER BY stored.epoch DESC, stored.ordinal DESC LIMIT 1
    ) AS newest (next_offset, former_epoch, former_ordinal, handled, filtered, skipped, sent_back, dead, expired,
                 start_offset, moved, former_group, former_queue, stored_at)
    WHERE next_offset > head;
    DELETE FROM finished_ahead USING queue_head
    WHERE queue_head.queue_id = finished_ahead.queue_id AND queue_offset >= head;
    DELETE FROM life WHERE began_at < now() - interval '30 days' AND life_id <> present;
    RETURN present;
END $$;
