"""Refusals of the API server become errors of the tool, with the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from clustertool.errors import AuthError, ClustertoolError, ConfigError, NotFound, PreflightError
from clustertool.model.kubernetes.pod_reasons import fields, items, text

REPEATED = (429, 500, 502, 503, 504)  # a later attempt may succeed
GONE = 410  # the version of a list is too old: list again
_LONGEST = 600  # characters of a message that are shown
_NO_DRY_RUN = "does not support dry run"  # an admission webhook: it checks objects that are created only
_FORM = re.compile(r"(?:strict decoding error: |cannot be handled as an? \w+: )+(.*)", re.DOTALL)
_RIGHTS = "an administrator grants it: docs/kubernetes.md has the Role"


class AlreadyExists(PreflightError):
    """An object of this name is there."""


class Expired(PreflightError):
    """The version from which a watch was to begin is too old."""


@dataclass(frozen=True)
class Asked:
    """A request, for messages. resource: as in rights. user: as far as it is known. manifest: the request has one."""

    verb: str
    resource: str
    name: str
    namespace: str
    user: str
    where: str
    manifest: bool = False

    @property
    def text(self) -> str:
        inside = f" in the namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{f' {self.name}' if self.name else ''}{inside}"


def refusal(status: int, body: bytes, asked: Asked) -> ClustertoolError:
    """Convert a response that is no success to an error. body: a Status object in JSON, or any text of a proxy."""
    answer = _status(body)
    message = _shown(str(answer.get("message", ""))) or _shown(body.decode(errors="replace"))
    where = asked.where
    if status == 401:
        fix = "log in again, or correct the user of this context: kubectl config view --minify"
        return AuthError(f"the API server refuses the credentials of {asked.user or 'this context'}", fix, where)
    if status == 403 and "exceeded quota" in message:
        return PreflightError(message, "ask for less in KUBERNETES, or wait until other jobs have ended", where)
    if status == 403:
        # A refusal that does not name the user comes from an admission controller: PodSecurity, LimitRange, a webhook.
        fix = _RIGHTS if "User" in message or not message else f"correct KUBERNETES in conf.py, or {_RIGHTS}"
        what = f"{asked.user or 'this user'} may not {asked.text}" + (f": {message}" if message else "")
        return AuthError(what, fix, where)
    if status == 404 and asked.verb == "create":
        what = f"cannot {asked.text}: {message or 'not found'}"
        return PreflightError(what, "is the namespace there, and is the resource definition installed?", where)
    if status == 404:
        return NotFound(f"cannot {asked.text}: {message or 'not found'}", "", where)
    if status == 409:
        return AlreadyExists(f"cannot {asked.text}: {message}", "choose another --job-id, or stop that job", where)
    if status == GONE:
        return Expired(f"cannot {asked.text}: {message}", "try again", where)
    if asked.manifest and status in (400, 422) and _NO_DRY_RUN not in message:
        fix = "correct KUBERNETES in conf.py, [kubernetes] in job.toml, or pod_template"
        return ConfigError(f"the manifest is not right: {_wrong_fields(answer) or message}", fix, where)
    fix = "try again later" if status in REPEATED else "is this the address of an API server?"
    return PreflightError(f"cannot {asked.text}: HTTP {status}: {message}", fix, where)


def _status(body: bytes) -> Mapping[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _wrong_fields(answer: Mapping[str, object]) -> str:
    """Name the wrong fields of a manifest, with the reasons of the server, which lists them or has them in its message."""
    listed = [one for one in items(fields(answer, "details"), "causes") if text(one, "field")]
    if listed:
        return _shown("; ".join(f"{text(one, 'field')}: {text(one, 'message')}" for one in listed))
    form = _FORM.search(str(answer.get("message", "")))
    return _shown(form[1]) if form else ""


def _shown(text: str) -> str:
    clean = "".join(char if char.isprintable() else " " for char in text[: 4 * _LONGEST])
    return " ".join(clean.split())[:_LONGEST]
