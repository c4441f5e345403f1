"""The tool merges its own template of pods into a user's: the tool's values have priority."""

from __future__ import annotations

from typing import Any, Dict, List

Json = Any  # a value of an object, as the API server sends it
Manifest = Dict[str, Json]
# The key by which entries of two lists are the same. Entries of other lists are added to each other.
_KEYS = {
    "containers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
_WHOLE = ("command", "args")  # lists that are replaced
# Where the user's value has priority, and null removes ours: rules of a cluster, or the user of an image, need other ones.
_OF_USER = ("securityContext",)


def merge(users: Manifest, ours: Manifest) -> Manifest:
    """Merge two templates into one with the fields of both."""
    found = dict(users)
    for name, value in ours.items():
        theirs = users.get(name)
        if isinstance(theirs, dict) and isinstance(value, dict):
            found[name] = _without_null(merge(value, theirs)) if name in _OF_USER else merge(theirs, value)
        elif isinstance(theirs, list) and isinstance(value, list) and name not in _WHOLE:
            found[name] = _lists(theirs, value, _KEYS.get(name, ""))
        else:
            found[name] = value
    return found


def _without_null(fields: Manifest) -> Manifest:
    return {name: value for name, value in fields.items() if value is not None}


def _lists(theirs: List[Manifest], ours: List[Manifest], key: str) -> List[Manifest]:
    """Merge two lists, ours first: the operator of PaddleJobs gives its variables to the first container."""

    def of(entry: object) -> object:
        return entry.get(key) if key and isinstance(entry, dict) else None

    known = {of(entry): entry for entry in theirs if of(entry) is not None}
    mine = [merge(known.pop(of(entry)), entry) if of(entry) in known else entry for entry in ours]
    rest = [entry for entry in theirs if of(entry) is None or of(entry) in known]
    return [*mine, *(entry for entry in rest if entry not in mine)]
