"""Settings of the engine kubernetes come from KUBERNETES of conf.py, [kubernetes] of job.toml, and options.

A later source replaces the value of an earlier one. "" and None mean: not given. A value that is an object or a list has the
form that it has in a manifest, and an error names the path of its field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Callable, Collection, Dict, List, Mapping, Optional, Tuple, TypeVar

from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.model.config.value_readers import ErrorKind, Place, Values, nearest
from clustertool.model.kubernetes.api_objects import Json, Manifest
from clustertool.model.kubernetes.node_view import quantity
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
_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_PADDLEJOB: Dict[str, Collection[object]] = {
    "clean_pod_policy": ("Never", "Always", "OnFailure", "OnCompletion"),
    "intranet": ("PodIP", "Service", "Host"),
    "with_gloo": (0, 1, 2),
    "image_command": (False, True),
}
Value = TypeVar("Value")


class NotRight(ValueError):
    """The error of a wrong value. path: of a field in it, such as `[0].name`, "" for the value itself. right: what is right."""

    def __init__(self, right: str, path: str = "") -> None:
        super().__init__(right)
        self.right, self.path = right, path


def is_label(value: object) -> bool:
    """Return whether a value is a DNS label: a name of an object that can be a part of a host name."""
    return isinstance(value, str) and len(value) <= 63 and bool(re.fullmatch(_NAME, value))


def plain_json(value: object, path: str = "") -> Json:
    """Copy a value of JSON, with lists for tuples. Raises NotRight with the path of another value, such as a date of YAML."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise NotRight("a string", _field_path(path, str(name)))
        return {name: plain_json(one, _field_path(path, name)) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(one, f"{path}[{index}]") for index, one in enumerate(value)]
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise NotRight("a string, a number, true, false, null, a list or an object", path)
    return value


def _field_path(path: str, name: str) -> str:
    """Return the path of a field in an object. A name with a point or a slash is quoted."""
    if not re.fullmatch(r"[\w-]+", name):
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else name


def _text_line(value: object) -> str:
    """Check a string of one line. Raises NotRight."""
    if not isinstance(value, str) or not value.isprintable():
        raise NotRight("a string of one line")
    return value


def _label(value: object) -> str:
    """Check a DNS label. Raises NotRight."""
    if not isinstance(value, str) or not is_label(value):
        raise NotRight("a name of small letters, digits and -, at most 63 characters")
    return value


def _is_subdomain(value: object) -> bool:
    """Return whether a value is a DNS subdomain: labels with dots between, at most 253 characters."""
    return isinstance(value, str) and len(value) <= 253 and bool(re.fullmatch(rf"{_NAME}(\.{_NAME})*", value))


def _subdomain(value: object, path: str = "") -> str:
    """Check a DNS subdomain. Raises NotRight."""
    if not isinstance(value, str) or not _is_subdomain(value):
        raise NotRight("a name of small letters, digits, - and .", path)
    return value


def _entries(value: object) -> List[object]:
    """Check a list or a tuple, and copy it. Raises NotRight."""
    if not isinstance(value, (list, tuple)):
        raise NotRight("a list")
    return list(value)


def _subdomains(value: object) -> Tuple[str, ...]:
    """Check a list of DNS subdomains. Raises NotRight."""
    return tuple(_subdomain(one, f"[{index}]") for index, one in enumerate(_entries(value)))


def _object(value: object, path: str = "") -> Manifest:
    """Check an object of JSON, and copy it. Raises NotRight."""
    if not isinstance(value, Mapping):
        raise NotRight("an object with fields", path)
    return dict(plain_json(value, path))


def _objects(value: object) -> Tuple[Manifest, ...]:
    """Check a list of objects of JSON, and copy them. Raises NotRight."""
    return tuple(_object(one, f"[{index}]") for index, one in enumerate(_entries(value)))


def _texts_by_name(value: object) -> Dict[str, str]:
    """Check an object whose fields are strings. Raises NotRight."""
    found = _object(value)
    for name, one in found.items():
        if not isinstance(one, str):
            raise NotRight("a string", _field_path("", name))
    return found


