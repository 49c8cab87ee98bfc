-- Change 6: producers with a transactional id, of which the newest instance fences the older ones.

CREATE TABLE producer_epoch (
    producer_group   text        NOT NULL,
    transactional_id text        NOT NULL,
    epoch            bigint      NOT NULL,
    initialised_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (producer_group, transactional_id)
);

CREATE TABLE fenced_half (
    transaction_id   uuid   PRIMARY KEY,
    producer_group   text   NOT NULL,
    transactional_id text   NOT NULL,
    epoch            bigint NOT NULL
);
CREATE INDEX fenced_half_producer ON fenced_half (producer_group, transactional_id, epoch);
