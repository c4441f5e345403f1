"""Placing a job creates its directory, its copy of the workspace and its files. It may fail; nothing runs yet."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Dict, Sequence

from clustertool.errors import DispatchError, PreflightError
from clustertool.model import paths
from clustertool.node.jobs import clean, ledger
from clustertool.node.jobs.ledger import Ledger
from clustertool.node.ports import claims
from clustertool.node.storage import files, release_store

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec, SpecProcess


def place(spec: Spec, release: str) -> None:
    """Make the job's directory with everything in it that the contract names. Undone when it fails."""
    root, base = str(spec["root"]), os.path.dirname(spec["job_dir"])
    files.make_root(root)
    if base != root:
        files.make_dir(root, os.path.basename(base))
    job = files.make_job_dir(spec["job_dir"])
    try:
        Ledger(spec).place()
        if release:
            release_store.unpack(release_store.Store(root), release, files.path_of(job))
        _write_files(spec, job)
        own = [port for process in spec["processes"] for port in process["ports"]]
        claims.claim([*own, *spec["extra_ports"]], spec["job"], base)
    except (PreflightError, DispatchError):
        _take_back(spec)
        raise
    except OSError as error:
        _take_back(spec)
        what = f"{spec['job_dir']} cannot be filled: {error.strerror}"
        raise PreflightError(what, "make room, or choose another ROOT_DIR") from None
    finally:
        os.close(job)


def _take_back(spec: Spec) -> None:
    with contextlib.suppress(PreflightError):  # what made the placing fail is the news
        clean.remove(spec["job_dir"])


def belongs(job_dir: str, token: str) -> bool:
    """Whether a job's directory was placed with this token. Raises NotFound."""
    known = ledger.read(paths.JobPaths(os.path.dirname(job_dir), os.path.basename(job_dir)[3:])).get("token")
    if known:
        return bool(known == token)
    job = files.open_job_dir(job_dir)
    try:
        return str(json.loads(files.read(job, f"{paths.OURS}/spec.json"))["token"]) == token
    except (OSError, ValueError, KeyError):
        return False
    finally:
        os.close(job)


def _write_files(spec: Spec, job: int) -> None:
    job_paths = paths.JobPaths(os.path.dirname(spec["job_dir"]), spec["job"])
    files.create(job, f"{paths.OURS}/spec.json", json.dumps(spec).encode())
    files.create(job, "nodefile", f"{spec['node']}\n".encode(), exclusive=False)
    for name in ("log", spec["output"]):
        os.makedirs(os.path.join(files.path_of(job), name), mode=0o755, exist_ok=True)
    endpoints = "".join(f"{endpoint}\n" for endpoint in spec["endpoints"])
    files.create(job, "log/endpoints.log", f"PADDLE_TRAINER_ENDPOINTS:\n{endpoints}".encode(), exclusive=False)
    firsts: Dict[str, str] = {}
    for process in spec["processes"]:
        firsts.setdefault(process["role"], os.path.basename(process["log"]))
        listed = "".join(os.path.join(spec["work_dir"], shard) + "\n" for shard in process["shards"])
        files.create(job, f"{paths.OURS}/shards-{process['role']}-{process['rank']}", os.fsencode(listed))
    for role, target in firsts.items():
        files.link(job, job_paths.first_log(role), target)
    if spec["log_dir"]:
        _show_logs(
            os.path.normpath(os.path.join(spec["work_dir"], spec["log_dir"])), job_paths.of("log"), spec["processes"]
        )
    elif spec["work_dir"] != spec["job_dir"]:  # --job-workspace: DIR/log and DIR/nodefile show the newest job
        for name in ("log", "nodefile"):
            _link(os.path.join(spec["work_dir"], name), job_paths.of(name))


def _show_logs(folder: str, logs: str, processes_: Sequence[SpecProcess]) -> None:
    """`folder` becomes a link to the logs, or gets links to them if it is a folder already."""
    if os.path.realpath(folder) == os.path.realpath(logs):
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
    if os.path.isdir(folder) and not os.path.islink(folder):
        for name in ["endpoints.log", *(os.path.basename(process["log"]) for process in processes_)]:
            _link(os.path.join(folder, name), os.path.join(logs, name))
    else:
        _link(folder, logs)


def _link(place_: str, target: str) -> None:
    """A link to something of a job, where nothing is but such a link. It survives that its folder is moved."""
    parent = os.path.dirname(place_)
    if os.path.commonpath([parent, target]) == parent:
        target = os.path.relpath(target, parent)
    with contextlib.suppress(OSError):
        if os.path.islink(place_):
            if "/JOB" not in os.readlink(place_):
                return
            os.unlink(place_)
        os.symlink(target, place_)
