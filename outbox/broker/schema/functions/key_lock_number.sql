-- Return the number of the advisory lock of a FIFO key: the first eight bytes of SHA-256. Producers in Python take the
-- lock under the same number.
CREATE OR REPLACE FUNCTION key_lock_number(topic text, key text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT ('x' || left(encode(sha256(convert_to(topic, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8')), 'hex'), 16))
           ::bit(64)::bigint
$$;
