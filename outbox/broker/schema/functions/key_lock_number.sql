-- Return the number of the advisory lock of a FIFO key. Producers in Python take the lock under the same number: the
-- first eight bytes of BLAKE2b, which PostgreSQL does not have. A bigint does not wrap at 64 bits, so sums are made of
-- two halves.
CREATE OR REPLACE FUNCTION key_lock_number(topic text, key text) RETURNS bigint
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