def _unreserved(value: object) -> Dict[str, str]:
    """Check labels or annotations. Raises NotRight for a name that the tool itself sets."""
    found = _texts_by_name(value)
    for name in found:
        if name.startswith(_OWN):
            raise NotRight("left out: the tool itself sets it", _field_path("", name))
    return found


def _dialect(value: object) -> str:
    """Check for one of DIALECTS. Raises NotRight."""
    if not isinstance(value, str) or value not in DIALECTS:
        raise NotRight(f"one of {', '.join(DIALECTS)}")
    return value


def _amount(value: object, path: str = "") -> str:
    """Check a quantity of a resource, and return it as text. Raises NotRight."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError("no quantity")
        quantity(str(value))
    except ValueError:
        raise NotRight('a number, or one with a unit of Kubernetes: 4, "500m", "64Gi"', path) from None
    return str(value)


def read_amounts(value: object, path: str) -> Dict[str, str]:
    """Check an object of resource amounts, and return them as texts by their names. Raises NotRight."""
    return {name: _amount(one, _field_path(path, name)) for name, one in _object(value, path).items()}


def _nodes(value: object) -> Nodes:
    """Check a number of pods, or one for each role, and return (role, number) in the order of the nodes.

    A number alone is that of the trainers. Raises NotRight for another value, an unknown role, a wrong number, and roles
    without trainers.
    """
    count = whole(value, 1, _MOST) if not isinstance(value, Mapping) else None
    if count is not None:
        return (("trainer", count),)
    if not isinstance(value, Mapping) or not value:
        raise NotRight(f'a number of pods from 1 to {_MOST}, or of each role: {{"pserver": 2, "trainer": 4}}')
    for role in value:
        if role not in ROLES:
            raise NotRight(f"left out: the roles are {', '.join(ROLES)}", str(role))
        if type(value[role]) is not int or not 1 <= value[role] <= _MOST:
            raise NotRight(f"a whole number from 1 to {_MOST}", str(role))
    if "trainer" not in value:
        raise NotRight("given: each job has trainers", "trainer")
    return tuple((role, value[role]) for role in ROLES if role in value)


def _resources(value: object) -> Manifest:
    """Check resources of a container, or by role: {"trainer": ..., "pserver": ...}, each of the same form. Raises NotRight."""
    if isinstance(value, Mapping) and value and set(value) <= set(ROLES):
        return {role: _of_container(value[role], str(role)) for role in value}
    return _of_container(value, "")


def _of_container(value: object, path: str) -> Manifest:
    """Check the resources of a container; amounts alone count as requests and limits. Raises NotRight.

    Requests of an extended resource (its name has a slash) become limits, too.
    """
    found = _object(value, path)
    if found and not set(found) & {"requests", "limits", "claims"}:
        given = read_amounts(found, path)
        return {"requests": given, "limits": dict(given)}
    for kind in {"requests", "limits"} & set(found):
        found[kind] = read_amounts(found[kind], _field_path(path, kind))
    for name, amount in found.get("requests", {}).items():  # an extended resource needs both, and the same
        if "/" in name and found.setdefault("limits", {}).setdefault(name, amount) != amount:
            limit = _field_path(_field_path(path, "limits"), name)
            raise NotRight(f"{amount!r}, as in requests: {name} cannot be shared", limit)
    return found


def _volumes(value: object) -> Manifest:
    """Check volumes by their paths in the container. Raises NotRight.

    A source is "pvc:claim[/path][:ro]" or the like, or the source of a volume as in a manifest.
    """
    if not isinstance(value, Mapping):
        raise NotRight('volumes by their paths in the container: {"/data": "pvc:claim", "/scratch": "emptydir"}')
    found = _object(value)
    for mount, source in found.items():
        place = _field_path("", mount)
        if not re.fullmatch(r"/[^:\0\n]{0,1023}", mount):
            raise NotRight("an absolute path without `:`", place)
        if isinstance(source, dict):
            if len(set(source) - {"readOnly", "subPath"}) != 1:
                raise NotRight('one source of a volume, as in a manifest: {"configMap": {"name": "words"}}', place)
        elif not _is_volume(source):
            kinds = ", ".join(f"{kind}:NAME" for kind in _VOLUME_KINDS if kind != "emptydir")
            raise NotRight(f"one of {kinds}, with :ro at its end to only read it, or emptydir", place)
    return found


def _is_volume(value: object) -> bool:
    """Return whether a value is the short form of a volume's source: emptydir, or KIND:NAME[:ro]; of pvc also with a path."""
    kind, _, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    name = rest[:-3] if rest.endswith(":ro") else rest
    if kind == "emptydir":
        return not rest
    if kind == "hostpath":
        return name.startswith("/") and ":" not in name
    if kind == "image":
        return bool(name)
    claim = name.partition("/")[0] if kind == "pvc" else name
    return kind in _VOLUME_KINDS and _is_subdomain(claim) and safe_path(name.partition("/")[2])


