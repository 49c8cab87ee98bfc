-- Change 3: resynchronisations are recorded.

CREATE TABLE resync (
    incarnation integer     PRIMARY KEY,
    reason      text        NOT NULL,
    snapshot    pg_snapshot NOT NULL,
    at          timestamptz NOT NULL DEFAULT now()
);
INSERT INTO resync (incarnation, reason, snapshot) VALUES (1, 'installed', '1:1:');
