/* Lease and epoch of one queue: two consumers handle three messages and store offsets; an operator resets the group.

   A consumer acquires the lease when it is free or has ended, which raises the epoch, and begins at the newest offset. It
   handles up to two messages at once, in any order, and stores the lowest offset whose message is not finished, also
   while a handler runs. It may freeze between any two statements: its lease ends, the other consumer goes on, and the
   frozen one continues later. It may die, and forgets all. Before COMMIT it asks its clock whether the lease still holds,
   and may freeze after that.

   The effect and the inbox row of a message are one transaction, per generation of the group. A reset raises the
   generation and the epoch, and begins at offset 0 again: every message has its effect once more.

   With -DOFFSETS_LATER, a consumer need not store an offset as soon as it could, and may store a lower one than it could:
   it does so once for many messages, while its threads go on.

   Assumed: a primary key admits one inbox row. An offset is a row of its own; the newest one has the greatest (epoch,
   ordinal). The statement that stores it sees the lease at its start, so it may store with an epoch that has just ended.

   Broken variants: NO_INBOX, INBOX_APART, OFFSET_FIRST, NO_EPOCH (the last row written counts), GREATEST_FINISHED,
   BEGUN_IS_FINISHED, SAME_EPOCH (a takeover does not raise the epoch), TAKEN_EARLY (a lease that has not ended is taken
   over, twice). */

#include "steps.pml"

/* Steps that the database commits. STORED has the offset, EFFECT the message. */
#define ACQUIRED 1
#define STORED 2
#define EFFECT 3

#ifndef N
#define N 3
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
/* How many messages a consumer handles at once, how many leases end by the clock, and how many consumers die. */
#ifndef SPAN
#define SPAN 2
#endif
#ifndef ENDS
#define ENDS 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#define NOBODY CONSUMERS
#define BIT(x) (1 << (x))

byte owner = NOBODY, epoch = 0, generation = 0;
bool ended[CONSUMERS];                /* whether the lease of this consumer has ended by the clock */
bool relies[CONSUMERS];               /* whether this consumer may rely on its lease, by its own clock */
bool dead[CONSUMERS];
byte ends = 0, deaths = 0;
#ifdef TAKEN_EARLY
byte early = 0;
#define HAS_ENDED (ended[owner] || early < 2)
#else
#define HAS_ENDED ended[owner]
#endif

byte newest_epoch = 0, newest_ordinal = 0, newest = 0;   /* the offset that counts */
byte effects[2 * N];                  /* by generation and message */
byte inbox = 0;                       /* set of generation and message */
#define PLACE(g, m) ((g) * N + (m))

#ifdef NO_INBOX
#define IS_NEW true
#else
#define IS_NEW (!(inbox & BIT(PLACE(era, at))))
#endif

inline store(with, number, position) {
    if
#ifdef NO_EPOCH
    :: true ->
#else
    :: with > newest_epoch || (with == newest_epoch && number > newest_ordinal) ->
#endif
        newest_epoch = with; newest_ordinal = number; newest = position
    :: else -> assert(with < newest_epoch)   /* The primary key: an epoch has each ordinal once. */
    fi
}

inline store_next() {
#ifdef GREATEST_FINISHED
    atomic { if :: done & BIT(at) -> next = at + 1 :: else -> next = from fi };
#else
    atomic { next = from; do
        :: next < N && (done & BIT(next)) -> next++
#ifdef OFFSETS_LATER
        :: break
#else
        :: else -> break
#endif
        od };
#endif
    if
    :: next > from ->
        /* The statement reads the lease, and then stores. */
        holds = owner == me && mine == epoch;
        atomic { if
        :: holds && NEXT(DATABASE, STORED, me, next) ->
            TAKE(DATABASE); store(mine, ordinal + 1, next); ordinal++; from = next
        :: !holds -> skip
        fi };
        if :: holds -> skip :: else -> goto lost fi
    :: else -> skip
    fi
}

