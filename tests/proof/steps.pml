/* The steps of a recorded trace, for the models of this folder.

   Without -DTRACE, the macros NEXT and TAKE do nothing. With it, the environment variable TRACE has two lists of
   numbers, each with a 0 at its end: what the database has committed, in this order, and what one process has done.
   A step of the model that leaves a mark outside is enabled only if it is the next one of its list; all other steps stay
   free. Reader fails as soon as both lists are read. So Spin finds an error exactly if the trace is a run of the model.

   A step is a word with the number of its actor and one more number. In a trace, ANYBODY stands for any actor. */

#define DATABASE 0
#define PROCESS 1
#define ANYBODY 9

#ifdef TRACE

c_decl {
\#include <stdlib.h>
    static int recorded[2][256];

    /* Runs before main. */
    __attribute__((constructor)) static void load(void) {
        char *text = getenv("TRACE");
        int list, place;
        for (list = 0; list < 2; list++)
            for (place = 0; place < 255 && (recorded[list][place] = strtol(text, &text, 10)) != 0; place++);
    }
}

byte taken[2];    /* how many steps of each list the run has made */

#define RECORDED(list) c_expr { recorded[list][now.taken[list]] }
#define STEP(word, actor, number) ((word) * 100 + (actor) * 10 + (number))
#define NEXT(list, word, actor, number) \
    (RECORDED(list) == STEP(word, actor, number) || RECORDED(list) == STEP(word, ANYBODY, number))
#define TAKE(list) taken[list]++

active proctype Reader() {
    bool is_run;
    atomic { RECORDED(DATABASE) == 0 && RECORDED(PROCESS) == 0 -> is_run = true; assert(!is_run) }
}

#else

#define NEXT(list, word, actor, number) true
#define TAKE(list) skip

#endif
