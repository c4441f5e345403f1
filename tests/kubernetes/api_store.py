"""The objects of the test API server: versions, selectors, watches, deletion with finalizers, and a quota.

Stored objects are never changed, only replaced: a reader may keep what it has got.
"""

from __future__ import annotations

import copy
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import kubernetes_validate

from clustertool.engines.kubernetes.api.object_kinds import KINDS, ObjectKind

Obj = dict[str, Any]
FOREGROUND = "foregroundDeletion"


class ApiError(Exception):
    """What the server answers with another code than 200."""

    def __init__(self, code: int, reason: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code, self.headers = code, more.pop("headers", {})
        base = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self.body = {**base, "message": message, "reason": reason, "code": code, **more}


class Change(NamedTuple):
    """old: the object before, {} for a new one."""

    version: int
    kind: str
    type: str
    new: Obj
    old: Obj


def now(offset: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + offset))


def quantity(text: Any) -> float:
    units = {"m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * units[unit]


def requested(pod: Obj, resource: str) -> float:
    every = [one.get("resources") or {} for one in pod["spec"].get("containers", [])]
    found = [(one.get("requests") or {}).get(resource, (one.get("limits") or {}).get(resource, 0)) for one in every]
    return sum(map(quantity, found))


def matches(obj: Obj, labels: str, fields: str) -> bool:
    have = obj["metadata"].get("labels") or {}
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", labels):
        if found := re.fullmatch(r"\s*(\S+) (in|notin) \((.*)\)", term):
            inside = have.get(found[1]) in [one.strip() for one in found[3].split(",")]
            good = inside == (found[2] == "in")
        elif "=" in term:
            key, operator, value = re.fullmatch(r"(.+?)(!=|==?)(.*)", term).groups()  # type: ignore[union-attr]
            good = (have.get(key.strip()) == value.strip()) == (operator != "!=")
        else:
            good = (term.strip().lstrip("!") in have) != term.startswith("!")
        if not good:
            return False
    for term in filter(None, fields.split(",")):
        path, operator, value = re.fullmatch(r"(.+?)(!=|==?)(.*)", term).groups()  # type: ignore[union-attr]
        at: Any = obj
        for key in path.split("."):
            at = at.get(key, "") if isinstance(at, dict) else ""
        if (str(at) == value) != (operator != "!="):
            return False
    return True


class Store:
    """`changed` is notified with each change."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str, str], Obj] = {}
        self.changes: list[Change] = []
        self.version = self.oldest = 1000
        for name in ("default", "kube-system"):
            self.create("Namespace", "", {"metadata": {"name": name}})

    # -- reading

    def find(self, kind: str, namespace: str, name: str) -> Obj | None:
        with self.changed:
            return self.objects.get((kind, namespace if KINDS[kind].namespaced else "", name))

    def get(self, kind: str, namespace: str, name: str) -> Obj:
        if (found := self.find(kind, namespace, name)) is None:
            details = {"name": name, "kind": KINDS[kind].plural, "group": KINDS[kind].group}
            raise ApiError(404, "NotFound", f'{KINDS[kind].resource} "{name}" not found', details=details)
        return found

    def list(self, kind: str, namespace: str = "", labels: str = "", fields: str = "") -> list[Obj]:
        """namespace "": of all."""
        with self.changed:
            every = [o for (k, n, _), o in self.objects.items() if k == kind and namespace in ("", n)]
        return sorted((o for o in every if matches(o, labels, fields)), key=lambda o: o["metadata"]["name"])

    def owned(self, kind: str, owner: Obj) -> list[Obj]:
        uid, namespace = owner["metadata"]["uid"], owner["metadata"].get("namespace", "")
        return [o for o in self.list(kind, namespace) if uid in _owners(o)]

    def watch(
        self, kind: str, namespace: str, labels: str, fields: str, version: int, wait: Callable[[], bool]
    ) -> Iterator[tuple[str, Obj]]:
        """What changes after a version, until wait() is false. ("", {}): nothing happened for a moment."""
        while True:
            with self.changed:
                if version < self.oldest:
                    text = f"too old resource version: {version} ({self.oldest})"
                    yield "ERROR", ApiError(410, "Expired", text).body
                    return
                found = [change for change in self.changes if change.version > version]
                if not found:
                    self.changed.wait(0.3)
            for change in found:
                version = change.version
                if change.kind == kind and namespace in ("", change.new["metadata"].get("namespace", "")):
                    is_, was = matches(change.new, labels, fields), bool(change.old)
                    was = was and matches(change.old, labels, fields)
                    if change.type == "DELETED" and was:
                        yield "DELETED", change.new
                    elif change.type != "DELETED" and (is_ or was):
                        yield "MODIFIED" if is_ and was else "ADDED" if is_ else "DELETED", change.new
            if not found:
                yield "", {}
            if not wait():
                return

    def expire(self) -> None:
        """Forget all changes: a watch from any version that was given out is answered with 410."""
        with self.changed:
            self.version += 10
            self.oldest, self.changes = self.version, []
            self.changed.notify_all()

    # -- writing

    def create(self, kind: str, namespace: str, given: Obj, dry: bool = False) -> Obj:
        known = KINDS[kind]
        obj = copy.deepcopy(given)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        name = meta["name"]
        self._check(known, obj)
        with self.changed:
            if known.namespaced:
                self.get("Namespace", "", namespace)
                meta["namespace"] = namespace
            key = (kind, meta.get("namespace", ""), name)
            if key in self.objects:
                details = {"name": name, "kind": known.plural, "group": known.group}
                text = f'{known.resource} "{name}" already exists'
                raise ApiError(409, "AlreadyExists", text, details=details)
            if known.namespaced:
                self._quota(known, namespace, obj)
            obj["apiVersion"], obj["kind"] = known.version, kind
            meta.update(uid=str(uuid.uuid4()), creationTimestamp=now(), generation=1)
            if kind == "Pod":
                obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
                obj["spec"].setdefault("terminationGracePeriodSeconds", 30)
            if kind in ("Job", "JobSet", "PaddleJob"):
                obj["status"] = {}
            return obj if dry else self._put(key, obj, "ADDED")

    def update(self, kind: str, namespace: str, name: str, change: Callable[[Obj], Any]) -> Obj | None:
        """Replace an object by a changed copy of it. None: it is not there."""
        with self.changed:
            old = self.find(kind, namespace, name)
            if old is None:
                return None
            new = copy.deepcopy(old)
            change(new)
            key = (kind, old["metadata"].get("namespace", ""), name)
            if new == old:
                return old
            meta = new["metadata"]
            if new.get("spec") != old.get("spec"):
                meta["generation"] = meta.get("generation", 1) + 1
            over = meta.get("deletionTimestamp") and not meta.get("finalizers")
            if over and not meta.get("deletionGracePeriodSeconds"):
                return self._put(key, new, "DELETED")
            return self._put(key, new, "MODIFIED")

    def status(self, obj: Obj, **fields: Any) -> None:
        meta = obj["metadata"]
        self.update(obj["kind"], meta.get("namespace", ""), meta["name"], lambda o: o["status"].update(fields))

    def delete(self, kind: str, namespace: str, name: str, options: Mapping[str, Any] | None = None) -> Obj:
        """options: of the request. The object as it was left."""
        options = options or {}
        with self.changed:
            obj = self.get(kind, namespace, name)
            uid = (options.get("preconditions") or {}).get("uid")
            if uid and uid != obj["metadata"]["uid"]:
                have = obj["metadata"]["uid"]
                text = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {have}"
                raise ApiError(409, "Conflict", f'Operation cannot be fulfilled on {kind} "{name}": {text}')
            grace = 0
            if kind == "Pod":
                grace = options.get("gracePeriodSeconds")
                grace = obj["spec"]["terminationGracePeriodSeconds"] if grace is None else int(grace)
                if not obj["spec"].get("nodeName") or obj["status"]["phase"] in ("Succeeded", "Failed"):
                    grace = 0

            def mark(new: Obj) -> None:
                meta = new["metadata"]
                if options.get("propagationPolicy") == "Foreground" and kind != "Pod":
                    meta["finalizers"] = sorted({*meta.get("finalizers", ()), FOREGROUND})
                if "deletionTimestamp" not in meta or grace < meta.get("deletionGracePeriodSeconds", 0):
                    meta["deletionTimestamp"] = now(grace)
                    meta["deletionGracePeriodSeconds"] = grace

            return self.update(kind, namespace, name, mark) or obj

    def event(self, about: Obj, reason: str, message: str, kind: str = "Warning") -> None:
        """An Event, or one more of it."""
        meta = about["metadata"]
        names = ("namespace", "name", "uid")
        involved = {"kind": about["kind"], "apiVersion": about["apiVersion"], **{n: meta.get(n) for n in names}}
        namespace = meta.get("namespace", "default")
        with self.changed:
            for old in self.list("Event", namespace, fields=f"involvedObject.uid={meta['uid']},reason={reason}"):
                if old["message"] == message:
                    more = {"count": old["count"] + 1, "lastTimestamp": now()}
                    if old["lastTimestamp"] != now():
                        self.update("Event", namespace, old["metadata"]["name"], lambda o, more=more: o.update(more))
                    return
            given = {"involvedObject": involved, "reason": reason, "message": message, "type": kind, "count": 1}
            times = {"firstTimestamp": now(), "lastTimestamp": now(), "source": {"component": "test"}}
            name = {"metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:16]}"}}
            self.create("Event", namespace, {**name, **given, **times})

    def _put(self, key: tuple[str, str, str], obj: Obj, type_: str) -> Obj:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        old = self.objects.pop(key, {})
        if type_ != "DELETED":
            self.objects[key] = obj
        self.changes.append(Change(self.version, key[0], type_, obj, old))
        self.changed.notify_all()
        return obj

    def _check(self, kind: ObjectKind, obj: Obj) -> None:
        name = obj["metadata"]["name"]
        if kind.name != "Event" and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            raise ApiError(422, "Invalid", f'{kind.name}.{kind.group} "{name}" is invalid: metadata.name: "{name}"')
        if kind.name in ("Job", "Secret", "Service") and "apiVersion" in obj:
            try:
                kubernetes_validate.validate(obj, "1.37", strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(map(str, error.path))
                raise ApiError(422, "Invalid", f'{kind.name} "{name}" is invalid: {path}: {error.message}') from None

    def _quota(self, kind: ObjectKind, namespace: str, obj: Obj) -> None:
        for quota in self.list("ResourceQuota", namespace):
            for key, hard in (quota["spec"].get("hard") or {}).items():
                count = key.removeprefix("count/")
                have = [p for p in self.list("Pod", namespace) if p["status"]["phase"] not in ("Succeeded", "Failed")]
                if count == kind.resource:
                    wants, used = 1.0, float(len(have if kind.name == "Pod" else self.list(kind.name, namespace)))
                elif kind.name == "Pod" and count not in [k.resource for k in KINDS.values()]:
                    resource = key.removeprefix("requests.")
                    wants, used = requested(obj, resource), sum(requested(pod, resource) for pod in have)
                else:
                    continue
                if wants and used + wants > quantity(hard):
                    amounts = f"requested: {key}={wants:g}, used: {key}={used:g}, limited: {key}={hard}"
                    text = f"exceeded quota: {quota['metadata']['name']}, {amounts}"
                    name = obj["metadata"]["name"]
                    raise ApiError(403, "Forbidden", f'{kind.resource} "{name}" is forbidden: {text}')


def _owners(obj: Obj) -> Iterable[str]:
    return [reference["uid"] for reference in obj["metadata"].get("ownerReferences", ())]
