-- Refuse a message that no consumer could get. It always raises: the functions that append call it only for such a
-- message.
--
-- The checks stand in these functions and not in a CHECK of the table, because each INSERT would prepare the expression
-- of the CHECK anew. The result has the type of a key, so that an INSERT can call it in place of the key.
CREATE OR REPLACE FUNCTION refuse_undeliverable(
    message_id   uuid,
    topic_id     integer,
    shard        integer,
    key          text,
    tag          text,
    content_type text,
    headers      jsonb,
    born_at      timestamptz,
    deliver_at   timestamptz
) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'message % cannot be delivered, so it was not stored: topic id %, shard %, a key of % and a tag of '
        '% characters, content type %, headers of the type %, born at %, to be delivered at %', message_id, topic_id,
        shard, length(key), length(tag), quote_nullable(left(content_type, 80)), jsonb_typeof(headers), born_at, deliver_at
        USING ERRCODE = 'invalid_parameter_value',
              HINT = 'The broker has a topic with this id (after a restore, processes read the topics again within 30 '
                     's). Times are within the years 1 to 9999, a key has up to 255 characters, a tag up to 127, a content '
                     'type up to 255 without control characters. Headers are an object, a shard is not negative.';
END $$;
