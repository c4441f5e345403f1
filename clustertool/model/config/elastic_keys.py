"""Reading of an elastic job's settings: [elastic] of job.toml, --nnodes MIN:MAX, --elastic-server, COORDINATOR of conf.py.

The command line has priority. `--nnodes N` is a job of N nodes that is not elastic, whatever [elastic] has; N:N is an elastic
job that waits for another node when it has lost one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Type

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job_tables import MOST, NUMBER, Toml
from clustertool.model.config.value_readers import nearest
from clustertool.model.quantities import DURATIONS, HIGHEST_PORT, seconds_of, whole

PASSWORD, CA = "ETCD_PASSWORD", "ETCD_CA"  # names in SECRETS
_RIGHT = "elastic.server"  # in WORKSPACE_MAY_SET
_SERVER = "https://[user@]host:port, several with commas between; or etcd://host:port"
_URL = re.compile(
    r"(?P<scheme>https|http|etcd)://(?:(?P<user>[^@/:]+)(?P<password>:[^@/]*)?@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)
_USUAL_PORT = 2379  # etcd's


def node_range(text: str) -> Tuple[int, int]:
    """Parse MIN:MAX, or N, which is N:N here, to two numbers.

    Raises UsageError for another text, a number that is not from 1 to MOST, and a MIN above MAX.
    """
    low, colon, high = text.partition(":")
    least, most = whole(low, 1, MOST), whole(high if colon else low, 1, MOST)
    if least is None or most is None or least > most:
        raise UsageError(f"--nnodes {text!r} is no number of nodes", "--nnodes 4, or MIN:MAX: --nnodes 2:4")
    return least, most


def is_range(text: str) -> bool:
    """Check whether --nnodes is MIN:MAX, which makes a job elastic."""
    return ":" in text


ELASTIC_MODES = ("collective", "ps", "mpi")
# When a machine that has joined takes part: at the next epoch, or in one that begins for it
GROWS = ("next", "restart")


@dataclass(frozen=True)
class ElasticServer:
    """etcd, in which the epochs of a job are numbered. urls: https://host:port or http://host:port; () for no server.

    password_name, ca_name: of SECRETS, whose values are the password of `user` and the certificates (PEM) that sign that of
    the server; "" for no password, and for those that the node trusts.
    """

    urls: Tuple[str, ...] = ()
    user: str = ""
    password_name: str = ""
    ca_name: str = ""

    @property
    def present(self) -> bool:
        return bool(self.urls)

    @property
    def secrets(self) -> Tuple[str, ...]:
        """Names of SECRETS that only the nodes need, and no rank."""
        return tuple(name for name in (self.password_name, self.ca_name) if name)

    def of_ranks(self, names: Iterable[str]) -> Tuple[str, ...]:
        """Select the names of SECRETS that ranks get: all but those of the server."""
        return tuple(name for name in names if name not in self.secrets)


@dataclass(frozen=True)
class ElasticSettings:
    """How a job follows nodes that come and go. minimum 0: it does not. Times are seconds.

    timeout: how long the job waits for `maximum` nodes before it starts with at least `minimum`, and how long it waits below
    `minimum` before it ends. grow: one of GROWS. backoff: the first and the longest time between two attempts to reach a
    coordinator, or to start a node that was lost. coordinator: a host of HOSTS, "" for the first node.
    """

    minimum: int = 0
    maximum: int = 0
    timeout: float = 300.0
    grow: str = "next"
    backoff: Tuple[float, float] = (1.0, 30.0)
    server: ElasticServer = ElasticServer()
    coordinator: str = ""

    @property
    def present(self) -> bool:
        return self.minimum > 0

    @property
    def text(self) -> str:
        """MIN:MAX, as --nnodes has it."""
        return f"{self.minimum}:{self.maximum}"


def read_elastic(
    cluster: Cluster, table: Toml, mode: str, nnodes: str = "", servers: Sequence[str] = (), timeout: str = ""
) -> ElasticSettings:
    """Read the elastic settings of a job: the options, else [elastic], else the defaults.

    Without a maximum, it is the number of HOSTS, but not below the minimum. A job with --nnodes N, or without a minimum, is not
    elastic: it has the defaults. table: [elastic]. nnodes, servers, timeout: --nnodes, --elastic-server and --elastic-timeout
    as they were typed. Raises DataError for the table, also for a server with a user if the workspace may not choose it, and
    without a maximum and HOSTS; UsageError for the mode, and for options, also if the job is not elastic; ConfigError for
    COORDINATOR.
    """
    found = _read_table(table)
    low, high = node_range(nnodes) if is_range(nnodes) else (0, 0) if nnodes else (found["min"], found["max"])
    if not low:
        if servers or timeout:
            option = "--elastic-server" if servers else "--elastic-timeout"
            what = f"{option} is for elastic jobs, and this job has a fixed number of nodes"
            raise UsageError(what, "add --nnodes MIN:MAX, or leave it out")
        return ElasticSettings()
    if mode not in ELASTIC_MODES:
        what = f"an elastic job ({low}:{high or ''} nodes) in mode {mode} is not possible"
        raise UsageError(what, f"--nnodes N, or one of the modes {', '.join(ELASTIC_MODES)}")
    if not high and not cluster.hosts:
        raise DataError("job.toml: [elastic] has min and no max", "max = 4: no HOSTS state how many nodes there are")
    typed = [url for value in servers for url in value.split(",")]
    where, error = ("--elastic-server", UsageError) if typed else ("job.toml: [elastic] server =", DataError)
    server = _read_server(cluster, typed or found["server"], where, error)
    if server.user and not typed and _RIGHT not in cluster.workspace_may_set:
        what = f"{where} {found['server']}: a workspace may not choose where {PASSWORD} is sent"
        raise DataError(what, f"--elastic-server; or WORKSPACE_MAY_SET = [{_RIGHT!r}] in conf.py")
    return ElasticSettings(
        minimum=low,
        maximum=high or max(low, len(cluster.hosts)),
        timeout=_parse_timeout(timeout) if timeout else found["timeout"],
        grow=found["grow"],
        backoff=_backoff_of(found),
        server=server,
        coordinator="" if server.present else _coordinator_of(cluster),  # with a server it may be any node
    )


def _parse_timeout(text: str) -> float:
    """Parse --elastic-timeout to seconds. Raises UsageError for what is no duration above 0."""
    seconds = _duration(text)
    if seconds is None:
        raise UsageError(f"--elastic-timeout {text!r} is not right", _TIME)
    return seconds


# -- [elastic] ----------------------------------------------------------------------------------------------------------


def _read_table(table: Toml) -> Toml:
    """Read the values of [elastic], with the defaults of those that are missing.

    Raises DataError for an unknown key, a wrong value, min above max, and max without min.
    """
    found: Dict[str, object] = {name: default for name, (_, default, _) in _KEYS.items()}
    for name, value in table.items():
        if name not in _KEYS:
            raise DataError(f"job.toml: [elastic] has the unknown key {name!r}", nearest(name, _KEYS, "known:"))
        read, _, right = _KEYS[name]
        found[name] = read(value)
        if found[name] is None:
            raise DataError(f"job.toml: [elastic] {name} = {value!r} is not right", f"{name} is {right}")
    checked: Toml = found
    low, high = checked["min"], checked["max"]
    if low and high and low > high:
        raise DataError(f"job.toml: [elastic] min = {low} is more than max = {high}", "min = 2, max = 4")
    if high and not low:
        raise DataError("job.toml: [elastic] has max and no min", "min = 1 is the least number of nodes")
    return checked


def _backoff_of(found: Toml) -> Tuple[float, float]:
    """Return the first and the longest back-off: backoff_min and backoff_max, else those of `backoff`.

    Raises DataError if the first one is longer.
    """
    first, longest = found["backoff_min"] or found["backoff"][0], found["backoff_max"] or found["backoff"][1]
    if first > longest:
        what = f"job.toml: [elastic] the first back-off, {first:g} s, is longer than the longest, {longest:g} s"
        raise DataError(what, "backoff = [1, 30]: the first and the longest")
    return first, longest


def _count(value: object) -> Optional[int]:
    """Read a number of nodes, which is no text; None for anything else."""
    return None if isinstance(value, str) else whole(value, 1, MOST)


def _duration(value: object) -> Optional[float]:
    """Read a duration above 0 in seconds; None for anything else."""
    return seconds_of(value) or None


def _grow(value: object) -> Optional[str]:
    """Read one of GROWS; None for anything else."""
    return next((known for known in GROWS if known == value), None)


def _read_backoff(value: object) -> Optional[Tuple[float, float]]:
    """Read a list of two durations in seconds; None for anything else."""
    pair = [_duration(one) for one in value] if isinstance(value, list) else []
    return (pair[0], pair[1]) if len(pair) == 2 and pair[0] and pair[1] else None


def _read_urls(value: object) -> Optional[List[str]]:
    """Read a text of URLs with commas between, or a list of them; None for anything else."""
    urls = value.split(",") if isinstance(value, str) else value
    return urls if isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls) else None


_TIME = f"a duration above 0: {DURATIONS}"
_TIMES = 'the first and the longest time between two attempts: [1, 30], or ["1s", "30s"]'
_KEYS: Dict[str, Tuple[Callable[[object], object], object, str]] = {  # how to read it, the default, what is right
    "min": (_count, 0, NUMBER),
    "max": (_count, 0, NUMBER),
    "timeout": (_duration, ElasticSettings.timeout, _TIME),
    "grow": (_grow, ElasticSettings.grow, '"next" or "restart"'),
    "backoff": (_read_backoff, ElasticSettings.backoff, _TIMES),
    "backoff_min": (_duration, 0.0, _TIME),
    "backoff_max": (_duration, 0.0, _TIME),
    "server": (_read_urls, [], f'a URL, or a list of them: "{_SERVER}"'),
}


# -- the server, the coordinator ----------------------------------------------------------------------------------------


def _read_server(cluster: Cluster, texts: Sequence[str], where: str, error: Type[ClustertoolError]) -> ElasticServer:
    """Check the URLs of the etcd servers, and build ElasticServer of them: with the user, and the names of secrets to use.

    The port is 2379 by default; etcd:// becomes http://. Raises `error`, whose text has no password: for a wrong URL, one with
    a password, different users, a URL without https if there is a user, or no secret for the password of a user. where: names
    the source of the URLs in errors.
    """
    urls: List[str] = []
    users: Set[str] = set()
    schemes: Set[str] = set()
    for text in filter(None, (text.strip() for text in texts)):
        match = _URL.fullmatch(text)
        port = whole(match["port"] or _USUAL_PORT, 1, HIGHEST_PORT) if match else None
        if match is not None and match["password"]:
            what = f"{where} has the password of {match['user']}, which any user could read there"
            fix = f'leave it out: https://{match["user"]}@{match["host"]}; SECRETS = ["{PASSWORD}"] in conf.py'
            raise error(what, fix)
        if match is None or port is None:
            raise error(f"{where} {re.sub('//[^@]*@', '//***@', text)!r} is no URL of an etcd server", _SERVER)
        if match["user"]:
            users.add(match["user"])
        scheme = "https" if match["scheme"] == "https" else "http"
        schemes.add(scheme)
        urls.append(f"{scheme}://{match['host']}:{port}")
    if len(users) > 1:
        raise error(f"{where} has the users {', '.join(sorted(users))}", "the servers of one etcd have the same users")
    user = next(iter(users), "")
    if user and "http" in schemes:
        raise error(f"{where} would send the password of {user} unencrypted", f"https://{user}@host:port")
    if user and PASSWORD not in cluster.secrets:
        what = f"{where} names the user {user}, and SECRETS of {cluster.where or 'conf.py'} has no {PASSWORD}"
        raise error(what, f'export {PASSWORD}=..., and SECRETS = ["{PASSWORD}"] in conf.py')
    ca = CA if "https" in schemes and CA in cluster.secrets else ""
    return ElasticServer(tuple(dict.fromkeys(urls)), user, PASSWORD if user else "", ca)


def _coordinator_of(cluster: Cluster) -> str:
    """Return COORDINATOR, "" if it is not set.

    Raises ConfigError if there are HOSTS, and it is the name, host or address of none of them.
    """
    name = cluster.coordinator
    if name and cluster.hosts and not any(name in (host.name, host.host, host.address) for host in cluster.hosts):
        what = f"COORDINATOR = {name!r} is none of the hosts of {cluster.where or 'conf.py'}"
        raise ConfigError(what, f"one of {', '.join(host.name for host in cluster.hosts[:8])}")
    return name
