/* Each file that gets its mode (fchmod) takes SLOW_MS milliseconds: a copy onto a slow disk. */
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

int fchmod(int fd, mode_t mode) {
    int (*real)(int, mode_t) = (int (*)(int, mode_t))dlsym(RTLD_NEXT, "fchmod");
    long ms = atol(getenv("SLOW_MS"));
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
    return real(fd, mode);
}
