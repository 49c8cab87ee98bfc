-- Return why a message cannot be published to this topic, or null.
CREATE OR REPLACE FUNCTION publish_complaint(
    to_topic   topic,
    body_bytes integer,
    key        text,
    tag        text,
    headers    jsonb,
    deliver_at timestamptz
) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN NOT 'TRANSACTION' = ANY((to_topic).message_types)
            THEN 'does not take transactional messages: add TRANSACTION to its types'
        WHEN deliver_at IS NOT NULL AND NOT 'DELAY' = ANY((to_topic).message_types)
            THEN 'does not take a message with a delivery time: add DELAY to its types'
        WHEN deliver_at IS NULL AND 'DELAY' = ANY((to_topic).message_types)
             AND NOT (to_topic).message_types && ARRAY['NORMAL', 'FIFO']
            THEN 'takes delayed messages only: give the message a deliver_at, or add NORMAL to its types'
        WHEN deliver_at NOT BETWEEN '0001-01-02 UTC' AND '9999-12-30 UTC'
            THEN format('cannot deliver at %s: in some time zones it is beyond the years 1 to 9999', deliver_at)
        WHEN key = '' AND 'FIFO' = ANY((to_topic).message_types)
            THEN 'is FIFO: a message needs a key (its order is kept per key)'
        WHEN length(key) > 255
            THEN 'takes keys of up to 255 characters'
        WHEN length(tag) > 127 OR tag ~ '[\s|\x01-\x1f]'
            THEN 'takes tags of up to 127 characters, without white space or |'
        WHEN body_bytes > 4194304
            THEN format('takes bodies of up to 4194304 bytes, this one has %s: publish a reference to it', body_bytes)
        WHEN jsonb_typeof(headers) <> 'object'
            THEN 'takes headers as a JSON object of names and strings'
        WHEN (SELECT count(*) FROM jsonb_object_keys(headers)) > 64
            THEN 'takes up to 64 headers'
        WHEN (headers ->> 'outbox-timeout') !~ '^[0-9]{1,9}(\.[0-9]{1,6})?$' OR (headers ->> 'outbox-timeout') ~ '^[0.]*$'
            THEN 'takes as header outbox-timeout a positive number of seconds, as text'
        WHEN (headers ->> 'outbox-timeout')::numeric > (to_topic).retention_seconds
            THEN format('keeps messages for %s s, so the header outbox-timeout cannot be %s',
                        (to_topic).retention_seconds, headers ->> 'outbox-timeout')
        WHEN EXISTS (SELECT FROM jsonb_each(headers) AS given
                     WHERE given.key !~ '^[A-Za-z_][A-Za-z0-9_-]{0,63}$'
                        OR jsonb_typeof(given.value) <> 'string' OR length(given.value #>> '{}') > 4096)
            THEN 'takes headers whose names are up to 64 letters, digits, _ or -, and whose values are strings of up to '
                 '4096 characters'
    END
$$;
