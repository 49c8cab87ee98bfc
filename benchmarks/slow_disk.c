/* A disk that takes its time, for a server that is started with this library preloaded.
 *
 * fsync and fdatasync take OUTBOX_SLOW_DISK_MS milliseconds longer. Each call is counted in the file
 * OUTBOX_SLOW_DISK_COUNTS: sixty-four bits for each process id, and all calls in the place of 0. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int64_t *counts;
static int64_t places;
static int64_t delay_ns;
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);

__attribute__((constructor)) static void prepare(void)
{
    const char *milliseconds = getenv("OUTBOX_SLOW_DISK_MS");
    const char *path = getenv("OUTBOX_SLOW_DISK_COUNTS");
    struct stat found;

    real_fsync = (int (*)(int)) dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (int (*)(int)) dlsym(RTLD_NEXT, "fdatasync");
    if (milliseconds != NULL)
        delay_ns = (int64_t) (strtod(milliseconds, NULL) * 1e6);
    int file = path == NULL ? -1 : open(path, O_RDWR);
    if (file < 0)
        return;
    if (fstat(file, &found) == 0) {
        void *mapped = mmap(NULL, (size_t) found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) {
            counts = mapped;
            places = found.st_size / (int64_t) sizeof(int64_t);
        }
    }
    close(file);
}

static int slowly(int (*sync_it)(int), int file)
{
    struct timespec until;
    int64_t process = getpid();

    if (counts != NULL) {
        __atomic_add_fetch(&counts[0], 1, __ATOMIC_RELAXED);
        if (process < places)
            __atomic_add_fetch(&counts[process], 1, __ATOMIC_RELAXED);
    }
    /* A point in time, because the server's signals interrupt the sleep and must not shorten it. */
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += delay_ns % 1000000000;
    until.tv_sec += delay_ns / 1000000000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
    return sync_it(file);
}

int fsync(int file)
{
    return slowly(real_fsync, file);
}

int fdatasync(int file)
{
    return slowly(real_fdatasync, file);
}
