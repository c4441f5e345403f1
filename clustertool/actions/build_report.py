"""This module makes the report of a job from the records of all nodes."""

from __future__ import annotations

from collections.abc import Mapping

from clustertool.actions import load_config
from clustertool.actions.find_jobs import ListedJob, engine_proof, record_unknown_end
from clustertool.actions.read_status import read
from clustertool.engines.caller import Caller
from clustertool.errors import NotFound, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.hints import PROGRAM
from clustertool.model.wire.agent_answers import ReportAnswer
from clustertool.model.wire.messages import REPORT
from clustertool.show.job_text import loss_text
from clustertool.watch.rank_metrics import find_wrong_losses, newest_rows, read_rows
from clustertool.watch.report_model import ReportModel, build_report_model

_POINTS = 40_000  # values of one kind in the whole page
_MOST, _LEAST = 240, 40  # of one curve


def build_report(fleet: Fleet, job: ListedJob, caller: Caller) -> ReportModel:
    """Ask all nodes for a job's records, with fewer points a curve in a larger job, and build the report of them.

    Its notes, which it shows, name the nodes whose records are missing and the SECRETS that are not set here and so not masked;
    the latter is a warning of the caller, too. fleet.failed gets the error of each node without an answer. Raises NotFound if
    no node that answered has an event of the job, or the nodes' errors if some did not answer.
    """
    processes = 8 * max(1, job["total"])  # before the nodes' records are read only the number of nodes is known
    points = max(_LEAST, min(_MOST, _POINTS // processes))
    answers = fleet.ask_all(REPORT({"job": job["id"], "points": points}))
    record_unknown_end(fleet, job, answers)
    if not any(answer["events"] for answer in answers.values()):
        raise_all(list(fleet.failed.values()))
        raise NotFound(f"job {job['id']} has not started on any node that answered", f"{PROGRAM} jobs lists the jobs")
    secrets = load_config.known_secrets(fleet.cluster)
    notes = _notes_of_missing_records(fleet, answers)
    missing = [name for name in fleet.cluster.secrets if name not in secrets]
    if missing:  # their values may be in the lines of a log
        where = f"SECRETS names {', '.join(missing)}, not set where this page was made"
        notes.append(f"{where}: what programs printed of it is not masked")
        caller.warn(notes[-1])
    status = read(answers, engine_proof(fleet, job))
    rows = read_rows(status, answers)
    notes += map(loss_text, find_wrong_losses(newest_rows(status, rows)))
    return build_report_model(status, answers, load_config.mask_known_secrets(fleet.cluster), notes, rows)


def _notes_of_missing_records(fleet: Fleet, answers: Mapping[int, ReportAnswer]) -> list[str]:
    """List a note for each node whose own records are missing, or for which fleet.failed has an error."""
    notes = []
    for host in fleet.cluster.hosts:
        error = fleet.failed.get(host.index)
        if host.index in answers and error:
            notes.append(f"{host.name}: {error.what}")
        elif error:
            notes.append(f"{host.name} did not answer, its records are missing here: {error.what}")
        elif host.index not in answers:
            notes.append(f"{host.name} has no records of this job (any more)")
    return notes
