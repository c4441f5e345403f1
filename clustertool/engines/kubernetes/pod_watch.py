"""The watch of pods reads what a cluster does to them: a pod that was preempted is soon gone, and its reason with it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

from clustertool.engines.kubernetes.api.object_kinds import Manifest, Object
from clustertool.errors import ClustertoolError
from clustertool.model.kubernetes.object_names import JOB_LABEL, job_hash
from clustertool.model.kubernetes.pod_reasons import PodFault, PodView, end_of, fields, text, view

_PAUSE = 5.0  # seconds after the server has refused a watch


class PodEvents(Protocol):
    """Of ClusterApi, what is used here."""

    def watch(self, kind: str, labels: Mapping[str, str] | None = None) -> Iterator[tuple[str, Manifest]]: ...


class PodWatch:
    """start() begins it in a thread, which ends with the process or soon after close()."""

    def __init__(self, api: PodEvents) -> None:
        self._api = api
        self._closed = threading.Event()
        self._started = False
        self._views: dict[
            str, dict[str, PodView]
        ] = {}  # those that explain the end of a job, by its hash and their names
        self._stuck: dict[str, dict[str, PodView]] = {}  # those that have not started because of their images

    def start(self, labels: Mapping[str, str]) -> None:
        """Start to watch the pods with these labels, in a thread. Called again it does nothing."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, args=(labels,), name="pod watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def cause(self, job: str) -> tuple[str, int] | None:
        """Return why pods of a job have ended or never started, and the exit code of that."""
        found = end_of(list(self._views.get(job_hash(job), {}).values()))
        waiting = list(self._stuck.get(job_hash(job), {}).values())
        if found is not None or not waiting:
            return found
        return f"pod {waiting[0].name}: {waiting[0].reason}", waiting[0].exit_code

    def take(self, pod: Object) -> None:
        """Keep what an object of a pod states."""
        found = view(pod)
        of_job = text(fields(fields(pod, "metadata"), "labels"), JOB_LABEL)
        if found.fault is PodFault.IMAGE:
            self._stuck.setdefault(of_job, {})[found.name] = found
        elif not found.deleted and found.fault is PodFault.NONE:
            self._stuck.get(of_job, {}).pop(found.name, None)
        if end_of([found]) is not None:
            self._views.setdefault(of_job, {}).setdefault(found.name, found)

    def _run(self, labels: Mapping[str, str]) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(ClustertoolError):
                for kind, found in self._api.watch("Pod", labels):
                    if self._closed.is_set():
                        return
                    for pod in found["items"] if kind == "LISTED" else [found]:
                        self.take(pod)
            self._closed.wait(_PAUSE)
