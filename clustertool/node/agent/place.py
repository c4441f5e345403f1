"""These handlers place a job, which may fail, and take it back: its directory, its copy of the workspace, its files."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from typing import TYPE_CHECKING, Iterator

from clustertool.errors import DispatchError, NotFound, PreflightError
from clustertool.model import paths
from clustertool.model.wire.messages import PLACE
from clustertool.node.jobs import ledger, queries
from clustertool.node.jobs.ledger import Ledger
from clustertool.node.ports import claims
from clustertool.node.storage import files, release_store, shown_logs, tree_copy
from clustertool.node.system.node_context import PlacingContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import PlaceRequest, UnplaceRequest
    from clustertool.model.wire.spec_types import Spec


def place(agent: PlacingContext, request: PlaceRequest) -> Answer:
    """Make the job's directory, with ledger, claimed ports, workspace, earlier output and spec. Undone when it fails.

    A job that its engine starts again, and one that begins another epoch, keeps its directory: other machines, addresses and
    ports, the same files. The earlier supervisor has ended. A member of an elastic job has a record before its first epoch, and
    no workspace and no output of the job `resume`. Its spec is written when they are complete. Raises UsageError if another job
    has the directory, PreflightError if something cannot be written or a port is in use, DispatchError for a damaged release,
    NotFound without a job `resume`.
    """
    spec = request["spec"]
    again = may_be_placed_again(spec) and _started_before(spec)
    job = files.open_job_dir(spec["job_dir"]) if again else _make_directory(spec)
    with files.closing(job), _removed_on_failure(spec, again):
        Ledger(spec).place()
        _claim_ports(agent, spec)
        first = not os.path.exists(paths.JobPaths.at(spec["job_dir"]).spec)
        if first and request["release"]:
            release_store.unpack(release_store.Store(spec["root"]), request["release"], files.path_of(job))
        if not again:
            _write_files(spec, job)
        if first and request.get("resume"):
            earlier = queries.record_of(agent, request["resume"])
            _copy_output(earlier.output, spec, files.path_of(job))
            for path in request.get("keep", ()):
                _copy_kept(earlier.paths.of(path), path, spec, files.path_of(job))
        if again:
            files.remove(job, f"{paths.OURS}/control")
            _write_files(spec, job)
    return {}


@contextlib.contextmanager
def _removed_on_failure(spec: Spec, again: bool) -> Iterator[None]:
    """Remove the job's directory and claims if the `with` block fails; a directory in which the job is placed again stays.

    Raises PreflightError for an OSError, and what else the block raises.
    """
    try:
        yield
    except (OSError, PreflightError, DispatchError, NotFound) as error:
        if not again:
            with contextlib.suppress(PreflightError):  # what made the placing fail is the news
                _remove(spec["job_dir"])
        if not isinstance(error, OSError):
            raise
        done = "written" if again else "filled"
        fix = "make room in ROOT_DIR" if again else "make room, or choose another ROOT_DIR"
        raise PreflightError(f"{spec['job_dir']} cannot be {done}: {error.strerror}", fix) from None


def may_be_placed_again(spec: Spec) -> bool:
    """Check whether the job may have a directory here already: the engine has started it again, or it is elastic."""
    return bool(spec.get("attempt")) or "elastic" in spec


def _started_before(spec: Spec) -> bool:
    """Check whether an earlier start of this job has left its directory, with events; remove one that is placed by half.

    Raises PreflightError if that cannot be removed.
    """
    try:
        if not is_placed_with(spec["job_dir"], spec["token"]):
            return False  # of another job: it cannot be made
    except NotFound:
        return False
    if os.path.exists(paths.JobPaths.at(spec["job_dir"]).events):
        return True
    _remove(spec["job_dir"])
    return False


def _make_directory(spec: Spec) -> int:
    """Make the directory of a job below ROOT_DIR, and return its descriptor.

    Raises UsageError if it exists, and PreflightError if it cannot be made.
    """
    files.make_root(spec["root"])
    return files.make_job_dir(spec["job_dir"])


def _claim_ports(agent: PlacingContext, spec: Spec) -> None:
    """Claim the job's ports before the copies, which can take hours: no other job takes them meanwhile.

    The claims are valid while the records are recent: sets agent.placed, so that the agent keeps them so. Raises PortInUse if
    another job has one, and PreflightError if the claims cannot be written.
    """
    own = [port for process in spec["processes"] for port in process["ports"]]
    claims.claim([*own, *spec["extra_ports"]], spec["job"], os.path.dirname(spec["job_dir"]))
    agent.placed = os.path.join(spec["job_dir"], paths.OURS)


def _write_files(spec: Spec, job: int) -> None:
    """Write spec, node number, endpoints and lists of shards, make the folders for logs and output, and link the logs."""
    exclusive = not may_be_placed_again(spec)
    files.create(job, f"{paths.OURS}/spec.json", json.dumps(spec).encode(), exclusive)
    files.create(job, "nodefile", f"{spec['node']}\n".encode(), exclusive=False)
    for name in ("log", spec["output"], paths.FLIGHT):
        os.makedirs(os.path.join(files.path_of(job), name), mode=0o755, exist_ok=True)
    files.create(job, paths.ENDPOINTS, paths.endpoints_log(spec["endpoints"]).encode(), exclusive=False)
    for process in spec["processes"]:
        listed = "".join(os.path.join(spec["work_dir"], shard) + "\n" for shard in process["shards"])
        name = f"{paths.OURS}/shards-{process['role']}-{process['rank']}"
        files.create(job, name, os.fsencode(listed), exclusive)
    shown_logs.show(spec)


def _copy_output(earlier: str, spec: Spec, job_dir: str) -> None:
    """Copy the output of an earlier job, if it is on this node, into the one of this job.

    Raises PreflightError if that is outside of the job's directory, and OSError if the copy fails. A link of the workspace may
    lead out of the job's directory: to the same folder as before, where nothing is to be done, or to another one, where files
    of others could be replaced.
    """
    output = os.path.join(job_dir, spec["output"])
    os.makedirs(output, mode=0o755, exist_ok=True)
    if not os.path.isdir(earlier):  # only files of --keep are on this node
        return
    if not os.path.samefile(earlier, output):
        _require_inside(spec, job_dir, spec["output"])
    tree_copy.copy_tree(earlier, output)


def _copy_kept(earlier: str, path: str, spec: Spec, job_dir: str) -> None:
    """Copy a file or a folder of an earlier job's directory to the same path of this one.

    Raises PreflightError if that leads out of the job's directory, and OSError if the copy fails.
    """
    target = os.path.join(job_dir, path)
    _require_inside(spec, job_dir, os.path.dirname(path))
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if not os.path.isdir(earlier):
        tree_copy.copy_file(os.path.realpath(earlier), target)
        return
    _require_inside(spec, job_dir, path)
    os.makedirs(target, mode=0o755, exist_ok=True)
    tree_copy.copy_tree(earlier, target)


def _require_inside(spec: Spec, job_dir: str, path: str) -> None:
    """Raise PreflightError if the path in the job's directory leads out of it, by a link of the workspace."""
    real, top = os.path.realpath(os.path.join(job_dir, path)), os.path.realpath(job_dir)
    if os.path.commonpath([real, top]) != top:
        what = f"{os.path.join(spec['job_dir'], path)} leads to {real}, outside of the job's directory"
        fix = "--resume copies nothing there: remove the link from the workspace, or start the job without --resume"
        raise PreflightError(what, fix)


