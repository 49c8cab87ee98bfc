-- Change 4: what a consumer sent away is not handled again where it was.
--
-- A failed message goes to the retry queue or the dead letters at once; the offset of its queue passes it later, when
-- everything before it is finished too. A consumer that dies in between leaves this note for the next owner, who would
-- deliver (and count) the message a second time otherwise.

CREATE TABLE finished_ahead (
    group_id     integer NOT NULL,
    queue_id     integer NOT NULL,
    queue_offset bigint  NOT NULL,
    -- In the dead letters; else in the retry queue.
    is_dead      boolean NOT NULL,
    PRIMARY KEY (group_id, queue_id, queue_offset)
);
