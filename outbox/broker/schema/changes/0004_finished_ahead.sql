-- Change 4: entries that were sent away before the offset passes them.

CREATE TABLE finished_ahead (
    group_id     integer NOT NULL,
    queue_id     integer NOT NULL,
    queue_offset bigint  NOT NULL,
    is_dead      boolean NOT NULL,
    PRIMARY KEY (group_id, queue_id, queue_offset)
);