def unplace(agent: PlacingContext, request: UnplaceRequest) -> Answer:
    """Remove the directory and the claims of a job that never started, after the agent's earlier requests have ended.

    A directory of another job stays, and with `again` that of this job, too: only the claims are taken back.
    """
    this = threading.current_thread()
    for work in itertools.takewhile(lambda work: work is not this, agent.threads):
        if work.kind is PLACE:  # a placing that was interrupted is over before it is taken back
            work.abandon()
        work.join()
    with contextlib.suppress(NotFound):
        if request.get("again"):
            _take_back_claims(request["job_dir"])
        elif is_placed_with(request["job_dir"], request["token"]):
            _remove(request["job_dir"])
    return {}


def _remove(job_dir: str) -> None:
    """Remove the directory of a job that never started, and take back its claims.

    Raises NotFound if the directory has no marker, and PreflightError if this fails.
    """
    ledger.remove_job(job_dir)
    _take_back_claims(job_dir)


def _take_back_claims(job_dir: str) -> None:
    """Take back the claims of the job's ports."""
    placed = paths.JobPaths.at(job_dir)
    claims.take_back(placed.job, placed.base)


def is_placed_with(job_dir: str, token: str) -> bool:
    """Check whether a job's directory was placed with this token, by the ledger, else by its spec.

    Raises NotFound if the ledger has no token, and there is no directory.
    """
    known = ledger.read(paths.JobPaths.at(job_dir)).get("token")
    if known:
        return bool(known == token)
    with files.closing(files.open_job_dir(job_dir)) as job:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(json.loads(files.read(job, f"{paths.OURS}/spec.json"))["token"]) == token
        return False
