/* A clock that is wrong by CLOCK_OFFSET seconds, for a process and its children, as LD_PRELOAD: Linux has one wall clock for
   all namespaces, so a node of the lab cannot have another. Files have the node's times too, as they have on a machine whose
   clock is wrong; the monotonic clock is right there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

#define NEXT(name) \
    ({ static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); next; })

static time_t offset(void)
{
    static time_t value;
    static int known;
    if (!known) {
        const char *text = getenv("CLOCK_OFFSET");
        value = text ? atol(text) : 0;
        known = 1;
    }
    return value;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int code = NEXT(clock_gettime)(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int code = NEXT(gettimeofday)(now, zone);
    if (!code)
        now->tv_sec += offset();
    return code;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

#define SHIFTED(code, info) \
    do { \
        int done = (code); \
        if (!done) { \
            (info)->st_mtim.tv_sec += offset(); \
            (info)->st_ctim.tv_sec += offset(); \
            (info)->st_atim.tv_sec += offset(); \
        } \
        return done; \
    } while (0)

int stat(const char *restrict path, struct stat *restrict info) { SHIFTED(NEXT(stat)(path, info), info); }
int lstat(const char *restrict path, struct stat *restrict info) { SHIFTED(NEXT(lstat)(path, info), info); }
int fstat(int fd, struct stat *info) { SHIFTED(NEXT(fstat)(fd, info), info); }
int fstatat(int dir, const char *restrict path, struct stat *restrict info, int flags)
{
    SHIFTED(NEXT(fstatat)(dir, path, info, flags), info);
}
int stat64(const char *restrict path, struct stat64 *restrict info) { SHIFTED(NEXT(stat64)(path, info), info); }
int lstat64(const char *restrict path, struct stat64 *restrict info) { SHIFTED(NEXT(lstat64)(path, info), info); }
int fstat64(int fd, struct stat64 *info) { SHIFTED(NEXT(fstat64)(fd, info), info); }
int fstatat64(int dir, const char *restrict path, struct stat64 *restrict info, int flags)
{
    SHIFTED(NEXT(fstatat64)(dir, path, info, flags), info);
}

static const struct timespec *unshifted(const struct timespec times[2], struct timespec store[2])
{
    if (!times)
        return times;
    for (int i = 0; i < 2; i++) {
        store[i] = times[i];
        if (times[i].tv_nsec != UTIME_NOW && times[i].tv_nsec != UTIME_OMIT)
            store[i].tv_sec -= offset();
    }
    return store;
}

int utimensat(int dir, const char *path, const struct timespec times[2], int flags)
{
    struct timespec store[2];
    return NEXT(utimensat)(dir, path, unshifted(times, store), flags);
}

int futimens(int fd, const struct timespec times[2])
{
    struct timespec store[2];
    return NEXT(futimens)(fd, unshifted(times, store));
}
