-- Change 17: how far ledger and inbox of each service are pruned.
--
-- Both are in the databases of applications, which the broker cannot read. The pass that prunes them stores its
-- progress here, so that a status, a metric or a page can show that a table grows.

CREATE TABLE pruned_table (
    producer_group text             NOT NULL,
    -- Of the application's DATABASES.
    alias          text             NOT NULL,
    -- Rows are kept for this many seconds; younger ones are not looked at.
    name           text             NOT NULL,
    -- All older rows were looked at, and the unneeded ones were removed.
    keep_seconds   double precision NOT NULL,
    -- All older rows were looked at, and those that nothing needs were removed.
    pruned_to      timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, alias, name)
);
