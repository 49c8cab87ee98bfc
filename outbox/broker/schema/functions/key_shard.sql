-- Return the shard of a key, as every producer computes it: CRC-32 without its highest bit.
CREATE OR REPLACE FUNCTION key_shard(key text) RETURNS integer
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
