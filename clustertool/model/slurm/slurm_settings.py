"""Settings of the engine slurm come from SLURM of conf.py, [slurm] of job.toml, and options of the command line, in this order.

A key has the name and the form of an option of sbatch. A later source replaces the value of an earlier one; only `options` are
added. "" and None mean: not given.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field, fields
from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.model.config.hosts import Host, read_hosts
from clustertool.model.config.value_readers import ErrorKind, Place, Reader, Values, read_values
from clustertool.model.hints import PROGRAM
from clustertool.model.quantities import whole
from clustertool.model.slurm.slurm_times import as_limit

_MOST = 10_000
TIME_LIMIT = "time_limit"  # of requeue_on
# Options of sbatch that a key or the tool itself sets, with the fix. The others can stand in `options`.
_KEYS = "partition account qos time mem gpus-per-node exclusive constraint nodelist exclude reservation requeue".split()
_TAKEN = {
    **{name: f"set the key {name.replace('-', '_')}" for name in _KEYS},
    "no-requeue": "it is the default; the key is requeue",
    "nodes": "set the key nodes, or give --nnodes",
    "cpus-per-task": "set the key cpus_per_node",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"),
        "a job has one task per node, which starts the ranks there; their number is --nproc-per-node",
    ),
    "array": "a job is submitted once",
    "clusters": "submit from a login host of that cluster: the key login",
    "job-name": "give --name",
    "wrap": "the script is that of clustertool",
    **dict.fromkeys(("container", "container-id"), "set PRELUDE, or a command that starts a container"),
    "comment": "it names the job, so that later commands find it",
    "het-group": "a job is one allocation",
    **dict.fromkeys(("uid", "gid"), "a job runs as the user that submits it"),
    "get-user-env": "the environment is that of a login on the login host; set PRELUDE or ENV",
    **dict.fromkeys(
        ("chdir", "output", "error", "input", "open-mode"),
        f"the output of ranks is in the job's directory: {PROGRAM} logs",
    ),
    **dict.fromkeys(("export", "export-file"), "set ENV or PASS_ENV, or give --env"),
    **dict.fromkeys(("parsable", "test-only", "wait", "help", "usage", "version"), "leave it out"),
}
_NOT_TAKEN = ("gpus",)  # begins as one of these, and is another option
_OPTIONS = {"nodes": "nnodes", "options": "sbatch-option"}  # of `run`; the others have the names of their settings
Value = TypeVar("Value")
_OPTION = re.compile(r"--([a-z][a-z-]*)(=.*)?", re.DOTALL)


def _text_without_spaces(value: object) -> str:
    """Check that a value is a printable string without spaces, and return it. Raises ValueError."""
    if not isinstance(value, str) or re.search(r"\s", value) or not value.isprintable():
        raise ValueError("a string without spaces")
    return value


def _node_list(value: object) -> str:
    """Read names of nodes, a text or a list, as one text with commas between them. Raises ValueError."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        value = ",".join(value)
    try:
        return _text_without_spaces(value)
    except ValueError:
        raise ValueError('names of nodes: "node[1-4],node7", or a list of them') from None


def _login(value: object) -> str:
    """Check that a value names one host, and return it. Raises ValueError."""
    text = _text_without_spaces(value)
    try:
        one = len(read_hosts([text])) == 1
    except ConfigError:
        one = False
    if not one:
        raise ValueError('one host, as ssh takes it: "user@host", or "" on the login host itself')
    return text


def _count_of_nodes_or_cpus(value: object) -> int:
    """Parse a whole number from 1 to 10,000. Raises ValueError."""
    number = whole(value, 1, _MOST)
    if number is None:
        raise ValueError(f"a whole number from 1 to {_MOST}")
    return number


def _time(value: object) -> str:
    """Convert a time limit to a form of sbatch. Raises ValueError."""
    text = "" if isinstance(value, bool) else as_limit(str(value))
    if not text:
        raise ValueError(
            'a time limit of sbatch ("30" minutes, "1:30:00", "2-12"), or a number with a unit: "90m", "2h"'
        )
    return text


def _matching(pattern: str, right: str) -> Callable[[object], str]:
    """Create a reader that checks a text or number by a pattern, and returns its text. right: the text of its ValueError."""

    def read(value: object) -> str:
        text = "" if isinstance(value, bool) else str(value)
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(right)
        return text

    return read


_mem = _matching("[0-9]{1,12}[KMGTkmgt]?", 'memory per node: megabytes, or with a unit: "64G"; "0" is all of it')
_gpus = _matching(
    r"([\w.-]+:)?[0-9]{1,5}(,[\w.-]+:[0-9]{1,5})*",
    'a number of GPUs per node, with their type if there are several: 4, "a100:4"',
)


