/* Claim and steps: a message whose handler calls two other systems, without a transaction around the calls.

   A worker claims the message with a token that no claim had before, and the message leaves its queue: a row of
   `scheduled`, due when the claim ends, delivers it again. For each step the worker reads whether a result is stored;
   if not, it calls the other system and stores what it answered. `finish` writes the inbox row, the writes of the
   handler and the end of the claim in one transaction. A worker may die between any two statements, or freeze: its claim
   ends, another worker claims the message, and the frozen one continues later. Once the message is finished, an operator
   may have it handled once more: its inbox row and its results are deleted, although a frozen worker may still continue.

   The other systems do not recognise a repeated call: each call answers another number. So the model shows that all
   stored values belong together, and that a finished message has called each system. Only a death, a lost claim or the
   operator repeats a call.

   Broken variants: STORED_BEFORE_CALL, STEP_WITHOUT_TOKEN, FINISH_WITHOUT_TOKEN, INBOX_AT_CLAIM, NO_RETURN,
   FINISH_APART, CALLED_AGAIN, CLAIMED_EARLY (a claim that has not ended is taken over, twice), TOKEN_COUNTED (the row
   counts its tokens; it is deleted at the end, so they begin again). */

#include "steps.pml"

/* Steps that the database commits, each by the worker of a claim. STORED has the step. */
#define CLAIMED 1
#define STORED 2
#define FINISHED 3
/* In a trace, Reader is the first process. */
#define ME (_pid - 1)

#ifndef STEPS
#define STEPS 2
#endif
#ifndef WORKERS
#define WORKERS 2
#endif
/* How many workers die, and how many claims end by the clock. */
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef FREEZES
#define FREEZES 2
#endif
#define HOLDS (token == mine && claimed)

byte token = 0;                  /* of the newest claim */
byte drawn = 0;                  /* how many tokens there were: none is used again */
bool claimed = false, ended = false;
byte result[STEPS];              /* stored results of steps; 0: none */
byte calls[STEPS];
bool called[STEPS];              /* whether the call whose result is stored has happened */
bool inbox = false;
byte finished = 0;
bool available = true;           /* a delivery of the message is due, or will be when the claim ends */
byte deaths = 0, freezes = 0, redelivered = 0;
#ifdef CLAIMED_EARLY
byte early = 0;
#define MAY_CLAIM (!claimed || ended || early < 2)
#else
#define MAY_CLAIM (!claimed || ended)
#endif

inline may_die() { if :: atomic { deaths < DEATHS -> deaths++; goto die } :: skip fi }

active [WORKERS] proctype Worker() {
    byte mine = 0, step = 0, answer = 0, values[STEPS];
again:
    /* Delivered: at first from its queue, later when the claim ends. */
    atomic { available && !inbox && MAY_CLAIM && NEXT(DATABASE, CLAIMED, ME, 0) ->
        TAKE(DATABASE);
#ifdef CLAIMED_EARLY
        if :: claimed && !ended -> early++ :: else -> skip fi;
#endif
#ifdef TOKEN_COUNTED
        token++;
#else
        drawn++; token = drawn;
#endif
        mine = token; claimed = true; ended = false;
#ifdef INBOX_AT_CLAIM
        inbox = true;
#endif
#ifdef NO_RETURN
        available = false;
#endif
        step = 0; answer = 0 };
    may_die();
    do
    :: step < STEPS ->
#ifdef CALLED_AGAIN
        answer = 0;
#else
        answer = result[step];
#endif
        if
        :: answer != 0 -> skip
        :: else ->
#ifdef STORED_BEFORE_CALL
            atomic { if :: HOLDS -> result[step] = calls[step] + 1 :: else -> goto refused fi };
            may_die();
            atomic { calls[step]++; answer = calls[step]; called[step] = true };
#else
            atomic {
                assert(result[step] == 0 || token != mine);
                calls[step]++; answer = calls[step];
                assert(calls[step] <= 1 + deaths + freezes + redelivered) };
            may_die();
            atomic {
#ifndef STEP_WITHOUT_TOKEN
                if
                :: HOLDS && NEXT(DATABASE, STORED, ME, step) -> TAKE(DATABASE)
                :: !HOLDS -> goto refused
                fi;
#endif
                assert(result[step] == 0 || finished == 0);
                result[step] = answer; called[step] = true };
#endif
            may_die()
        fi;
        values[step] = answer; step++
    :: else -> break
    od;
#ifdef FINISH_APART
    atomic { if :: HOLDS -> inbox = true :: else -> goto refused fi };
    may_die();
    atomic { finished++; claimed = false };
#else
    atomic {
#ifndef FINISH_WITHOUT_TOKEN
        if
        :: HOLDS && NEXT(DATABASE, FINISHED, ME, 0) -> TAKE(DATABASE)
        :: !HOLDS -> goto refused
        fi;
        inbox = true;
#else
        inbox = true;
#endif
        finished++; claimed = false;
#ifdef TOKEN_COUNTED
        token = 0;
#endif
        /* The handler's writes have the values that are stored. */
        assert(finished == 1 + redelivered);
        for (step : 0 .. STEPS - 1) { assert(values[step] == result[step] && called[step]) } };
#endif
refused:
    /* The attempt has failed, or finished. */
    atomic { mine = 0; step = 0; answer = 0; for (step : 0 .. STEPS - 1) { values[step] = 0 }; step = 0 };
    goto again;
die:
    atomic { ended = ended || token == mine; mine = 0; answer = 0;
        for (step : 0 .. STEPS - 1) { values[step] = 0 }; step = 0 };
    goto again
}

active proctype Clock() {
    do
    :: atomic { freezes < FREEZES && claimed && !ended -> freezes++; ended = true }
    od
}

#ifndef TRACE
active proctype Operator() {
    byte i;
    if
    :: atomic { inbox && finished == 1 ->
        redelivered = 1; inbox = false; available = true;
        for (i : 0 .. STEPS - 1) { result[i] = 0; called[i] = false }; i = 0 }
    :: skip
    fi
}

active proctype Judge() {
    byte i;
    timeout;
    assert(inbox && finished == 1 + redelivered);
    for (i : 0 .. STEPS - 1) { assert(called[i] && calls[i] >= 1) }
}
#endif
