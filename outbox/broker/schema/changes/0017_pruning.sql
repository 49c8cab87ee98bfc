-- Change 17: how far ledger and inbox of each service are pruned.

CREATE TABLE pruned_table (
    producer_group text             NOT NULL,
    alias          text             NOT NULL,
    name           text             NOT NULL,
    keep_seconds   double precision NOT NULL,
    pruned_to      timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, alias, name)
);
