"""The objects of the test API server: versions, selectors, changes for watches, deletion with finalizers, and quotas.

Stored objects are never changed, only replaced: a reader may keep what it has got.
"""

from __future__ import annotations

import copy
import hashlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from clustertool.model.kubernetes.api_objects import KINDS, ObjectKind
from tests.kubernetes.api_validation import refusal

Obj = dict[str, Any]
FOREGROUND = "foregroundDeletion"
OVER = ("Succeeded", "Failed")  # phases of pods without a process


class ApiError(Exception):
    """What the server answers with another code than 200."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        causes: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.code, self.headers = code, headers
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "details": {"causes": causes}}
        self.body = {**status, "message": message, "reason": reason, "code": code}


class Change(NamedTuple):
    """before and after: the object, None where it is not there. last: what a watch shows of it."""

    version: int
    kind: str
    before: Obj | None
    after: Obj | None
    last: Obj


def now(offset: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + offset))


def parse_quantity(quantity: str | float) -> Decimal:
    """As parse_quantity() of the official client, whose import takes 0.25 s in each worker that collects the tests."""
    found = re.fullmatch(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)(?:([KMGTPE]i)|([numkMGTPE]))?", str(quantity))
    if not found:
        raise ValueError(f"{quantity!r} is no quantity")
    number, binary, decimal = found.groups()
    if binary:
        return Decimal(number) * 1024 ** (1 + "KMGTPE".index(binary[0]))
    return Decimal(number) * Decimal(1000) ** ("numkMGTPE".index(decimal) - 3 + (decimal in "kMGTPE") if decimal else 0)


def requested(pod: Obj, resource: str) -> float:
    """What the containers of a pod ask for."""
    every = [one.get("resources") or {} for one in pod["spec"].get("containers", [])]
    found = [(one.get("requests") or {}).get(resource, (one.get("limits") or {}).get(resource, 0)) for one in every]
    return float(sum(map(parse_quantity, found)))


def owners(obj: Obj) -> list[Obj]:
    return obj["metadata"].get("ownerReferences", [])


def matches(obj: Obj, labels: str, fields: str) -> bool:
    """Whether it has these labels and fields: "a=b,c=d"."""
    have = obj["metadata"].get("labels") or {}
    return all(have.get(key) == value for key, value in _pairs(labels)) and all(
        str(_field(obj, path)) == value for path, value in _pairs(fields)
    )


class Store:
    """`changed` is notified with each change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str, str], Obj] = {}
        self.changes: list[Change] = []
        self.version = self.oldest = 1000
        self.create("Namespace", "", {"metadata": {"name": "default"}})

    # -- reading

    def find(self, kind: str, namespace: str, name: str) -> Obj | None:
        with self.changed:
            return self.objects.get((kind, namespace, name))

    def get(self, kind: str, namespace: str, name: str) -> Obj:
        if (found := self.find(kind, namespace, name)) is None:
            raise ApiError(404, "NotFound", f'{KINDS[kind].resource} "{name}" not found')
        return found

    def list(self, kind: str, namespace: str = "", labels: str = "", fields: str = "") -> list[Obj]:
        """namespace "": of all."""
        with self.changed:
            every = [o for (k, n, _), o in self.objects.items() if k == kind and namespace in ("", n)]
        return sorted((o for o in every if matches(o, labels, fields)), key=lambda o: o["metadata"]["name"])

    def owned(self, kind: str, owner: Obj) -> list[Obj]:
        uid = owner["metadata"]["uid"]
        return [obj for obj in self.list(kind) if any(one["uid"] == uid for one in owners(obj))]

    def since(self, version: int, kind: str, namespace: str, *selectors: str) -> tuple[int, list[tuple[str, Obj]]]:
        """The version now, and the events of a watch after that version: (ADDED, MODIFIED or DELETED, object)."""
        with self.changed:
            if version < self.oldest:
                raise ApiError(410, "Expired", f"too old resource version: {version} ({self.oldest})")
            newest, changes = self.version, [change for change in self.changes if change.version > version]
        events = []
        for change in changes:
            if change.kind == kind and namespace in ("", change.last["metadata"].get("namespace")):
                was = change.before is not None and matches(change.before, *selectors)
                is_ = change.after is not None and matches(change.after, *selectors)
                if was or is_:
                    events.append(("MODIFIED" if was and is_ else "ADDED" if is_ else "DELETED", change.last))
        return newest, events

    def expire(self) -> None:
        """Forget all changes: a watch from any version that was given out is answered with 410."""
        with self.changed:
            self.version += 10
            self.oldest, self.changes = self.version, []

    # -- writing

    def create(self, kind: str, namespace: str, given: Obj, strict: bool = False, dry: bool = False) -> Obj:
        """strict: an unknown field is an error. dry: it is checked only."""
        known, obj = KINDS[kind], copy.deepcopy(given)
        meta = obj["metadata"]
        if "apiVersion" in obj:
            wrong = refusal(kind, obj, strict)
            if wrong is not None:
                raise ApiError(wrong.code, "Invalid", wrong.message, causes=wrong.causes)
        with self.changed:
            if known.namespaced:
                self.get("Namespace", "", namespace)
                meta["namespace"] = namespace
            key = (kind, namespace, meta["name"])
            if key in self.objects:
                raise ApiError(409, "AlreadyExists", f'{known.resource} "{meta["name"]}" already exists')
            self._quota(known, namespace, obj)
            obj.update(apiVersion=known.version, kind=kind)
            if dry:
                return obj
            meta.update(uid=str(uuid.uuid4()), creationTimestamp=now())
            if kind == "Pod":
                obj["spec"].setdefault("terminationGracePeriodSeconds", 30)
            if kind in ("Pod", "Job", "JobSet", "PaddleJob"):
                obj["status"] = {"phase": "Pending"} if kind == "Pod" else {}
            return self._put(key, obj)

    def update(self, kind: str, namespace: str, name: str, change: Callable[[Obj], Any]) -> Obj | None:
        """Replace an object by a changed copy of it, and delete what waited for this change only. None: it is not there."""
        with self.changed:
            old = self.find(kind, namespace, name)
            new = copy.deepcopy(old)
            if old is None or new is None:
                return None
            change(new)
            if new == old:
                return old
            meta = new["metadata"]
            kept = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
            return self._put((kind, namespace, name), new, gone="deletionTimestamp" in meta and not kept)

    def change(self, obj: Obj, change: Callable[[Obj], Any]) -> None:
        meta = obj["metadata"]
        self.update(obj["kind"], meta.get("namespace", ""), meta["name"], change)

    def delete(self, kind: str, namespace: str, name: str, options: Mapping[str, Any] | None = None) -> Obj:
        """options: of the request. The object as it was left."""
        options = options or {}
        with self.changed:
            obj = self.get(kind, namespace, name)
            uid, have = (options.get("preconditions") or {}).get("uid"), obj["metadata"]["uid"]
            if uid not in (None, have):
                text = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {have}"
                raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on {kind} "{name}": {text}')
            grace = 0
            if kind == "Pod" and obj["spec"].get("nodeName") and obj["status"]["phase"] not in OVER:
                wanted = options.get("gracePeriodSeconds")
                grace = int(obj["spec"]["terminationGracePeriodSeconds"] if wanted is None else wanted)

            def mark(new: Obj) -> None:
                meta = new["metadata"]
                if options.get("propagationPolicy") == "Foreground" and kind != "Pod":
                    meta["finalizers"] = [FOREGROUND]
                if "deletionTimestamp" not in meta or grace < meta["deletionGracePeriodSeconds"]:
                    meta.update(deletionTimestamp=now(grace), deletionGracePeriodSeconds=grace)

            return self.update(kind, namespace, name, mark) or obj

    def event(self, about: Obj, reason: str, message: str, kind: str = "Warning") -> None:
        """An Event, if there is none of this text so far."""
        meta = about["metadata"]
        involved = {"kind": about["kind"], **{name: meta[name] for name in ("namespace", "name", "uid")}}
        name = f"{meta['name']}.{hashlib.sha256(f'{reason} {message}'.encode()).hexdigest()[:16]}"
        given = {"involvedObject": involved, "reason": reason, "message": message, "type": kind}
        if self.find("Event", meta["namespace"], name) is None:
            self.create("Event", meta["namespace"], {"metadata": {"name": name}, **given, "lastTimestamp": now()})

    def _put(self, key: tuple[str, str, str], obj: Obj, gone: bool = False) -> Obj:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        before = self.objects.pop(key, None)
        if not gone:
            self.objects[key] = obj
        self.changes.append(Change(self.version, key[0], before, None if gone else obj, obj))
        self.changed.notify_all()
        return obj

    def _quota(self, kind: ObjectKind, namespace: str, obj: Obj) -> None:
        """Quotas count objects ("pods", "count/jobs.batch") and add what pods request ("requests.cpu")."""
        pods = [pod for pod in self.list("Pod", namespace) if pod["status"]["phase"] not in OVER]
        for quota in self.list("ResourceQuota", namespace):
            for key, hard in quota["spec"]["hard"].items():
                wants = used = 0.0
                if key.removeprefix("count/") == kind.resource:
                    wants, used = 1.0, float(len(pods if kind.name == "Pod" else self.list(kind.name, namespace)))
                elif kind.name == "Pod":
                    resource = key.removeprefix("requests.")
                    wants, used = requested(obj, resource), sum(requested(pod, resource) for pod in pods)
                if wants and used + wants > parse_quantity(hard):
                    amounts = f"requested: {key}={wants:g}, used: {key}={used:g}, limited: {key}={hard}"
                    what = f'{kind.resource} "{obj["metadata"]["name"]}" is forbidden'
                    raise ApiError(403, "Forbidden", f"{what}: exceeded quota: {quota['metadata']['name']}, {amounts}")


def _pairs(selector: str) -> list[list[str]]:
    return [term.split("=", 1) for term in selector.split(",") if term]


def _field(obj: Any, path: str) -> Any:
    for key in path.split("."):
        obj = obj.get(key, "") if isinstance(obj, dict) else ""
    return obj
