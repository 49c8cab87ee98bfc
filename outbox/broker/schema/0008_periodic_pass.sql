-- Change 8: when the periodic passes of each producer group last began.
--
-- Any number of processes may drive them (every worker, beat, a cron job). Who finds that a pass has just begun leaves
-- it out; and where undecided messages wait, the status can say since when nobody has asked.

CREATE TABLE periodic_pass (
    producer_group   text             NOT NULL,
    name             text             NOT NULL,
    interval_seconds double precision NOT NULL,
    began_at         timestamptz      NOT NULL,
    PRIMARY KEY (producer_group, name)
);
