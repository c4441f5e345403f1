"""A job that was given to a scheduler has a folder (JobPaths.queue), from its submission until it is cancelled or cleaned.

    bundle.pyz          0600: has the job's key; the coordinator removes it once all nodes have joined
    job.sh              what the scheduler runs
    submission.json     the job, and its id in the queue
    slurm.out           what srun and the processes that join have printed

It lies on the file system of the nodes, so that each laptop finds a queued job of which no node has a record.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Iterator, List, Mapping, Optional, Set, cast

from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.job import formats
from clustertool.model.paths import BUNDLE, OURS, STEP_OUTPUT, JobPaths, is_job_id, queue
from clustertool.node.storage import files
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as answers
    from clustertool.model.wire import agent_requests as requests

_ABOUT = "submission.json"
_TEXTS = ("job", "name", "asked", "command", "mode", "owner", "release", "slurm_id")
_LATEST = 1e11  # seconds since the epoch
_MOST_NODES = 100_000
_OUTPUT = 8 << 10  # bytes of the output of a job's start


def submit(node: NodeContext, request: requests.SubmitRequest) -> answers.Answer:
    """Create a job's folder with the files of the request and submission.json.

    Raises UsageError if it exists, PreflightError if it cannot be written; then nothing of it is left.
    """
    about = request["about"]
    path = _queue_path(node.root, about["job"])
    files.make_root(node.root)
    files.make_dir(node.root, OURS, "queue")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        raise UsageError(f"{path} is there already", "take another --job-id, or clean that job") from None
    except OSError as error:
        raise _write_error(path, error) from None
    try:
        with files.closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as folder:
            for name, data in request["files"].items():
                files.create(folder, os.path.basename(name), base64.b64decode(data, validate=True))
        _write_submission(path, about)
    except (OSError, binascii.Error) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise _write_error(path, error) from None
    return {}


def submitted(node: NodeContext, request: requests.SubmittedRequest) -> answers.Answer:
    """Write the id that the scheduler has given to a job into the job's submission.json.

    Raises UsageError for a job id that is not valid, NotFound if there is no submission that can be read, and PreflightError
    if the file cannot be written.
    """
    path = _queue_path(node.root, request["job"])
    about = _read_submission(path, request["job"])
    if about is None:
        raise NotFound(f"job {request['job']} is not submitted", f"{PROGRAM} jobs lists the jobs")
    try:
        _write_submission(path, {**about, "slurm_id": request["slurm_id"]})
    except OSError as error:
        raise _write_error(path, error) from None
    return {}


def submissions(node: NodeContext, request: requests.NoFields) -> answers.SubmissionsAnswer:
    """List all submissions below ROOT_DIR that can be read: damaged ones, and those of another format, are left out."""
    return {"submissions": list(_read_all(node.root))}


def read_output(node: NodeContext, request: requests.OutputRequest) -> answers.SubmissionOutputAnswer:
    """Read the last 8 KiB of what a job's start printed: {path, text}; the text is "" if there is no such file.

    The path is that of the request, else slurm.out in the job's folder.
    """
    path = os.path.normpath(request.get("path") or os.path.join(_queue_path(node.root, request["job"]), STEP_OUTPUT))
    text = b""
    with contextlib.suppress(OSError, PreflightError), open(files.open_file(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _OUTPUT))
        text = file.read(_OUTPUT)
    return {"path": path, "text": text.decode(errors="replace")}


def withdraw(node: NodeContext, request: requests.WithdrawRequest) -> answers.Answer:
    """Remove the folder of a job, or with `only_bundle` the bundle in it alone, if it is there.

    Raises PreflightError if it cannot be removed.
    """
    path = _queue_path(node.root, request["job"])
    try:
        if _is_there(path):
            if request.get("only_bundle"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, BUNDLE))
            else:
                shutil.rmtree(path)
    except OSError as error:
        raise PreflightError(f"{path} cannot be removed: {error.strerror}", "remove it by hand") from None
    return {}


def queued_releases(root: str) -> Set[str]:
    """Return the releases of jobs that have not started: their bundles are still there."""
    known = [(about["release"], os.path.join(_queue_path(root, about["job"]), BUNDLE)) for about in _read_all(root)]
    return {release for release, bundle in known if os.path.lexists(bundle)}


def _read_all(root: str) -> Iterator[answers.SubmittedJob]:
    """Yield the submissions below ROOT_DIR that can be read."""
    names: List[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(queue(root))
    for name in filter(is_job_id, names):
        about = _read_submission(_queue_path(root, name), name)
        if about is not None:
            yield about


def _queue_path(root: str, job: str) -> str:
    """Return the path of a job's folder. Raises UsageError for an invalid id."""
    if not is_job_id(job):
        raise UsageError(f"{job!r} is no job id", "letters, digits, '.', '_' and '-', 64 at most")
    return JobPaths(root, job).queue


def _is_there(path: str) -> bool:
    """Check whether a path is a directory of this user, and no link; False if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return files.is_own_dir(path)
    return False


def _write_submission(path: str, about: answers.SubmittedJob) -> None:
    """Write submission.json, so that it survives a crash. Raises OSError."""
    text = json.dumps({formats.KEY: formats.FORMAT, **about})
    files.replace(os.path.join(path, _ABOUT), text.encode(), durable=True)


def _read_submission(path: str, job: str) -> Optional[answers.SubmittedJob]:
    """Read the submission of a job; None if there is none, or it is not valid."""
    with contextlib.suppress(OSError, ValueError, RecursionError, PreflightError):
        found = json.loads(files.read_file(os.path.join(path, _ABOUT))) if _is_there(path) else None
        if isinstance(found, dict) and found.get("job") == job and _has_right_types(found):
            formats.require_known(found, path)
            return cast("answers.SubmittedJob", {name: found[name] for name in (*_TEXTS, "nodes", "created")})
    return None


def _has_right_types(found: Mapping[str, object]) -> bool:
    """Check types and limits of the fields: a wrong one would make the whole answer invalid, and so hide other jobs."""
    texts = all(isinstance(found.get(name), str) for name in _TEXTS)
    nodes, created = found.get("nodes"), found.get("created")
    counted = isinstance(nodes, int) and not isinstance(nodes, bool) and 0 <= nodes <= _MOST_NODES
    dated = isinstance(created, (int, float)) and not isinstance(created, bool) and 0 <= created < _LATEST
    return texts and counted and dated


def _write_error(path: str, error: Exception) -> PreflightError:
    """Build the error that a folder cannot be written."""
    why = getattr(error, "strerror", None) or str(error)
    return PreflightError(f"{path} cannot be written: {why}", "make room or rights in ROOT_DIR")