proctype Consumer(byte me) {
    byte mine = 0, from = 0, next = 0, done = 0, ordinal = 0, era = 0, at = 0;
    bool holds;
acquire:
    atomic { ((owner == NOBODY || (owner != me && HAS_ENDED) || (owner == me && (ended[me] || mine != epoch)))
              && NEXT(DATABASE, ACQUIRED, me, 0)) ->
        TAKE(DATABASE);
#ifdef TAKEN_EARLY
        if :: owner != NOBODY && owner != me && !ended[owner] -> early++ :: else -> skip fi;
#endif
#ifdef SAME_EPOCH
        if :: owner == NOBODY -> epoch++ :: else -> skip fi;
#else
        epoch++;
#endif
        owner = me; mine = epoch; ended[me] = false;
        /* A lease is acquired only when nobody else relies on it. */
        for (at : 0 .. CONSUMERS - 1) { assert(at == me || !relies[at]) };
        relies[me] = true;
        from = newest; done = 0; ordinal = 0; era = generation;
        at = 0 };
    do
    :: from == N -> 
        /* Nothing to do, until a reset. */
        if :: generation != era -> goto acquire :: ended[me] -> goto acquire fi
    :: from < N && (ended[me] || owner != me || mine != epoch) ->
        /* It notices that its lease is over, whatever it does. */
        goto lost
    :: from < N ->
        atomic { at = from; do :: at + 1 < N && at + 1 < from + SPAN -> at++ :: break od };
        if
        :: (done & BIT(at)) -> skip
        :: else ->
#ifdef OFFSET_FIRST
            atomic { store(mine, ordinal + 1, at + 1); ordinal++ };
#endif
#ifdef INBOX_APART
            atomic { if :: inbox & BIT(PLACE(era, at)) -> holds = false
                        :: else -> inbox = inbox | BIT(PLACE(era, at)); holds = true fi };
            if :: deaths < DEATHS -> deaths++; goto die :: skip fi;
            atomic { if :: holds -> effects[PLACE(era, at)]++ :: else -> skip fi };
#else
            holds = !ended[me] && owner == me && mine == epoch;
            /* Frozen here, it commits without a lease. */
            if
            :: holds -> skip
            :: else -> goto lost
            fi;
#ifdef BEGUN_IS_FINISHED
            done = done | BIT(at);
#endif
            /* Another thread stores the offset while the handler runs. */
            if :: store_next() :: skip fi;
            if :: deaths < DEATHS -> deaths++; goto die :: skip fi;
            atomic { if
            :: IS_NEW && NEXT(DATABASE, EFFECT, me, at) ->
                TAKE(DATABASE);
                inbox = inbox | BIT(PLACE(era, at));
                effects[PLACE(era, at)]++;
                assert(effects[PLACE(era, at)] == 1)
            :: !IS_NEW -> skip
            fi };
#endif
            done = done | BIT(at)
        fi;
        store_next()
    od;
die:
    atomic { dead[me] = true; relies[me] = false; mine = 0;
        from = 0; next = 0; done = 0; ordinal = 0; at = 0; holds = false };
    /* Its supervisor starts it again. */
    atomic { dead[me] = false; if :: owner == me -> owner = NOBODY :: else -> skip fi };
    goto acquire;
lost:
    atomic { relies[me] = false; from = 0; next = 0; done = 0; ordinal = 0; at = 0; holds = false };
    goto acquire
}

/* The lease of the owner ends: it was frozen, or cut off. */
active proctype Clock() {
    do
    :: atomic { ends < ENDS && owner != NOBODY && !ended[owner] -> ends++; ended[owner] = true; relies[owner] = false }
    od
}

#ifndef TRACE
active proctype Operator() {
    byte i;
    atomic { generation == 0 ->
        for (i : 0 .. CONSUMERS - 1) { relies[i] = false }; i = 0;
        generation = 1; epoch++; owner = NOBODY;
        newest_epoch = epoch; newest_ordinal = 0; newest = 0 }
}

active proctype Judge() {
    byte m;
    timeout;
    for (m : 0 .. N - 1) {
        assert(effects[PLACE(generation, m)] == 1);
        assert(effects[PLACE(1 - generation, m)] <= 1)
    }
}
#endif

init {
    byte i;
    atomic { for (i : 0 .. CONSUMERS - 1) { run Consumer(i) }; i = 0 }
}