def safe_path(path: str) -> bool:
    """Return whether a path in a volume is relative and stays in the volume."""
    return path.isprintable() and not path.startswith("/") and ".." not in path.split("/")


def _workspace(value: object) -> str:
    """Check the place of a workspace: a folder of the image, or one on a volume that can be written. Raises NotRight."""
    if isinstance(value, str) and value.startswith("image:/") and value.isprintable():
        return value
    return _writable_claim(value, f'a folder of the image: "image:/path", or {_WITH_PVC}')


def _writable_claim(value: object, right: str = _WITH_PVC) -> str:
    """Check for a claim of a volume that can be written, "pvc:CLAIM[/path]". Raises NotRight, which states `right`."""
    if isinstance(value, str) and value.startswith("pvc:") and _is_volume(value) and not value.endswith(":ro"):
        return value
    raise NotRight(right)


def _user(value: object) -> int:
    """Check a uid, and return it; 0 for "cluster", which chooses it. Raises NotRight."""
    found = 0 if value == CLUSTER_CHOOSES else whole(value, 1, _MOST_USER)
    if found is None:
        raise NotRight(f'"{CLUSTER_CHOOSES}", or a whole number that is not that of root')
    return found


def _shared_memory(value: object) -> str:
    """Check a size of shared memory; True becomes UNLIMITED. Raises NotRight."""
    if value is True:
        return UNLIMITED
    try:
        return _amount(value)
    except NotRight:
        raise NotRight('a size such as "8Gi", or True for as much as the container may have of memory') from None


def _keep(value: object) -> float:
    """Check a duration of at most 7 days, and return its seconds. Raises NotRight."""
    found = seconds_of(value)
    if found is None or found > 7 * 24 * 3600:
        raise NotRight("a duration of at most 7 days: 300, 10m, or 0")
    return found


def _paddlejob(value: object) -> Manifest:
    """Check that an object has only known fields of a PaddleJob, with known values, and copy it. Raises NotRight."""
    found = _object(value)
    for name, one in found.items():
        known = _PADDLEJOB.get(name)
        if known is None:
            raise NotRight(f"left out, since no such field is known; {nearest(name, _PADDLEJOB, 'known are')}", name)
        if not any(type(one) is type(other) and one == other for other in known):
            raise NotRight(f"one of {', '.join(map(str, known))}", name)
    return found


