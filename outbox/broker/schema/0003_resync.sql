-- Change 3: a resynchronisation waits for nobody.
--
-- One row per incarnation whose beginning has compared all decisions with all queues and taken the foreign transaction
-- ids out of op_log. Where the broker's incarnation has none, code that knows this table resynchronises (again).

CREATE TABLE resync (
    incarnation integer     PRIMARY KEY,
    reason      text        NOT NULL,
    -- What it could see. What the transactions in progress commit later is read as usual, by the ticks that follow.
    snapshot    pg_snapshot NOT NULL,
    at          timestamptz NOT NULL DEFAULT now()
);
INSERT INTO resync (incarnation, reason, snapshot) VALUES (1, 'installed', '1:1:');
