/* Log and tick: three transactions store decisions, two leaders make ticks, one consumer reads the queue.

   A tick reads the decisions that its snapshot shows and the last tick's snapshot did not, appends them to the queue and
   stores its own snapshot, all in one transaction. Ticks and offsets commit without waiting for the disk; decisions wait,
   and the log of the server is one sequence, so what was written before them is on disk with them. Effects are in
   another server, which does not crash. A transaction may stay open for ever. A crash of the server takes it back to
   what is on disk and ends all sessions. The first session after it begins a new life: stored offsets past the end of
   the queue go back to the end, and offsets of the former life are refused. With -DPOOLER, the consumer's connection
   outlives the crash, and the new life begins some time after it.

   Assumed: snapshots as PostgreSQL makes them (xmax, and the list of transactions in progress below it); a primary key
   admits one row. Queue entries are messages 1 to 3; the effect of a message and its inbox row are one transaction.

   Broken variants: ID_CURSOR, NO_LIST (a horizon without the list of transactions in progress), NO_TICK_KEY,
   TICK_APART, NO_LIFE, UP_TO_OLDEST (a tick reads up to the oldest open transaction); with POOLER: OFFSETS_KEPT (past
   the end), ANY_LIFE (an offset of a former life is stored), POSITION_FIRST (it is read before the life). */

#include "steps.pml"

/* Steps that the database commits. COMMITTED has the transaction. TICK has two sets of transactions, as sums of 1, 2
   and 4: those whose decisions it has appended, and those that its snapshot shows. */
#define COMMITTED 1
#define TICK 2

#ifndef N
#define N 3
#endif
#define BIT(x) (1 << (x))

byte next_xid = 1, next_id = 1;
byte running = 0, committed = 0;     /* sets of transactions by xid, 1 to N */
byte id_of[N + 1];                   /* the log id that each xid has drawn */

/* What is in the tables, and what of it is on disk. */
typedef Tables { byte tick; byte xmax; byte list; byte last_id; byte end; byte offset; byte life };
Tables now, disk;
byte queue[2 * N + 2];               /* message at each offset; entries below `end` count */
byte effects[N + 1];
byte inbox = 0;
bool crashed = false;
bool unborn = false;                 /* with POOLER: after a crash, until the new life begins */
byte session = 0;                    /* a crash ends the sessions of the number before */

/* Whether a tick now would read the decision of transaction x. */
#ifdef ID_CURSOR
#define READS(x) ((committed & BIT(x)) && id_of[x] > now.last_id)
#elif defined(UP_TO_OLDEST)
#define READS(x) ((committed & BIT(x)) && x >= now.xmax && !(running & (BIT(x + 1) - 1)))
#elif defined(NO_LIST)
#define READS(x) ((committed & BIT(x)) && x >= now.xmax)
#else
#define READS(x) ((committed & BIT(x)) && (x >= now.xmax || (now.list & BIT(x))))
#endif

inline flush() {
    disk.tick = now.tick; disk.xmax = now.xmax; disk.list = now.list; disk.last_id = now.last_id;
    disk.end = now.end; disk.offset = now.offset; disk.life = now.life
}

#ifdef POOLER
#define IS_CONNECTED true
#else
#define IS_CONNECTED (mine == session)
#endif

#ifdef NO_TICK_KEY
#define IS_NEXT (mine == session)
#else
#define IS_NEXT (mine == session && now.tick == at)
#endif

inline append(found) {
    for (i : 1 .. N) {
        if
        :: found & BIT(i) ->
            for (j : 0 .. now.end) { if :: j < now.end -> assert(queue[j] != i) :: else -> skip fi }
            queue[now.end] = i; now.end++
        :: else -> skip
        fi
    }
    i = 0; j = 0
}

active [N] proctype Transaction() {
    byte xid;
    atomic { xid = next_xid; next_xid++; running = running | BIT(xid) }
    atomic { id_of[xid] = next_id; next_id++ }
    if
    ::
#ifdef TRACE
        /* Others see a commit a moment after it is in the log of the server. */
        atomic { NEXT(DATABASE, COMMITTED, 0, xid) -> TAKE(DATABASE) };
#endif
        atomic { running = running & ~BIT(xid); committed = committed | BIT(xid); flush() }
    :: atomic { running = running & ~BIT(xid) }
    :: atomic { crashed -> running = running & ~BIT(xid) }
    :: skip
    fi
}

