"""Settings of the engine kubernetes come from KUBERNETES of conf.py, [kubernetes] of job.toml, and options.

A later source replaces the value of an earlier one. "" and None mean: not given. A value that is an object or a list has the
form that it has in a manifest, and an error names the path of its field.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Callable, Dict, Iterable, Iterator, Mapping, Optional, Tuple, Type, TypeVar

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.config.known_names import nearest
from clustertool.model.kubernetes import field_checks, object_forms
from clustertool.model.kubernetes.field_checks import Check
from clustertool.model.kubernetes.merged_template import Manifest
from clustertool.model.kubernetes.object_names import QUEUE_LABEL
from clustertool.model.kubernetes.pod_places import DIALECTS, JOB, ROLES, Nodes
from clustertool.model.quantities import seconds_of, whole

UNLIMITED = "unlimited"  # shared memory without a size of its own
CLUSTER_CHOOSES = "cluster"  # the user of pods
_MOST = 10_000  # pods
_MOST_USER = (1 << 31) - 1
_OWN = ("clustertool/", QUEUE_LABEL)  # labels and annotations that the tool itself sets
_OPTIONS = {"nodes": "nnodes", "priority_class": "priority-class", "namespace": "namespace"}
_WITH_PVC = 'a volume and a path in it: "pvc:CLAIM/path"'
_VOLUME_KINDS = ("pvc", "configmap", "secret", "emptydir", "hostpath", "image")
Value = TypeVar("Value")


class _NotRight(ValueError):
    """path: of a field in the value. right: what is right there."""

    def __init__(self, right: str, path: str = "") -> None:
        super().__init__(right)
        self.right, self.path = right, path


def _checked(check: Check, value: object, start: str = "") -> None:
    for wrong in check(value, start):
        raise _NotRight(wrong.right, wrong.path)


def _by(check: Check, convert: Callable[..., Value]) -> Callable[[object], Value]:
    def read(value: object) -> Value:
        _checked(check, value)
        return convert(value)

    return read


def _plain(value: Mapping[str, object]) -> Manifest:
    """Copy a mapping so that no one else changes it, with lists for tuples."""
    return {str(name): _copy(one) for name, one in value.items()}


def _copy(value: object) -> object:
    if isinstance(value, Mapping):
        return _plain(value)
    return [_copy(one) for one in value] if isinstance(value, (list, tuple)) else value


def _entries(value: Iterable[Mapping[str, object]]) -> Tuple[Manifest, ...]:
    return tuple(map(_plain, value))


def _one_line(value: object, path: str) -> Iterator[field_checks.Wrong]:
    if not isinstance(value, str) or not value.isprintable():
        yield field_checks.Wrong(path, "a string of one line")


def _nodes(value: object) -> Nodes:
    count = whole(value, 1, _MOST) if not isinstance(value, Mapping) else None
    if count is not None:
        return (("trainer", count),)
    if not isinstance(value, Mapping) or not value:
        raise _NotRight(f'a number of pods from 1 to {_MOST}, or of each role: {{"pserver": 2, "trainer": 4}}')
    for role in value:
        if role not in ROLES:
            raise _NotRight(f"left out: the roles are {', '.join(ROLES)}", str(role))
        if type(value[role]) is not int or not 1 <= value[role] <= _MOST:
            raise _NotRight(f"a whole number from 1 to {_MOST}", str(role))
    if "trainer" not in value:
        raise _NotRight("given: each job has trainers", "trainer")
    return tuple((role, value[role]) for role in ROLES if role in value)


def _resources(value: object) -> Manifest:
    """Read resources as a container has them, or by role: {"trainer": ..., "pserver": ...}, each of the same form."""
    if isinstance(value, Mapping) and value and set(value) <= set(ROLES):
        return {role: _of_container(value[role], str(role)) for role in value}
    return _of_container(value, "")


def _of_container(value: object, path: str) -> Manifest:
    if isinstance(value, Mapping) and value and not set(value) & {"requests", "limits", "claims"}:
        _checked(object_forms.QUANTITIES, value, path)
        given = {name: str(one) for name, one in value.items()}
        return {"requests": given, "limits": dict(given)}
    _checked(object_forms.RESOURCES, value, path)
    assert isinstance(value, Mapping)
    found = _plain(value)
    for kind in {"requests", "limits"} & set(found):
        found[kind] = {name: str(one) for name, one in found[kind].items()}
    for name, amount in found.get("requests", {}).items():  # an extended resource needs both, and the same
        if "/" in name and found.get("limits", {}).setdefault(name, amount) != amount:
            place = field_checks.below(f"{path}.limits" if path else "limits", name)
            raise _NotRight(f"{amount!r}, as in requests: {name} cannot be shared", place)
    return dict(found)


def _volumes(value: object) -> Manifest:
    """Read volumes by their paths in the container.

    A source is "pvc:claim[/path][:ro]", or the source of a volume as in a manifest.
    """
    if not isinstance(value, Mapping):
        raise _NotRight('volumes by their paths in the container: {"/data": "pvc:claim", "/scratch": "emptydir"}')
    for mount, source in value.items():
        place = field_checks.below("", str(mount))
        _checked(field_checks.absolute, mount, place)
        if isinstance(source, Mapping):
            known = set(source) - {"readOnly", "subPath"}
            if len(known) != 1:
                raise _NotRight(f"one source of a volume: {', '.join(object_forms.SOURCES)}", place)
            checks = {**object_forms.SOURCES, "readOnly": field_checks.flag, "subPath": field_checks.text}
            _checked(field_checks.form(checks), source, place)
        elif not _is_volume(source):
            kinds = ", ".join(f"{kind}:NAME" for kind in _VOLUME_KINDS if kind != "emptydir")
            raise _NotRight(f"one of {kinds}, emptydir, with :ro at its end to only read it", place)
    return dict(_plain(value))


def _is_volume(value: object) -> bool:
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    name = rest[:-3] if rest.endswith(":ro") else rest
    if kind == "emptydir":
        return not rest
    if kind == "hostpath":
        return name.startswith("/") and ":" not in name
    if kind == "image":
        return bool(name)
    claim = name.partition("/")[0] if kind == "pvc" else name
    return kind in _VOLUME_KINDS and not any(field_checks.subdomain(claim, "")) and safe_path(name.partition("/")[2])


def safe_path(path: str) -> bool:
    """Check whether a path in a volume is relative and stays there."""
    return path.isprintable() and not path.startswith("/") and ".." not in path.split("/")


def _workspace(value: object) -> str:
    if isinstance(value, str) and value.startswith("image:/") and value.isprintable():
        return value
    if isinstance(value, str) and value.startswith("pvc:") and _is_volume(value) and not value.endswith(":ro"):
        return value
    raise _NotRight(f'a folder of the image: "image:/path", or {_WITH_PVC}')


def _output(value: object) -> str:
    if isinstance(value, str) and value.startswith("pvc:") and _is_volume(value) and not value.endswith(":ro"):
        return value
    raise _NotRight(_WITH_PVC)


def _user(value: object) -> int:
    """Read a uid; 0 where the cluster chooses it."""
    found = 0 if value == CLUSTER_CHOOSES else whole(value, 1, _MOST_USER)
    if found is None:
        raise _NotRight(f'"{CLUSTER_CHOOSES}", or a whole number that is not that of root')
    return found


def _shared_memory(value: object) -> str:
    if value is True:
        return UNLIMITED
    if any(field_checks.quantity(value, "")):
        raise _NotRight('a size such as "8Gi", or True for as much as the container may have of memory')
    return str(value)


def _keep(value: object) -> float:
    found = seconds_of(value)
    if found is None or found > 7 * 24 * 3600:
        raise _NotRight("a duration of at most 7 days: 300, 10m, or 0")
    return found


def _unreserved(check: Check) -> Callable[[object], Dict[str, str]]:
    def read(value: object) -> Dict[str, str]:
        _checked(check, value)
        assert isinstance(value, Mapping)
        for name in value:
            if str(name).startswith(_OWN):
                raise _NotRight("left out: the tool itself sets it", field_checks.below("", str(name)))
        return dict(value)

    return read


def _paddlejob(value: object) -> Manifest:
    checks = {
        "clean_pod_policy": field_checks.one_of(*object_forms.CLEAN_POD_POLICIES),
        "intranet": field_checks.one_of(*object_forms.INTRANETS),
        "with_gloo": field_checks.number(0, 2),
        "image_command": field_checks.flag,
    }
    _checked(field_checks.form(checks), value)
    assert isinstance(value, Mapping)
    return _plain(value)


def _setting(read: Callable[[object], Value]) -> Dict[str, Callable[[object], Value]]:
    """Declare a field that a source may set. read: raises _NotRight."""
    return {"read": read}


_TEXT = _setting(_by(_one_line, str))
_NAME = _setting(_by(field_checks.subdomain, str))


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of a job, checked. Empty ones are not given.

    nodes: how many pods each role has. split: `nodes` names the roles; else each pod plays all roles of the job. resources: of
    a container, or those of each role by its name. volumes: by their paths in the container. shared_memory: the size of
    /dev/shm, or UNLIMITED. user: the uid and the gid, 0 where the cluster chooses them.
    keep: seconds that node 0 waits for a fetch; None: by the rule. pod_template: the path of a file. workspace: ""
    where it is sent. paddlejob: what only that dialect has.
    """

    context: str = field(default="", metadata=_TEXT)
    namespace: str = field(default="", metadata=_setting(_by(field_checks.label, str)))
    nodes: Nodes = field(default=(("trainer", 1),), metadata=_setting(_nodes))
    resources: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_resources))
    node_selector: Dict[str, str] = field(
        default_factory=dict, hash=False, metadata=_setting(_by(object_forms.LABELS, dict))
    )
    tolerations: Tuple[Manifest, ...] = field(
        default=(), hash=False, metadata=_setting(_by(field_checks.items(object_forms.TOLERATION), _entries))
    )
    affinity: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_by(object_forms.AFFINITY, _plain)))
    service_account: str = field(default="", metadata=_NAME)
    image_pull_secrets: Tuple[str, ...] = field(
        default=(), metadata=_setting(_by(field_checks.items(field_checks.subdomain), tuple))
    )
    volumes: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_volumes))
    shared_memory: str = field(default="", metadata=_setting(_shared_memory))
    user: int = field(default=1000, metadata=_setting(_user))
    dialect: str = field(default=JOB, metadata=_setting(_by(field_checks.one_of(*DIALECTS), str)))
    queue: str = field(default="", metadata=_setting(_by(field_checks.label, str)))
    priority_class: str = field(default="", metadata=_NAME)
    labels: Dict[str, str] = field(
        default_factory=dict, hash=False, metadata=_setting(_unreserved(object_forms.LABELS))
    )
    annotations: Dict[str, str] = field(
        default_factory=dict, hash=False, metadata=_setting(_unreserved(object_forms.ANNOTATIONS))
    )
    keep: Optional[float] = field(default=None, metadata=_setting(_keep))
    pod_template: str = field(default="", metadata=_TEXT)
    workspace: str = field(default="", metadata=_setting(_workspace))
    output: str = field(default="", metadata=_setting(_output))
    paddlejob: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_paddlejob))
    split: bool = False

    @property
    def node_count(self) -> int:
        return sum(count for _, count in self.nodes)

    def resources_of(self, role: str) -> Manifest:
        """Return the resources of a container of this role, {} for none."""
        if set(self.resources) & set(ROLES):
            return dict(self.resources.get(role, {}))
        return self.resources


