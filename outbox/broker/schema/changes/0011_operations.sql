-- Change 11: results of counting in the background.

CREATE TABLE summary (
    summary_id   bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    took_seconds double precision NOT NULL,
    facts        jsonb            NOT NULL,
    totals       jsonb            NOT NULL
);

CREATE TABLE audit (
    audit_id     bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    took_seconds double precision NOT NULL,
    differences  text[]           NOT NULL,
    facts        jsonb            NOT NULL
);
