/* Ledger and check-back: one local transaction, its half message, and everybody who may decide about it.

   What is modelled: the client of the transaction, which may die at any step or lose its connection while COMMIT runs;
   the server's session, which runs a COMMIT that was sent although the client is dead, and rolls back when the client
   is gone; an end message, which may be lost or late; two checkers, which an operator asks about a parked transaction
   again once its row is there (twice without an answer); pruning; one restore of the broker, after which the broker has forgotten the
   decision. A statement is one step. The half message may be stored before or after the ledger row (-DAT_ONCE; by
   default after it).

   Assumed: a primary key admits one row, and an INSERT waits for an open row of the same key. The broker keeps a stored
   half message. The server tells its client whether a transaction was aborted. What UNKNOWN means to the operator is
   outside of the model: `parked` stands for it.

   Broken variants: NO_BARRIER, NO_TOMBSTONE (with AT_ONCE), BLIND_END, ROLLBACK_FOR_ABSENT, PRUNED_UNDECIDED,
   NO_PRUNED_BEFORE, HALF_AFTER_COMMIT, PARKED_FIRST (pruned_before counts before the row), PRUNED_BEFORE_DECIDED
   (pruned_before may pass an undecided half message, although no row goes).

   Deciders never contradict each other here: nothing fails if the broker lets the last decision win. */

#include "steps.pml"

/* Steps that the database commits. DECIDED has the decider and whether it is COMMIT. */
#define HALF 1
#define COMMITTED 2
#define TOMBSTONE 3
#define DECIDED 4
#define PARKED 5
#define PRUNED 6
#define RESTORED 7
/* Steps that the client writes down. REPORTED has whether it is COMMIT. */
#define ROW 1
#define ANSWERED 2
#define REPORTED 3

#define PRODUCER 0
#define CHECK 1

mtype = { absent, open, present, tombstone };      /* the ledger row */
mtype = { undecided, commit, rollback };           /* the decision in the broker */
mtype = { idle, insert, end_commit, end_rollback };/* the statement that the session has not run yet */
mtype = { running, failed, over };                /* the transaction in the session */

mtype row = absent;
mtype decision = undecided;
mtype sent = idle;
mtype transaction = running;
mtype end_message = undecided;
bool half = false, parked = false;
bool committed = false;      /* the business write is stored */
bool gone = false;           /* the session's client has died or was cut off */
bool pruned_before = false;  /* the ledger may have forgotten the row */
bool restored = false;
bool early = false;          /* pruning had passed the id before the half message came */
byte rechecks = 0;

#ifdef BLIND_END
#define READS_COMMITTED knows
#else
#define READS_COMMITTED (row == present)
#endif

/* The server says so of a transaction that has ended, and of no other. */
#define READS_ABORTED (transaction == over && !committed)

inline decide(what, who) {
    atomic { if
    :: half && decision == undecided && NEXT(DATABASE, DECIDED, who, (what == commit)) ->
        TAKE(DATABASE);
        assert(what != commit || committed); assert(what != rollback || !committed); decision = what
    :: !(half && decision == undecided) -> skip
    fi }
}

inline roll_back() { if :: row == open -> row = absent :: else -> skip fi }

active proctype Session() {
    do
    :: atomic { sent == insert && (row == absent || row == tombstone) ->
        if
        :: row == tombstone -> transaction = failed
        :: else -> row = open
        fi;
        sent = idle }
    :: atomic { sent == end_commit ->
        if
        :: transaction == running && row == open && NEXT(DATABASE, COMMITTED, 0, 0) ->
            TAKE(DATABASE);
            assert(decision != rollback);
            row = present; committed = true
        :: !(transaction == running && row == open) -> roll_back()
        fi;
        transaction = over; sent = idle }
    :: atomic { sent == end_rollback -> roll_back(); transaction = over; sent = idle }
    :: atomic { gone && sent == idle && transaction != over -> roll_back(); transaction = over }
    od
}