def _setting(read: Callable[[object], Value]) -> Dict[str, Callable[[object], Value]]:
    """Build the metadata of a field that a source may set. read: checks a value; raises NotRight."""
    return {"read": read}


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of a job, checked. Empty ones are not given.

    nodes: how many pods each role has. split: `nodes` names the roles; else each pod plays all roles of the job. resources: of
    a container, or those of each role by its name. volumes: by their paths in the container. shared_memory: the size of
    /dev/shm, or UNLIMITED. user: the uid and the gid, 0 where the cluster chooses them.
    keep: seconds that node 0 waits for a fetch; None: by the rule. pod_template: the path of a file. workspace: ""
    where it is sent. paddlejob: what only that dialect has.
    """

    context: str = field(default="", metadata=_setting(_text_line))
    namespace: str = field(default="", metadata=_setting(_label))
    nodes: Nodes = field(default=(("trainer", 1),), metadata=_setting(_nodes))
    resources: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_resources))
    node_selector: Dict[str, str] = field(default_factory=dict, hash=False, metadata=_setting(_texts_by_name))
    tolerations: Tuple[Manifest, ...] = field(default=(), hash=False, metadata=_setting(_objects))
    affinity: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_object))
    service_account: str = field(default="", metadata=_setting(_subdomain))
    image_pull_secrets: Tuple[str, ...] = field(default=(), metadata=_setting(_subdomains))
    volumes: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_volumes))
    shared_memory: str = field(default="", metadata=_setting(_shared_memory))
    user: int = field(default=1000, metadata=_setting(_user))
    dialect: str = field(default=JOB, metadata=_setting(_dialect))
    queue: str = field(default="", metadata=_setting(_label))
    priority_class: str = field(default="", metadata=_setting(_subdomain))
    labels: Dict[str, str] = field(default_factory=dict, hash=False, metadata=_setting(_unreserved))
    annotations: Dict[str, str] = field(default_factory=dict, hash=False, metadata=_setting(_unreserved))
    keep: Optional[float] = field(default=None, metadata=_setting(_keep))
    pod_template: str = field(default="", metadata=_setting(_text_line))
    workspace: str = field(default="", metadata=_setting(_workspace))
    output: str = field(default="", metadata=_setting(_writable_claim))
    paddlejob: Manifest = field(default_factory=dict, hash=False, metadata=_setting(_paddlejob))
    split: bool = False

    @property
    def node_count(self) -> int:
        """The number of pods of all roles."""
        return sum(count for _, count in self.nodes)

    def resources_of(self, role: str) -> Manifest:
        """Return the resources of a container of this role, as given by role or for all roles; {} if none were given."""
        return dict(self.resources.get(role, {})) if set(self.resources) & set(ROLES) else self.resources


_FIELDS = {each.name: each for each in fields(KubernetesSettings) if each.name != "split"}
SETTINGS = tuple(_FIELDS)


def read_settings(
    conf: Values, toml: Optional[Values] = None, typed: Optional[Values] = None, where: str = "conf.py"
) -> KubernetesSettings:
    """Read and check the settings of conf.py, job.toml and the command line; later ones replace earlier ones.

    where: the path of conf.py. typed: by the names of the settings. Raises ConfigError (78) for an error in conf.py, DataError
    (65) for job.toml, UsageError (64) for the command line; ConfigError, too, if roles of an Indexed Job have different
    resources.
    """
    found = {
        **_read_source(conf, ConfigError, lambda name: f"{where}: KUBERNETES: {name}"),
        **_read_source(toml or {}, DataError, lambda name: f"job.toml: [kubernetes] {name}"),
        **_read_source(typed or {}, UsageError, lambda name: f"--{_OPTIONS.get(name) or name.replace('_', '-')}"),
    }
    split = next((isinstance(of.get("nodes"), Mapping) for of in (typed, toml, conf) if of and of.get("nodes")), False)
    made = KubernetesSettings(**found, split=split)
    by_role = set(made.resources) & set(ROLES)
    if made.dialect == JOB and by_role and len({repr(made.resources_of(role)) for role, _ in made.nodes}) > 1:
        what = f"{where}: KUBERNETES: resources.{sorted(by_role)[0]}: pods of an Indexed Job are all alike"
        raise ConfigError(what, 'dialect "jobset" has a template for each role')
    return made


def _read_source(values: Values, error: ErrorKind, place: Place) -> Manifest:
    """Check the settings of one source; those that are None or "" are left out.

    Raises `error` for an unknown name and for a wrong value. place: how a message names a setting.
    """
    found = {}
    for name, value in values.items():
        if name not in _FIELDS:
            raise error(f"{place(str(name))} = {value!r}: this key is not known", nearest(name, SETTINGS))
        if value is None or value == "":
            continue
        try:
            found[name] = _FIELDS[name].metadata["read"](value)
        except NotRight as wrong:
            path = name + ("" if not wrong.path else wrong.path if wrong.path[0] == "[" else f".{wrong.path}")
            fix = f"{path} is {wrong.right}"
            shown = repr(value)
            raise error(f"{place(path)} is not right in {shown[:200]}", fix) from None
    return found
