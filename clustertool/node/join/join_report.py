"""The joining process reports its progress: one JSON object a line on stdout for a program, else sentences on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Callable, Dict, Optional, Sequence

from clustertool.errors import ClustertoolError, Interrupted, singles
from clustertool.model.job.outcome import Outcome, some
from clustertool.model.joining.join_errors import error_rows
from clustertool.model.paths import SUPERVISOR_ERRORS
from clustertool.model.planning.environment import endpoint
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_PROGRAM = "clustertool join"


class JoinReport:
    """The reports of a joining process, to stdout, stderr or a descriptor. The same fact is not reported twice in a row.

    `lines`: JSON on stdout. `also`: a descriptor that gets the JSON, too. log: stderr becomes a file of the job when this is
    placed.
    """

    def __init__(self, lines: bool, also: Optional[int] = None, log: bool = False) -> None:
        self._lines = lines
        self._also = also
        self._log = log
        self._last: Dict[str, object] = {}

    def guarded(self, work: Callable[[], int]) -> int:
        """Run the work, and return its exit code; report a ClustertoolError, and return its code.

        Another error is printed, and gives 70. KeyboardInterrupt gives the code of Interrupted.
        """
        try:
            return work()
        except ClustertoolError as error:
            self.failed(error)
            return error.code
        except KeyboardInterrupt:  # before its signals are read
            return Interrupted.code
        except Exception:  # noqa: BLE001 - the outermost boundary of the process
            traceback.print_exc()
            return 70

    def waiting(self, present: int, nnodes: int, missing: Sequence[int], where: str, names: Sequence[str]) -> None:
        """Report how many of `nnodes` machines have joined, and which are missing.

        missing: indices. where: the coordinator's endpoint. names: of all machines, where an engine names them.
        """
        known = [names[index] for index in missing if index < len(names)]
        lacking = f"; missing: {some(known) if known else 'index ' + ', '.join(map(str, missing))}" if missing else ""
        text = f"{present} of {nnodes} nodes have joined{lacking}"
        self._write("waiting", text, present=present, nnodes=nnodes, missing=list(missing), coordinator=where)

    def retry(self, where: str, why: str) -> None:
        """Report that there is no connection to the coordinator so far. where: its endpoint."""
        self._write("retry", f"no connection to the coordinator {where} so far: {why}", coordinator=where, why=why)

    def joined(self, where: str) -> None:
        """Report that the coordinator has accepted this machine. where: its endpoint."""
        self._write("joined", f"joined the coordinator {where}", coordinator=where)

    def warning(self, what: str) -> None:
        self._write("warning", f"warning: {what}", what=what)

    def planned(self, spec: Spec) -> None:
        """Report that the job is placed here, with its ranks and logs.

        With `log` stderr goes to a file of the job from now on.
        """
        if self._log:
            self._log = False
            _redirect_stderr(spec["job_dir"])
        own = [(process["role"], process["rank"], process["log"]) for process in spec["processes"]]
        shown = ", ".join(f"{role} {rank}" for role, rank, _ in own) or "no process"
        self._write(
            "planned",
            f"job {spec['job']}: this is node {spec['node']} with {shown}, in {spec['job_dir']}",
            job=spec["job"],
            node=spec["node"],
            name=spec["name"],
            root=spec["root"],
            job_dir=spec["job_dir"],
            nodes=spec["header"]["nodes"],
            ranks=[[role, rank] for role, rank, _ in own],
            logs=[list(row) for row in own],
            lead=endpoint(spec["lead"]["host"], spec["lead"]["port"]),
        )

    def awaits_workspace(self) -> None:
        """Report on node 0 that it waits for the workspace, which the laptop sends."""
        self._write("awaits-workspace", "all nodes have joined; waiting for the workspace, which the laptop sends")

    def started(self) -> None:
        """Report that the supervisor runs."""
        self._write("started", "the supervisor runs")

    def failed(self, error: ClustertoolError) -> None:
        """Report that the job does not start: one line for each error, in JSON with the exit code of all together."""
        for one, row in zip(singles(error), error_rows(error)):
            self._write("error", str(one), **{**row, "code": error.code})

    def epoch_ended(self, outcome: Outcome) -> None:
        """Report the end of an epoch of an elastic job, which goes on."""
        self._write("epoch-ended", f"the epoch has ended: {outcome.reason}", why=outcome.reason)

    def ended(self, outcome: Outcome) -> None:
        """Report how the job has ended on this machine."""
        text = f"{outcome.state.value}: {outcome.reason}"
        self._write("ended", text, outcome=outcome.as_record(), code=outcome.code)

    def _write(self, type_: str, text: str, **fields: object) -> None:
        """Write a report: JSON to stdout, or text to stderr; and JSON to `also`. One like the last one is left out."""
        report = {"type": type_, **fields}
        if report == self._last:
            return
        self._last = report
        with contextlib.suppress(OSError):  # the program that read it has ended: the job goes on
            if self._also is not None:
                files.write_all(self._also, json.dumps(report).encode() + b"\n")
            if self._lines:
                sys.stdout.write(json.dumps(report) + "\n")
                sys.stdout.flush()
            else:
                sys.stderr.write(f"{_PROGRAM}: {_harmless(text)}\n")
                sys.stderr.flush()


def _redirect_stderr(job_dir: str) -> None:
    """Redirect stderr of this process to a file of the job. Errors are ignored."""
    with contextlib.suppress(OSError, ClustertoolError), files.closing(files.open_job_dir(job_dir)) as job:
        with files.closing(files.open_append(job, SUPERVISOR_ERRORS)) as log:
            os.dup2(log, 2)


def _harmless(text: str) -> str:
    """Escape control characters in a text from others, and indent its further lines: none seems to be a new message."""
    first, *rest = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n".join([first, *(line if line[:1] in ("", " ") else f"  {line}" for line in rest)])
