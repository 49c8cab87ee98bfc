-- The table of blocked keys, as it is now (outbox/contrib/blocked_keys/blocking.py).
-- Locks: dead_letter

-- The dead letters of subscriptions in an ordered mode. The first one of a key blocks it, and the others wait for it.
CREATE TABLE blocking_message (
    group_id   integer     NOT NULL,
    topic_id   integer     NOT NULL,
    key        text        NOT NULL,
    log_id     bigint      NOT NULL,
    message_id uuid        NOT NULL,
    -- failed: an operator replays or discards it. waiting: it is replayed as soon as it is the first of its key.
    -- settled: it was replayed or discarded, and may still be in the retry queue.
    state      text        NOT NULL CHECK (state IN ('failed', 'waiting', 'settled')),
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, topic_id, key, log_id),
    UNIQUE (group_id, log_id)
);
CREATE INDEX blocking_message_settled ON blocking_message (log_id) WHERE state = 'settled';
CREATE INDEX blocking_message_waiting ON blocking_message (group_id, topic_id, key, log_id) WHERE state = 'waiting';

-- In the transaction of the dead letter, so that no crash comes between them, and no later message of the key passes.
CREATE FUNCTION follow_dead_letter() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        DELETE FROM blocking_message WHERE group_id = OLD.group_id AND log_id = OLD.log_id;
    ELSIF NEW.replayed_at IS NOT NULL THEN
        UPDATE blocking_message SET state = 'settled' WHERE group_id = NEW.group_id AND log_id = NEW.log_id;
    ELSE
        INSERT INTO blocking_message (group_id, topic_id, key, log_id, message_id, state)
        SELECT NEW.group_id, topic_id, key, log_id, message_id,
               CASE WHEN starts_with(NEW.error, 'KeyBlocked:') THEN 'waiting' ELSE 'failed' END
        FROM commit_log JOIN subscription USING (topic_id)
        WHERE log_id = NEW.log_id AND group_id = NEW.group_id AND mode <> 'concurrent' AND key <> ''
        ON CONFLICT (group_id, log_id) DO UPDATE SET state = excluded.state;
    END IF;
    RETURN NULL;
END $$;
-- Every statement that makes a letter dead or settles it sets replayed_at. Erasure changes only its error.
CREATE TRIGGER follow_dead_letter AFTER INSERT OR DELETE OR UPDATE OF replayed_at ON dead_letter
    FOR EACH ROW EXECUTE FUNCTION follow_dead_letter();
