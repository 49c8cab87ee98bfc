-- Change 17: how far ledger and inbox of each service are pruned.
--
-- Both lie in the databases of applications, which the broker cannot read. The pass that prunes them leaves here how far
-- it came, so that a status, a metric or a page can say that a table grows.

CREATE TABLE pruned_table (
    producer_group text             NOT NULL,
    -- Of the application's DATABASES.
    alias          text             NOT NULL,
    -- 'ledger' or 'inbox'.
    name           text             NOT NULL,
    -- Rows are kept for so long; younger ones are not looked at.
    keep_seconds   double precision NOT NULL,
    -- All older rows were looked at, and those that nothing needs were removed.
    pruned_to      timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, alias, name)
);
