/* An interpreter of nodes that asks the server of tests/forked_agents.py for a fork, and ends as the fork ends. Where the server
   refuses, or does not answer, it becomes the interpreter itself. SOCKET: of the server. PYTHON: the interpreter. NAME: of this
   process while it waits. */

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static int ask(void)
{
    struct sockaddr_un address = {AF_UNIX, SOCKET};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(3 * sizeof(int))];
    } control;
    char byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr message = {0};
    int streams[] = {0, 1, 2}, server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.space;
    message.msg_controllen = sizeof control.space;
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof streams);
    memcpy(CMSG_DATA(&control.header), streams, sizeof streams);
    if (server < 0 || connect(server, (struct sockaddr *)&address, sizeof address) || sendmsg(server, &message, 0) != 1)
        return -1;
    return recv(server, &byte, 1, 0) == 1 && byte == 'y' ? server : -1;
}

int main(int count, char **arguments)
{
    int server = count > 4 && !strcmp(arguments[4], "clustertool-agent") ? ask() : -1, status, stream;

    if (server < 0) {
        arguments[0] = PYTHON;
        execv(PYTHON, arguments);
        return 127;
    }
    prctl(PR_SET_NAME, NAME);
    for (stream = 0; stream < 3; stream++)
        close(stream);
    if (recv(server, &status, sizeof status, 0) != sizeof status)
        return 1;
    if (WIFSIGNALED(status)) {
        signal(WTERMSIG(status), SIG_DFL);
        kill(getpid(), WTERMSIG(status));
    }
    return WEXITSTATUS(status);
}
