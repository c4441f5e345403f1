"""The launch agent is what mpirun calls in place of ssh: it has a supervisor start mpirun's daemon on a node.

mpirun calls it as `AGENT [options] HOST COMMAND...`, once for each node, and takes its end as that of the daemon. The
supervisor of this node orders the start over the connections of the job, and answers when the daemon has ended.
"""

from __future__ import annotations

import sys
from typing import Sequence

from clustertool.errors import ClustertoolError
from clustertool.model.job.outcome import exit_code
from clustertool.model.paths import JobPaths
from clustertool.node.jobs import supervisor_client
from clustertool.node.system import processes

_NO_ANSWER = 255  # as ssh without a connection


def main(job_dir: str, arguments: Sequence[str]) -> None:
    """Have the supervisors start a daemon on a node, wait for its end, and exit with its code; 255 if that is not possible.

    arguments: [options] HOST COMMAND..., as mpirun gives them.
    """
    processes.outlive()
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        rest.pop(0)
    if len(rest) < 2:
        sys.exit("clustertool: mpirun has called its launch agent without a host and a command")
    try:
        with supervisor_client.open_request(
            JobPaths.at(job_dir), {"type": "launch-daemon", "host": rest[0], "command": " ".join(rest[1:])}
        ) as sock:
            answer = supervisor_client.receive(sock)
    except (OSError, ClustertoolError) as error:
        print(f"clustertool: the MPI daemon on {rest[0]} cannot be started: {error}", file=sys.stderr)
        sys.exit(_NO_ANSWER)
    sys.exit(_NO_ANSWER if answer is None else exit_code(int(str(answer["code"])), int(str(answer["signal"]))))
