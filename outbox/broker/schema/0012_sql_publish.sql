-- Change 12: publishing from SQL, for triggers and other languages, on the atomic path of the caller's transaction.
--
-- The functions run with the rights of their owner and with this search_path, whatever the caller's is: a role that may
-- execute them needs no right on the tables, and cannot write what the checks refuse. Nobody may until it is granted:
--
--     GRANT USAGE ON SCHEMA outbox TO shop;
--     GRANT EXECUTE ON FUNCTION outbox.publish TO shop;

-- The first eight bytes of BLAKE2b, as PostgreSQL has it not: the lock of a FIFO key has to be the one that every other
-- producer takes, and these take it under this number. Sums wrap at 64 bits, which bigint must be helped to do.
CREATE FUNCTION key_lock_number(topic text, key text) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    low   CONSTANT bigint := 4294967295;
    start CONSTANT bigint[] := ARRAY[
        x'6a09e667f3bcc908'::bigint, x'bb67ae8584caa73b'::bigint, x'3c6ef372fe94f82b'::bigint,
        x'a54ff53a5f1d36f1'::bigint, x'510e527fade682d1'::bigint, x'9b05688c2b3e6c1f'::bigint,
        x'1f83d9abfb41bd6b'::bigint, x'5be0cd19137e2179'::bigint];
    words CONSTANT integer[] := ARRAY[
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,  14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3,
        11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4,  7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8,
        9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13,  2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9,
        12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11,  13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10,
        6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5,  10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0];
    places CONSTANT integer[] := ARRAY[
        1, 5, 9, 13,  2, 6, 10, 14,  3, 7, 11, 15,  4, 8, 12, 16,  1, 6, 11, 16,  2, 7, 12, 13,  3, 8, 9, 14,  4, 5, 10, 15];
    given  bytea := convert_to(topic, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8');
    length integer := octet_length(given);
    state  bigint[] := start;
    work   bigint[];
    block  bigint[];
    word   bigint;
    a bigint; b bigint; c bigint; d bigint; sum bigint;
    at     integer := 0;
    pa integer; pb integer; pc integer; pd integer;
BEGIN
    given := given || decode(repeat('00', (128 - length % 128) % 128), 'hex');
    state[1] := state[1] # x'01010008'::bigint;
    LOOP
        block := '{}';
        FOR i IN 0..15 LOOP
            word := 0;
            FOR j IN REVERSE 7..0 LOOP
                word := (word << 8) | get_byte(given, at + i * 8 + j);
            END LOOP;
            block := block || word;
        END LOOP;
        work := state || start;
        at := at + 128;
        work[13] := work[13] # least(at, length);
        IF at >= length THEN
            work[15] := ~work[15];
        END IF;
        FOR round IN 0..11 LOOP
            FOR i IN 0..7 LOOP
                pa := places[i * 4 + 1]; pb := places[i * 4 + 2]; pc := places[i * 4 + 3]; pd := places[i * 4 + 4];
                a := work[pa]; b := work[pb]; c := work[pc]; d := work[pd];
                FOR half IN 0..1 LOOP
                    word := block[words[(round % 10) * 16 + i * 2 + half + 1] + 1];
                    sum := (a & low) + (b & low) + (word & low);
                    a := (((a >> 32) + (b >> 32) + (word >> 32) + (sum >> 32)) << 32) | (sum & low);
                    d := d # a;
                    d := CASE half WHEN 0 THEN ((d >> 32) & low) | (d << 32)
                                   ELSE ((d >> 16) & 281474976710655) | (d << 48) END;
                    sum := (c & low) + (d & low);
                    c := (((c >> 32) + (d >> 32) + (sum >> 32)) << 32) | (sum & low);
                    b := b # c;
                    b := CASE half WHEN 0 THEN ((b >> 24) & 1099511627775) | (b << 40)
                                   ELSE ((b >> 63) & 1) | (b << 1) END;
                END LOOP;
                work[pa] := a; work[pb] := b; work[pc] := c; work[pd] := d;
            END LOOP;
        END LOOP;
        FOR i IN 1..8 LOOP
            state[i] := state[i] # work[i] # work[i + 8];
        END LOOP;
        EXIT WHEN at >= length;
    END LOOP;
    -- The digest is little-endian; the number is read big-endian.
    word := 0;
    FOR i IN 0..7 LOOP
        word := (word << 8) | ((state[1] >> (8 * i)) & 255);
    END LOOP;
    RETURN word;
END $$;

-- CRC-32 without its highest bit: the shard of a key, as every producer computes it.
CREATE FUNCTION key_shard(key text) RETURNS integer
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    given bytea := convert_to(key, 'UTF8');
    crc   bigint := 4294967295;
BEGIN
    FOR i IN 0..octet_length(given) - 1 LOOP
        crc := crc # get_byte(given, i);
        FOR bit IN 1..8 LOOP
            crc := (crc >> 1) # (3988292384 * (crc & 1));
        END LOOP;
    END LOOP;
    RETURN ((crc # 4294967295) & 2147483647)::integer;
END $$;

-- Why a message cannot be published to this topic, or null.
CREATE FUNCTION publish_complaint(to_topic topic, body_bytes integer, key text, tag text, headers jsonb,
                                  deliver_at timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN NOT 'TRANSACTION' = ANY((to_topic).message_types)
            THEN 'does not take transactional messages: add TRANSACTION to its types'
        WHEN deliver_at IS NOT NULL AND NOT 'DELAY' = ANY((to_topic).message_types)
            THEN 'does not take a message with a delivery time: add DELAY to its types'
        WHEN deliver_at IS NULL AND 'DELAY' = ANY((to_topic).message_types)
             AND NOT (to_topic).message_types && ARRAY['NORMAL', 'FIFO']
            THEN 'takes delayed messages only: give the message a deliver_at, or add NORMAL to its types'
        WHEN NOT isfinite(deliver_at) OR extract(year FROM deliver_at AT TIME ZONE 'UTC') NOT BETWEEN 1 AND 9999
            THEN format('cannot deliver at %s: it is beyond the years 1 to 9999', deliver_at)
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
        WHEN EXISTS (SELECT FROM jsonb_each(headers) AS given
                     WHERE given.key !~ '^[A-Za-z_][A-Za-z0-9_-]{0,63}$'
                        OR jsonb_typeof(given.value) <> 'string' OR length(given.value #>> '{}') > 4096)
            THEN 'takes headers whose names are up to 64 letters, digits, _ or -, and whose values are strings of up to '
                 '4096 characters'
    END
$$;

CREATE FUNCTION publish_bytes(topic text, body bytea, content_type text, key text DEFAULT '', tag text DEFAULT '',
                              headers jsonb DEFAULT '{}', deliver_at timestamptz DEFAULT NULL,
                              message_id uuid DEFAULT NULL, shard integer DEFAULT NULL, producer_group text DEFAULT '',
                              wake boolean DEFAULT false) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
DECLARE
    target    topic;
    complaint text;
    rejects   boolean;
    id        uuid := message_id;
    log_id    bigint;
BEGIN
    SELECT one.* INTO target FROM topic AS one WHERE one.name = topic AND one.retry_of IS NULL;
    IF target.topic_id IS NULL THEN
        RAISE EXCEPTION 'topic % is not declared', quote_nullable(topic)
            USING ERRCODE = 'undefined_object', HINT = 'Declare it in OUTBOX[''TOPICS''], or with outbox_topic create.';
    END IF;
    IF num_nulls(body, content_type, key, tag, headers, producer_group) > 0 THEN
        RAISE EXCEPTION 'topic %: body, content_type, key, tag, headers and producer_group cannot be null', topic
            USING ERRCODE = 'null_value_not_allowed';
    END IF;
    complaint := publish_complaint(target, octet_length(body), key, tag, headers, deliver_at);
    IF complaint IS NOT NULL THEN
        RAISE EXCEPTION 'topic % %', topic, complaint USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT reject_transactional INTO rejects FROM broker;
    IF rejects THEN
        RAISE EXCEPTION 'the broker refuses transactional messages (its operator switched them off)'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = '"outbox_transaction accept" switches them on.';
    END IF;
    IF 'FIFO' = ANY(target.message_types) AND target.key_lock THEN
        -- Before the position in the log is drawn, and held to the end of the transaction.
        PERFORM pg_advisory_xact_lock(key_lock_number(topic, key));
    END IF;
    IF id IS NULL THEN
        -- Version 7: 48 bits of milliseconds, so that the unique index stays append-only.
        id := encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) PLACING
            substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
            52, 1), 53, 1), 'hex')::uuid;
    END IF;
    INSERT INTO commit_log AS stored (born_at, deliver_at, transaction_id, message_id, topic_id, shard, half,
                                      producer_group, key, tag, content_type, headers, body)
    VALUES (clock_timestamp(), deliver_at, id, id, target.topic_id,
            coalesce(shard & 2147483647, CASE WHEN key <> '' THEN key_shard(key) END), false,
            producer_group, key, tag, content_type, nullif(headers, '{}'), body)
    ON CONFLICT ON CONSTRAINT commit_log_message_id_key DO NOTHING
    RETURNING stored.log_id INTO log_id;
    IF log_id IS NOT NULL THEN
        INSERT INTO op_log (transaction_id, incarnation, decision, decided_by, log_ids)
        VALUES (id, (SELECT one.incarnation FROM broker AS one), 'C', 'P', ARRAY[log_id]);
        IF wake THEN
            PERFORM pg_notify(current_schema() || '_decided', '');
        END IF;
    END IF;
    RETURN id;
END $$;

CREATE FUNCTION publish(topic text, body jsonb, key text DEFAULT '', tag text DEFAULT '', headers jsonb DEFAULT '{}',
                        deliver_at timestamptz DEFAULT NULL, message_id uuid DEFAULT NULL, shard integer DEFAULT NULL,
                        producer_group text DEFAULT '', wake boolean DEFAULT false) RETURNS uuid
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT publish_bytes(topic, convert_to(body::text, 'UTF8'), 'application/json', key, tag, headers, deliver_at,
                         message_id, shard, producer_group, wake)
$$;

REVOKE ALL ON FUNCTION publish, publish_bytes, publish_complaint, key_lock_number, key_shard FROM PUBLIC;