active proctype Client() {
    bool knows = true;
    /* The row and the half message. */
#ifdef AT_ONCE
    if
    :: sent = insert; half = true
    :: half = true; sent = insert
    fi;
#else
    sent = insert;
    sent == idle;
    if :: transaction == failed -> goto give_up :: else -> skip fi;
    atomic { NEXT(PROCESS, ROW, 0, 0) -> TAKE(PROCESS) };
    if :: goto die :: skip fi;
#ifndef HALF_AFTER_COMMIT
    atomic { NEXT(DATABASE, HALF, 0, 0) -> TAKE(DATABASE); half = true };
#endif
#endif
    if :: goto die :: sent == idle fi;
    if :: transaction == failed -> goto give_up :: else -> skip fi;
    /* A statement of the business work may fail, and the code may swallow the error. */
    if :: goto die :: transaction = failed :: skip fi;
    if
    :: goto give_up
    :: sent = end_commit
    fi;
    /* The client dies, loses the connection, or gets the answer. */
    if
    :: goto die
    :: gone = true; knows = false
    :: atomic { sent == idle && NEXT(PROCESS, ANSWERED, 0, 0) -> TAKE(PROCESS) }
    fi;
#ifdef HALF_AFTER_COMMIT
    half = true;
#endif
    /* After COMMIT, the client reads the row: only a committed row is visible. */
    if
    :: atomic { READS_COMMITTED && NEXT(PROCESS, REPORTED, 0, 1) -> TAKE(PROCESS); end_message = commit }
#ifdef ROLLBACK_FOR_ABSENT
    :: row != present -> end_message = rollback
#endif
    :: !READS_COMMITTED -> goto ask
    fi;
    goto stop;
give_up:
    sent = end_rollback;
    sent == idle;
ask:
    /* The client may ask the server how its transaction has ended. */
    if
    :: atomic { READS_ABORTED && NEXT(PROCESS, REPORTED, 0, 0) -> TAKE(PROCESS); end_message = rollback }
    :: skip
    fi;
    goto stop;
die:
    gone = true;
stop:
    skip
}

/* The end message arrives at some time or never. */
active proctype Wire() {
    end_message != undecided;
    if :: decide(end_message, PRODUCER) :: skip fi
}

active [2] proctype Checker() {
    mtype answer;
    bool again;
    do
    :: atomic { half && decision == undecided && (!parked || (row == present && rechecks < 2)) -> again = parked };
        answer = undecided;
        if
#ifdef PARKED_FIRST
        :: pruned_before -> parked = true
        :: row == present && !pruned_before -> answer = commit
#else
        :: row == present -> answer = commit
#endif
        :: row != present ->
#ifdef NO_BARRIER
            answer = rollback
#else
            /* The INSERT of the tombstone waits for an open row, and meets what is left. It reads pruned_before in the
               same statement: a row below may have been deleted, so its absence says nothing, and nobody guesses. */
            atomic { row != open ->
                if
                :: row == present -> answer = commit
                :: row == tombstone -> answer = rollback
#ifndef NO_PRUNED_BEFORE
                :: row == absent && pruned_before && NEXT(DATABASE, PARKED, 0, 0) -> TAKE(DATABASE); parked = true
                :: row == absent && !pruned_before && NEXT(DATABASE, TOMBSTONE, 0, 0) ->
#else
                :: row == absent && NEXT(DATABASE, TOMBSTONE, 0, 0) ->
#endif
                    TAKE(DATABASE);
                    answer = rollback;
#ifndef NO_TOMBSTONE
                    row = tombstone
#endif
                fi }
#endif
        fi;
        /* A checker that dies here loses its answer; the check is due again. */
        if
        :: answer != undecided -> decide(answer, CHECK)
        :: answer != undecided -> skip
        :: answer == undecided -> if :: again -> rechecks++ :: else -> skip fi
        fi
    od
}

active proctype Pruning() {
    atomic { if
#if defined(PRUNED_UNDECIDED) || defined(PRUNED_BEFORE_DECIDED)
    :: true -> early = !half; pruned_before = true
#else
    :: !half || decision != undecided -> early = !half; pruned_before = true
    :: else -> goto end_pruning
#endif
    fi }
#ifndef PRUNED_UNDECIDED
    decision != undecided;
#endif
#if defined(AT_ONCE) && !defined(PRUNED_TOMBSTONES)
    atomic { row == present && NEXT(DATABASE, PRUNED, 0, 0) -> TAKE(DATABASE); row = absent };
#else
    atomic { (row == present || row == tombstone) && NEXT(DATABASE, PRUNED, 0, 0) -> TAKE(DATABASE); row = absent };
#endif
end_pruning:
    skip
}

/* The broker is restored once, from a dump that has the half message and no decision. */
active proctype Restore() {
    atomic { half && decision != undecided && NEXT(DATABASE, RESTORED, 0, 0) ->
        TAKE(DATABASE); decision = undecided; restored = true }
}

#ifndef TRACE
active proctype Judge() {
    timeout;
    assert(!committed || half);
    assert(!committed || decision == commit || (restored && parked));
    assert(!half || decision != undecided || parked);
    assert(!parked || restored || early);
}
#endif
