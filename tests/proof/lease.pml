/* Lease and epoch of one queue: two consumers handle three messages and store offsets; an operator resets the group.

   A consumer acquires the lease when it is free or has ended, which raises the epoch, and begins at the newest offset. It
   handles up to two messages at once, in any order, and stores the lowest offset whose message is not finished. It may
   freeze between any two statements: its lease ends, the other consumer goes on, and the frozen one continues later. It
   may die, and forgets all. Before COMMIT it asks its clock whether the lease still holds, and may freeze after that.

   The effect and the inbox row of a message are one transaction, per generation of the group. A reset raises the
   generation and the epoch, and begins at offset 0 again: every message has its effect once more.

   Assumed: a primary key admits one inbox row. An offset is a row of its own; the newest one has the greatest (epoch,
   ordinal). The statement that stores it sees the lease at its start, so it may store with an epoch that has just ended.

   Broken variants: NO_INBOX, INBOX_APART, OFFSET_FIRST, NO_EPOCH (the last row written counts), GREATEST_FINISHED. */

#ifndef N
#define N 3
#endif
#define NOBODY 2
#define BIT(x) (1 << (x))
#define WINDOW (next - from < 2)

byte owner = NOBODY, epoch = 0, generation = 0;
bool ended[2];                        /* whether the lease of this consumer has ended by the clock */
bool dead[2];
byte ends = 0, deaths = 0;

byte newest_epoch = 0, newest_ordinal = 0, newest = 0;   /* the offset that counts */
byte effects[2 * N];                  /* by generation and message */
byte inbox = 0;                       /* set of generation and message */
#define PLACE(g, m) ((g) * N + (m))

inline store(with, number, position) {
    if
#ifdef NO_EPOCH
    :: true ->
#else
    :: with > newest_epoch || (with == newest_epoch && number > newest_ordinal) ->
#endif
        newest_epoch = with; newest_ordinal = number; newest = position
    :: else -> skip
    fi
}

proctype Consumer(byte me) {
    byte mine = 0, from = 0, next = 0, done = 0, ordinal = 0, era = 0, at = 0;
    bool holds;
acquire:
    atomic { owner == NOBODY || (owner != me && ended[owner]) || (owner == me && (ended[me] || mine != epoch)) ->
        owner = me; epoch++; mine = epoch; ended[me] = false;
        from = newest; done = 0; ordinal = 0; era = generation;
        at = 0 };
    do
    :: from == N -> 
        /* Nothing to do, until a reset. */
        if :: generation != era -> goto acquire :: ended[me] -> goto acquire fi
    :: from < N ->
        if
        :: at = from
        :: from + 1 < N -> at = from + 1
        fi;
        if
        :: (done & BIT(at)) -> skip
        :: else ->
#ifdef OFFSET_FIRST
            atomic { store(mine, ordinal + 1, at + 1); ordinal++ };
#endif
#ifdef INBOX_APART
            atomic { if :: inbox & BIT(PLACE(era, at)) -> holds = false
                        :: else -> inbox = inbox | BIT(PLACE(era, at)); holds = true fi };
            if :: deaths < 1 -> deaths++; goto die :: skip fi;
            atomic { if :: holds -> effects[PLACE(era, at)]++ :: else -> skip fi };
#else
            holds = !ended[me] && owner == me && mine == epoch;
            /* Frozen here, it commits without a lease. */
            if
            :: holds -> skip
            :: else -> goto lost
            fi;
            if :: deaths < 1 -> deaths++; goto die :: skip fi;
            atomic { if
#ifdef NO_INBOX
            :: true ->
#else
            :: !(inbox & BIT(PLACE(era, at))) ->
#endif
                inbox = inbox | BIT(PLACE(era, at));
                effects[PLACE(era, at)]++;
                assert(effects[PLACE(era, at)] == 1)
            :: else -> skip
            fi };
#endif
            done = done | BIT(at)
        fi;
        /* The next offset to store. */
#ifdef GREATEST_FINISHED
        atomic { if :: done & BIT(at) -> next = at + 1 :: else -> next = from fi };
#else
        atomic { next = from; do :: next < N && (done & BIT(next)) -> next++ :: else -> break od };
#endif
        if
        :: next > from ->
            /* The statement reads the lease, and then stores. */
            holds = owner == me && mine == epoch;
            atomic { if :: holds -> store(mine, ordinal + 1, next); ordinal++; from = next :: else -> skip fi };
            if :: holds -> skip :: else -> goto lost fi
        :: else -> skip
        fi
    od;
die:
    atomic { dead[me] = true; from = 0; next = 0; done = 0; ordinal = 0; at = 0; mine = 0; holds = false };
    /* Its supervisor starts it again. */
    atomic { dead[me] = false; if :: owner == me -> owner = NOBODY :: else -> skip fi };
    goto acquire;
lost:
    atomic { from = 0; next = 0; done = 0; ordinal = 0; at = 0; holds = false };
    goto acquire
}

/* The lease of the owner ends: it was frozen, or cut off. */
active proctype Clock() {
    do
    :: atomic { ends < 2 && owner != NOBODY && !ended[owner] -> ends++; ended[owner] = true }
    od
}

active proctype Operator() {
    atomic { generation == 0 ->
        generation = 1; epoch++; owner = NOBODY;
        newest_epoch = epoch; newest_ordinal = 0; newest = 0 }
}

init { atomic { run Consumer(0); run Consumer(1) } }

active proctype Judge() {
    byte m;
    timeout;
    for (m : 0 .. N - 1) {
        assert(effects[PLACE(generation, m)] == 1);
        assert(effects[PLACE(1 - generation, m)] <= 1)
    }
}
