"""rsync starts this program in place of ssh: it hands rsync's two pipes and the remote command to the tool, then waits.

    rsync -e "python -SE bridge.py FD" SOURCE node:TARGET

FD is one end of a socket pair that the tool's rsync has inherited: there is no path that anybody else could open. The
pipes themselves travel over it, so that not a byte is copied here. The exit code of the remote command comes back.
"""

import os
import socket
import sys

if __name__ == "__main__":
    tool = socket.socket(fileno=int(sys.argv[1]))
    command = b"\0".join(os.fsencode(argument) for argument in sys.argv[3:])  # argv[2] is the host
    socket.send_fds(tool, [command], [0, 1])
    tool.shutdown(socket.SHUT_WR)
    os.close(0)
    os.close(1)
    code = tool.recv(1)
    os._exit(code[0] if code else 255)
