"""This module reads the options that launchers need where a command is typed on every machine: where the machines meet. Pure.

    clusterrun --master 10.0.0.1:8090 --nnodes 2 train.py                                     as fleetrun
    clusterrun --rdzv-endpoint node0:29400 --rdzv-id 7 --nnodes 2 train.py                    as torchrun
    clusterrun --master-addr 10.0.0.1 --master-port 1234 --nnodes 2 --node-rank 1 train.py    as torch.distributed.launch
    clusterrun --nnodes 2 train.py                                                            as fleetrun, on the first machine

Where clusterrun starts all nodes, these options are not needed.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from clustertool.errors import UsageError
from clustertool.model.joining.typed_meeting import TypedMeeting
from clustertool.model.paths import is_job_id
from clustertool.model.quantities import DURATIONS, HIGHEST_PORT, seconds_of, whole

MOST_MACHINES = 10_000
_ENDPOINT = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]/]+))(?::(?P<port>\d{1,5}))?")
_RENDEZVOUS_PORT = "29400"  # torchrun's for an endpoint without a port
_STATIC_PORT = "29500"  # that of torch.distributed.launch without --master-port
_BACKENDS = ("", "c10d", "static")
_NO_RANK = ("", "-1")
_ETCD = "etcd://"
_YES = ("1", "t", "true", "y", "yes")
_FORM = "write HOST:PORT: the address of one of the machines, and a port that is free there"
_ONCE = "clusterrun is typed once and starts all nodes"
EVERYWHERE = "type it on each machine with --master HOST:PORT and --nnodes N"  # the end of a fix


@dataclass
class JoinOptions:
    """The options about the meeting of machines as they were typed, "" where they were not.

    notes: why each that was typed is not needed, which holds only where one command starts all nodes.
    """

    master: str = ""
    rdzv_endpoint: str = ""
    master_addr: str = ""
    rank: str = ""
    rdzv_id: str = ""
    rdzv_backend: str = ""
    rdzv_conf: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def named(self) -> bool:
        """Whether one of the options names a machine at which the others meet."""
        return bool(self.master or self.rdzv_endpoint or self.master_addr)

    @property
    def static(self) -> bool:
        """Whether only --master-addr names the machine at which the others meet."""
        return bool(self.master_addr) and not (self.master or self.rdzv_endpoint)


def meeting(typed: JoinOptions, nodes: tuple[int, int] | None, master_port: str) -> TypedMeeting | None:
    """Parse where the machines meet, how long they wait, this machine's index and the job's name.

    Returns None if no machine is named, or for one node or no --nnodes. nodes: of --nnodes; of MIN:MAX, MAX is how many
    machines are waited for at the start. master_port: of --master-port. is_host in --rdzv-conf makes the index 0, whatever
    --rank is. Raises UsageError for a wrong value, and for a server or back end at which machines do not meet here.
    """
    if not typed.named or nodes is None or nodes[1] == 1:
        return None
    high = nodes[1]
    if high > MOST_MACHINES:
        raise UsageError(f"--nnodes {high} is out of range", f"at most {MOST_MACHINES} machines")
    if etcd_urls(typed):
        what = f"{etcd_urls(typed)[0]} is no machine: the machines meet at one of them, without a server of their own"
        fix = "--master HOST:PORT of one of them; an elastic job has etcd in addition: --elastic-server"
        raise UsageError(what, f"{fix} {','.join(etcd_urls(typed))}")
    if typed.rdzv_backend not in _BACKENDS:
        what = f"--rdzv-backend {typed.rdzv_backend!r}: the machines meet without a server of their own"
        raise UsageError(what, "--rdzv-backend c10d, and one of the machines in --rdzv-endpoint HOST:PORT")
    host, port = _meeting_place(typed, master_port)
    index, timeout = _machine_index(typed.rank, high), None
    for key, value in _rendezvous_settings(typed.rdzv_conf):
        if key == "join_timeout":
            timeout = seconds_of(value)
            if not timeout:
                raise UsageError(f"--rdzv-conf join_timeout={value} is not a duration above 0", DURATIONS)
        elif key == "is_host" and value.lower() in _YES:
            index = 0
    return TypedMeeting(host, port, high, index, _job_name(typed.rdzv_id), timeout)


def etcd_urls(typed: JoinOptions) -> tuple[str, ...]:
    """Return the etcd URLs of a launcher's own rendezvous: of --master etcd://, else of torchrun's etcd back end; else ()."""
    if typed.master.startswith(_ETCD):
        return tuple(f"{_ETCD}{item.removeprefix(_ETCD)}" for item in typed.master.split(","))
    if typed.rdzv_backend in ("etcd", "etcd-v2") and typed.rdzv_endpoint and not typed.master:
        return (f"{_ETCD}{typed.rdzv_endpoint}",)
    return ()


def is_first_of_meeting(typed: JoinOptions, nodes: tuple[int, int] | None) -> bool:
    """Check for fleetrun's form of the first machine: --nnodes N from 2 to 10,000, without a machine, a rank or a rendezvous.

    False for MIN:MAX. The rank -1 counts as none.
    """
    torchrun = typed.rdzv_id or typed.rdzv_backend or typed.rdzv_conf
    if typed.named or typed.rank not in _NO_RANK or torchrun or nodes is None:
        return False
    return nodes[0] == nodes[1] and 1 < nodes[1] <= MOST_MACHINES


def refuse_rank(typed: JoinOptions) -> None:
    """Raise UsageError for a rank other than 0 or -1, because clusterrun starts all nodes; do nothing without a rank."""
    if typed.rank not in ("", "0", "-1"):
        fix = f"leave it out, and name the nodes with --ips=a,b or in conf.py; or {EVERYWHERE}"
        raise UsageError(f"--rank {typed.rank!r}: {_ONCE}", fix)


def _meeting_place(typed: JoinOptions, master_port: str) -> tuple[str, int]:
    """Parse (host in lower case, port) of the meeting: of --master, else of --rdzv-endpoint, else of --master-addr.

    --master needs a port; without one, --rdzv-endpoint has 29400. --master-addr has none: its port is master_port, or 29500.
    Raises UsageError for another form.
    """
    if typed.master:
        option, text, usual = "--master", re.sub("^http://", "", typed.master), ""
    elif typed.rdzv_endpoint:
        option, text, usual = "--rdzv-endpoint", typed.rdzv_endpoint, _RENDEZVOUS_PORT
    else:
        option, text, usual = "--master-addr", typed.master_addr, master_port or _STATIC_PORT
    if "://" in text:
        raise UsageError(f"{option} {text}: the machines meet without a server of their own", _FORM)
    if _is_ipv6(text):
        text = f"[{text}]"
    match = _ENDPOINT.fullmatch(text)
    port = whole((match["port"] or usual) if match else "", 1, HIGHEST_PORT)
    if match is None or port is None or (option == "--master-addr" and match["port"]):
        raise UsageError(f"{option} {text!r} is no machine with a port", _FORM)
    return (match["bracketed"] or match["plain"]).lower(), port


def _machine_index(text: str, nodes: int) -> int | None:
    """Parse the rank of this machine, None if it is not given or -1. Raises UsageError if it is not from 0 to `nodes` - 1."""
    if text in _NO_RANK:
        return None
    index = whole(text, 0, MOST_MACHINES)
    if index is None or index >= nodes:
        what = f"--rank {text!r}: the {nodes} machines are 0 to {nodes - 1}"
        raise UsageError(what, "number them, or leave --rank out")
    return index


def _job_name(text: str) -> str:
    """Return the name in --rdzv-id; "" without one, and for `none`, torchrun's default.

    Raises UsageError if a job cannot have this name.
    """
    if text in ("", "none"):
        return ""
    if not is_job_id(text):
        fix = "letters, digits, '.', '_' and '-', up to 64, the first one a letter or digit"
        raise UsageError(f"--rdzv-id {text!r} is no name of a job", fix)
    return text


def _rendezvous_settings(text: str) -> list[tuple[str, str]]:
    """Parse --rdzv-conf, `key=value,key=value`, to (key, value). Raises UsageError for a part without a key or a value."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip() or not value.strip():
            fix = "write key=value, with commas between: join_timeout=60"
            raise UsageError(f"--rdzv-conf {item!r} is not valid", fix)
        found.append((key.strip(), value.strip()))
    return found


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
