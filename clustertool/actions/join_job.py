"""A command that is typed on every machine gives this to the process that joins the job on this machine."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

from clustertool.actions import load_workspace
from clustertool.engines.common_join_file import common_join_file
from clustertool.engines.job_request import RunRequest, make_plan
from clustertool.errors import UsageError
from clustertool.fleet import this_machine
from clustertool.fleet.identity import identity, job_id
from clustertool.fleet.joining import secret, typed_machine
from clustertool.fleet.joining.secret import Secret
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import read_job
from clustertool.model.facts import Identity
from clustertool.model.hints import PROGRAM
from clustertool.model.joining.engine_place import join_timeout_of
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings, check
from clustertool.model.joining.typed_meeting import TypedMeeting, on_loopback
from clustertool.model.planning.plan import Plan, given_facts

_COMMAND = 200  # characters of a command that are compared and shown


def plan_before_meeting(request: RunRequest, meeting: TypedMeeting, folder: Path) -> tuple[RunRequest, Plan]:
    """Read the job of the folder into `request`, and plan it before the machines meet; return (request, plan).

    In the plan only the coordinator has an address, and each machine has as many devices as are named. Raises UsageError for
    --resume, --wait and --skip-bad; UsageError, DataError or ConfigError for a job that cannot be read or planned.
    """
    wish = request.wish
    options = (("--resume", wish.resume), ("--wait", wish.wait), ("--skip-bad", wish.skip_bad))
    for option, given in options:
        if given:
            raise UsageError(f"{option} is not possible where the command is typed on each machine", "leave it out")
    request.spec = read_job(request.cluster, load_workspace.workspace_toml(folder), request.options)
    request.origin = str(folder)
    one = request.cluster.hosts[0]
    hosts = tuple(_placeholder_host(one, number, meeting) for number in range(meeting.nodes))
    whole = replace(request.cluster, hosts=hosts, lead_port=meeting.port)
    files = _files_for_plan(request, folder)
    facts = {
        node: replace(fact, address=hosts[node].address, boot_id=f"machine{node}", listing=files)
        for node, fact in given_facts(whole).items()
    }
    spec = replace(request.spec, nproc_of="")  # --nproc-per-node gpu: the devices are not known yet
    return request, make_plan(replace(request, cluster=whole, spec=spec), facts, Identity(wish.job_id or "DRY"))


def find_secret(meeting: TypedMeeting, make: bool = True) -> Secret:
    """Return the secret that all machines have; where they meet on the loopback and there is none, one that only this user has.

    make: create the latter if it does not exist; else its text is "" then. Raises UsageError if a secret is needed and missing,
    or can be guessed, and ConfigError if another user can read its file or has written it.
    """
    found = secret.find(os.environ)
    if found is not None:
        return found
    if on_loopback(meeting.host):
        return secret.of_this_machine(make)
    fix = f"{PROGRAM} secret --to {secret.default_file()}, then copy this file to each machine (mode 0600)"
    raise UsageError(f"machines that meet at {meeting.endpoint} need a common secret, and there is none here", fix)


def join_file(request: RunRequest, meeting: TypedMeeting, folder: Path, shared: Secret) -> JoinFile:
    """Build what the joining process gets: the job, the meeting point, the secrets, and the settings of this machine.

    The job gets an id and a certificate. Numbers of trainers and devices that were typed here are those of this machine. Raises
    UsageError for numbers that are not possible.
    """
    spec, host = request.spec, request.cluster.hosts[0]
    assert spec is not None
    certificate, key = secret.certificate(shared.text, meeting.salt)
    asked = request.wish.job_id or meeting.run_id
    made = identity(job_id(), asked, request.wish.name or asked, request.origin)
    made = replace(made, certificate=certificate, key=key)
    configured = {name for name, _ in request.cluster.env}
    own = OwnSettings(
        root_dir=host.root_dir,
        folder=str(folder),
        log_dir=spec.log_dir,
        workspace_digest=typed_machine.folder_digest(folder),
        command=shlex.join(spec.trainer.command or ())[:_COMMAND],
        nproc=spec.nproc,
        devices=spec.devices if spec.devices is not None else host.devices,
        env=tuple(pair for pair in this_machine.shell_defaults() if pair[0] not in configured),
        first_path=request.cluster.first_path,
        here=True,
        address=host.address,
    )
    if spec.nproc is not None:  # what is typed has priority over job.toml
        spec = replace(spec, nproc=None, trainer=replace(spec.trainer, per_node=None))
    file = replace(
        common_join_file(request, made, meeting.nodes, MeetingPoint(meeting.host, meeting.port)),
        cluster=replace(request.cluster, hosts=(), first_path=""),
        job=replace(spec, devices=None),
        index=meeting.index,
        join_timeout=join_timeout_of(meeting.timeout or request.cluster.join_timeout),
        listing=_files_for_plan(request, folder),
        own=own,
    )
    return check(file)


def _placeholder_host(host: Host, number: int, meeting: TypedMeeting) -> Host:
    """Copy the host as machine `number` of a plan that is made before the machines meet.

    Machine 0 has the meeting point's address.
    """
    name = f"machine{number}"
    return replace(host, index=number, host=name, name=name, address=name if number else meeting.host)


def _files_for_plan(request: RunRequest, folder: Path) -> tuple[str, ...]:
    """List the files of the folder if the plan needs them, for shards or to find the default command; else ()."""
    spec = request.spec
    needed = spec is not None and (spec.shards or not (spec.trainer.command and spec.pserver.command))
    return tuple(typed_machine.folder_files(folder)) if needed else ()
