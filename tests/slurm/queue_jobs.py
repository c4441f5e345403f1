"""Jobs in the queue of Slurm that several tests submit, and the proof that one is over."""

from __future__ import annotations

import json
from pathlib import Path

from tests.slurm.slurm_site import SlurmSite

STEPS = "import time\nfor step in range(1000):\n    print('step', step, flush=True)\n    time.sleep(0.2)\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + STEPS


def folder_of(site: SlurmSite, job: str) -> Path:
    return site.root(0) / ".clustertool/queue" / job


def submission(site: SlurmSite, job: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder_of(site, job) / "submission.json").read_text())
    return found


def blocker(site: SlurmSite) -> str:
    """A job of another program that has all nodes."""
    job = site.lab.slurm("sbatch", "--parsable", f"-N{site.lab.nodes}", "--exclusive", "--wrap", "sleep 1000")
    site.lab.runs(job)
    return job


def is_over(site: SlurmSite, job: str) -> None:
    """The proof: nothing lives, guards too, and Slurm is past COMPLETING."""
    number = str(submission(site, job)["slurm_id"])
    site.lab.over(number)
    site.gone()