_FIELDS = {each.name: each for each in fields(KubernetesSettings) if each.name != "split"}
SETTINGS = tuple(_FIELDS)


def read_settings(
    conf: Mapping[str, object],
    toml: Optional[Mapping[str, object]] = None,
    typed: Optional[Mapping[str, object]] = None,
    where: str = "conf.py",
) -> KubernetesSettings:
    """Read the settings of the three sources. where: the conf.py. typed: by the names of the settings.

    Raises ConfigError (78) for an error in conf.py, DataError (65) for job.toml, UsageError (64) for the command line.
    """
    found = {
        **_read(conf, ConfigError, lambda name: f"{where}: KUBERNETES: {name}"),
        **_read(toml or {}, DataError, lambda name: f"job.toml: [kubernetes] {name}"),
        **_read(typed or {}, UsageError, lambda name: f"--{_OPTIONS.get(name) or name.replace('_', '-')}"),
    }
    split = next((isinstance(of.get("nodes"), Mapping) for of in (typed, toml, conf) if of and of.get("nodes")), False)
    made = KubernetesSettings(**found, split=split)
    by_role = set(made.resources) & set(ROLES)
    if made.dialect == JOB and by_role and len({repr(made.resources_of(role)) for role, _ in made.nodes}) > 1:
        what = f"{where}: KUBERNETES: resources.{sorted(by_role)[0]}: pods of an Indexed Job are all alike"
        raise ConfigError(what, 'dialect "jobset" has a template for each role')
    return made


def _read(values: Mapping[str, object], error: Type[ClustertoolError], place: Callable[[str], str]) -> Manifest:
    found = {}
    for name, value in values.items():
        if name not in _FIELDS:
            raise error(f"{place(str(name))} = {value!r}: this key is not known", nearest(name, SETTINGS))
        if value is None or value == "":
            continue
        try:
            found[name] = _FIELDS[name].metadata["read"](value)
        except _NotRight as wrong:
            path = name + ("" if not wrong.path else wrong.path if wrong.path[0] == "[" else f".{wrong.path}")
            fix = f"{path} is {wrong.right}"
            shown = repr(value)
            raise error(f"{place(path)} is not right in {shown[:200]}", fix) from None
    return found
