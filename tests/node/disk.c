/* A file system without locks (NO_LOCKS), and a disk on which each fsync waits until the file SYNC_GATE is there. */
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int flock(int fd, int how) {
    int (*real)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    if (!getenv("NO_LOCKS")) return real(fd, how);
    errno = ENOLCK;
    return -1;
}

int fsync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    struct timespec pause = {0, 10000000};
    while (getenv("SYNC_GATE") && access(getenv("SYNC_GATE"), F_OK)) nanosleep(&pause, NULL);
    return real(fd);
}