active [2] proctype Leader() {
    byte mine, at, xmax, list, found, last, seen, i, j;
    do
    :: /* The snapshot of the tick: what it reads belongs to one moment. */
        atomic { !unborn && (READS(1) || READS(2) || READS(3)) ->
            mine = session; at = now.tick; xmax = next_xid; list = running; found = 0; last = now.last_id;
#ifdef UP_TO_OLDEST
            for (i : 1 .. N) { if :: (running & BIT(i)) && i < xmax -> xmax = i :: else -> skip fi };
#endif
            for (i : 1 .. N) {
                if
                :: READS(i) ->
                    found = found | BIT(i);
                    if :: id_of[i] > last -> last = id_of[i] :: else -> skip fi
                :: else -> skip
                fi
            }
            i = 0;
#ifdef TRACE
            seen = committed
#endif
        };
#ifdef TICK_APART
        atomic { if :: mine == session -> append(found) :: else -> skip fi };
        atomic { if :: mine == session && now.tick == at -> now.tick++; now.xmax = xmax; now.list = list :: else -> skip fi }
#else
        /* COMMIT: the row of the tick has the next number, so the second leader collides. */
        atomic {
            if
            :: IS_NEXT && NEXT(DATABASE, TICK, found >> 1, seen >> 1) ->
                TAKE(DATABASE);
                append(found); now.tick++; now.xmax = xmax; now.list = list; now.last_id = last
            :: !IS_NEXT -> skip
            fi
        }
#endif
    od
}

#ifndef TRACE
active proctype Consumer() {
    byte next = 0, life = 0, mine = 0, message, reloads = 0;
    do
#ifdef POOLER
    /* It looks at the life now and then, because its connection does not show that the server has started anew. */
    :: atomic { !unborn && (life != now.life || reloads < 1) ->
        if :: life == now.life -> reloads++ :: else -> skip fi;
#ifdef POSITION_FIRST
        next = now.offset };
        life = now.life
#else
        life = now.life };
        next = now.offset
#endif
#else
    :: atomic { mine != session ->
        /* A new connection. */
        mine = session;
#ifndef NO_LIFE
        life = now.life; next = now.offset
#endif
        }
#endif
    :: atomic { IS_CONNECTED && next < now.end -> message = queue[next] };
        /* The effect with its inbox row. */
        atomic { if
        :: IS_CONNECTED && !(inbox & BIT(message)) ->
            inbox = inbox | BIT(message); effects[message]++; assert(effects[message] == 1); next++
        :: IS_CONNECTED && (inbox & BIT(message)) -> next++
        :: else -> skip
        fi; message = 0 };
        atomic { if
#if defined(NO_LIFE) || defined(ANY_LIFE)
        :: IS_CONNECTED -> now.offset = next
#else
        :: IS_CONNECTED && life == now.life -> now.offset = next
#endif
        :: else -> skip
        fi }
    od
}

inline begin_life() {
    now.life++;
#ifndef OFFSETS_KEPT
    if :: now.offset > now.end -> now.offset = now.end :: else -> skip fi;
#endif
    flush()
}

active proctype Crash() {
    byte k;
    atomic { !crashed ->
        crashed = true; session++;
        now.tick = disk.tick; now.xmax = disk.xmax; now.list = disk.list; now.last_id = disk.last_id;
        now.end = disk.end; now.offset = disk.offset;
        now.life = disk.life;
        for (k : 0 .. 2 * N + 1) { if :: k >= now.end -> queue[k] = 0 :: else -> skip fi };
        k = 0;
#ifdef POOLER
        unborn = true
    };
    /* Before the first process begins the life, an offset of the former one may still be stored. */
    atomic {
        unborn = false;
#endif
        begin_life()
    }
}

active proctype Judge() {
    byte i;
    timeout;
    for (i : 1 .. N) {
        assert(!(committed & BIT(i)) || effects[i] == 1);
        assert((committed & BIT(i)) || effects[i] == 0)
    }
}
#endif