def _flag(value: object) -> bool:
    """Check that a value is a bool. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _requeue_reasons(value: object) -> Tuple[str, ...]:
    """Check that requeue_on is a list with no other entry than TIME_LIMIT, and return it as a tuple. Raises ValueError."""
    if not isinstance(value, (list, tuple)) or any(reason != TIME_LIMIT for reason in value):
        raise ValueError(f'a list of ends of a job after which it starts again: ["{TIME_LIMIT}"]')
    return tuple(value)


def _options(value: object) -> Tuple[str, ...]:
    """Check a list of further options of sbatch, each with _option(), and return it as a tuple. Raises ValueError."""
    if not isinstance(value, (list, tuple)):
        raise ValueError('a list of options of sbatch: ["--mail-type=END"]')
    return tuple(map(_option, value))


def _option(value: object) -> str:
    """Check that a value is a long option of sbatch that no key and not the tool itself sets, also not abbreviated.

    Raises ValueError.
    """
    match = _OPTION.fullmatch(value) if isinstance(value, str) else None
    if match is None or not match[0].isprintable():
        raise ValueError(f'a list of long options of sbatch: ["--mail-type=END"]; {value!r} is none')
    name = match[1]
    taken = [each for each in _TAKEN if each.startswith(name)]  # getopt knows an option by its beginning
    if taken and name not in _NOT_TAKEN and not (name == "exclusive" and match[2]):
        exact = name if name in taken else taken[0]
        raise ValueError(f"for what no key sets; leave '--{exact}' out: {_TAKEN[exact]}")
    return match[0]


def _setting(read: Callable[[object], Value], default: Value) -> Value:
    """Declare a field of SlurmSettings. read: checks and converts a value; it raises ValueError, which states what is right."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of a job, checked. "", 0, False and (): not given, so what Slurm does by default.

    login: the host from which jobs are submitted; "": this machine. time: in a form of sbatch. exclusive: whole nodes. requeue:
    the job starts again where Slurm has taken it from its nodes. requeue_on: and where it has ended so. options: further ones
    of sbatch, as typed."""

    login: str = _setting(_login, "")
    nodes: int = _setting(_count_of_nodes_or_cpus, 0)
    partition: str = _setting(_text_without_spaces, "")
    account: str = _setting(_text_without_spaces, "")
    qos: str = _setting(_text_without_spaces, "")
    time: str = _setting(_time, "")
    cpus_per_node: int = _setting(_count_of_nodes_or_cpus, 0)
    mem: str = _setting(_mem, "")
    gpus_per_node: str = _setting(_gpus, "")
    exclusive: bool = _setting(_flag, False)
    constraint: str = _setting(_text_without_spaces, "")
    nodelist: str = _setting(_node_list, "")
    exclude: str = _setting(_node_list, "")
    reservation: str = _setting(_text_without_spaces, "")
    requeue: bool = _setting(_flag, False)
    requeue_on: Tuple[str, ...] = _setting(_requeue_reasons, ())
    options: Tuple[str, ...] = _setting(_options, ())

    @property
    def login_host(self) -> Optional[Host]:
        """The login host as an entry of HOSTS; None: this machine."""
        return read_hosts([self.login])[0] if self.login else None

    @property
    def goes_back(self) -> bool:
        """Whether Slurm may put the job back into the queue."""
        return self.requeue or bool(self.requeue_on)

    @property
    def node_count(self) -> int:
        """The number of nodes, 1 if it is not given."""
        return self.nodes or 1


def _or_default(each: Field[Any]) -> Reader:
    """Create the reader of a field: None and "" give the field's default, other values what its `read` returns."""
    return lambda value: each.default if value is None or value == "" else each.metadata["read"](value)


_READERS = {each.name: _or_default(each) for each in fields(SlurmSettings)}


def read_settings(
    conf: Values, toml: Optional[Values] = None, typed: Optional[Values] = None, where: str = "conf.py"
) -> SlurmSettings:
    """Read and check the settings of conf.py, job.toml and the command line.

    Later ones replace earlier ones, `options` are added. where: the path of conf.py. typed: by the names of the settings.
    Raises ConfigError (78) for an error in conf.py, DataError (65) for job.toml, UsageError (64) for the command line.
    """
    found = _read_source(conf, ConfigError, lambda name: f"{where}: SLURM[{name!r}] =")
    later = (
        _read_source(toml or {}, DataError, lambda name: f"job.toml: [slurm] {name} ="),
        _read_source(typed or {}, UsageError, lambda name: f"--{_OPTIONS.get(name) or name.replace('_', '-')}"),
    )
    for source in later:
        for name, value in source.items():
            found[name] = found.get(name, ()) + value if name == "options" else value
    return SlurmSettings(**found)


def _read_source(values: Values, error: ErrorKind, place: Place) -> Dict[str, Any]:
    """Read and check the settings of one source. place: returns how a message names a setting.

    Raises `error` for an unknown key, a wrong value, and for the key `login`, unless the source is conf.py.
    """
    if "login" in values and error is not ConfigError:
        raise error(f"{place('login')} {values['login']!r} is not possible", "login is a key of SLURM in conf.py")
    return read_values(values, _READERS, error, place)
