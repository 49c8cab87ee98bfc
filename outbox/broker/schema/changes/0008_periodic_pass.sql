-- Change 8: when the periodic passes of each producer group last began.

CREATE TABLE periodic_pass (
    producer_group   text             NOT NULL,
    name             text             NOT NULL,
    interval_seconds double precision NOT NULL,
    began_at         timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, name)
);
