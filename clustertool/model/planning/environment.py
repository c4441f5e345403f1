"""This module builds the environment of each process, as docs/reference.md (environment) defines it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Iterable, Mapping, Sequence, Tuple

from clustertool.model import roles
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.paths import JobPaths
from clustertool.model.planning.devices import VARIABLES, heter_type
from clustertool.model.planning.ports import Ports
from clustertool.model.planning.ranks import Seat

Env = Dict[str, str]


@dataclass(frozen=True)
class Table:
    """What all processes of a job know of each other."""

    job_id: str
    token: str
    job: JobSpec
    cluster: Cluster
    seats: Tuple[Seat, ...]
    ports: Ports
    addresses: Tuple[str, ...]
    kinds: Tuple[str, ...]

    @cached_property
    def _roles(self) -> Dict[str, Tuple[Seat, ...]]:
        return {role: tuple(seat for seat in self.seats if seat.role == role) for role in roles.ROLES}

    @cached_property
    def _local(self) -> Dict[Tuple[str, int], int]:
        return Counter((seat.role, seat.node) for seat in self.seats)

    @cached_property
    def _endpoints(self) -> Dict[str, str]:
        return {role: self.listed(seats) for role, seats in self._roles.items()}

    @cached_property
    def stages(self) -> Tuple[Tuple[Seat, ...], ...]:
        """Of a ps-heter job: the trainers, then the heter trainers of each stage."""
        each = [
            tuple(seat for seat in self.role("heter") if seat.stage == n) for n in range(2, len(self.job.heter) + 2)
        ]
        return (self.role("trainer"), *each)

    def role(self, role: str) -> Tuple[Seat, ...]:
        return self._roles[role]

    def local(self, seat: Seat) -> int:
        return self._local[seat.role, seat.node]

    def endpoint(self, seat: Seat) -> str:
        return endpoint(self.addresses[seat.node], self.ports.of[seat.role, seat.rank][0])

    def listed(self, seats: Iterable[Seat]) -> str:
        return ",".join(map(self.endpoint, seats))

    def endpoints(self, role: str) -> str:
        return self._endpoints[role]


def endpoint(address: str, port: int) -> str:
    """host:port, with brackets around IPv6 as everybody but Paddle reads it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def environment(table: Table, seat: Seat, paths: JobPaths, nic: str) -> Env:
    """All computed variables of one process; a user's ENV is laid over them by the plan."""
    env = _tool(table, seat, paths)
    env.update(_interface(nic))
    if seat.role == "trainer":
        env.update(_torch(table, seat))
    if table.job.mode == "collective":
        env.update(_paddle_collective(table, seat))
    else:
        env.update(_paddle_ps(table, seat, paths))
        env.update(_paddle_v2(table, seat))
    if table.job.mode == "ps-heter":
        env.update(_paddle_heter(table, seat))
    env.update(_devices(table, seat))
    return env


def _tool(table: Table, seat: Seat, paths: JobPaths) -> Env:
    return {
        "PYTHONUNBUFFERED": "1",
        "CLUSTERTOOL_JOB": table.job_id,
        "CLUSTERTOOL_ROLE": seat.role,
        "CLUSTERTOOL_RANK": str(seat.rank),
        "CLUSTERTOOL_WORLD_SIZE": str(len(table.role(seat.role))),
        "CLUSTERTOOL_LOCAL_RANK": str(seat.local_rank),
        "CLUSTERTOOL_LOCAL_WORLD_SIZE": str(table.local(seat)),
        "CLUSTERTOOL_NODE_RANK": str(seat.node),
        "CLUSTERTOOL_NNODES": str(len(table.addresses)),
        "CLUSTERTOOL_HOSTS": ",".join(table.addresses),
        "CLUSTERTOOL_SHARDS": paths.shards(seat.role, seat.rank),
        "CLUSTERTOOL_OUTPUT": paths.of(table.job.output),
        "CLUSTERTOOL_ATTEMPT": "0",
        "CLUSTERTOOL_MARK": mark(table.job_id, seat.node, table.token),
    }


def mark(job_id: str, node: int, token: str) -> str:
    """The marker by which a process of this job on this node is known in /proc/PID/environ."""
    return f"{job_id}/{node}/{token}"


def _interface(nic: str) -> Env:
    return {"NCCL_SOCKET_IFNAME": nic, "GLOO_SOCKET_IFNAME": nic} if nic else {}


def _torch(table: Table, seat: Seat) -> Env:
    """torchrun's and Open MPI's names; a rank is the same number in both."""
    world, local = str(len(table.role("trainer"))), str(table.local(seat))
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": local,
        "NODE_RANK": str(seat.node),
        "GROUP_RANK": str(seat.node),
        "MASTER_ADDR": _master_address(table),
        "MASTER_PORT": str(table.ports.master),
        "OMPI_COMM_WORLD_RANK": str(seat.rank),
        "OMPI_COMM_WORLD_SIZE": world,
        "OMPI_COMM_WORLD_LOCAL_RANK": str(seat.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": local,
    }


def _master_address(table: Table) -> str:
    return table.addresses[table.role("trainer")[0].node]


def _paddle_collective(table: Table, seat: Seat) -> Env:
    world, local = str(len(table.role("trainer"))), str(table.local(seat))
    return {
        "PADDLE_MASTER": endpoint(_master_address(table), table.ports.master),
        "PADDLE_GLOBAL_SIZE": world,
        "PADDLE_LOCAL_SIZE": local,
        "PADDLE_GLOBAL_RANK": str(seat.rank),
        "PADDLE_LOCAL_RANK": str(seat.local_rank),
        "PADDLE_NNODES": str(len(table.addresses)),
        "PADDLE_CURRENT_ENDPOINT": table.endpoint(seat),
        "PADDLE_TRAINER_ID": str(seat.rank),
        "PADDLE_TRAINERS_NUM": world,
        "PADDLE_RANK_IN_NODE": str(seat.local_rank),
        "PADDLE_TRAINER_ENDPOINTS": table.endpoints("trainer"),
        "PADDLE_JOB_ID": table.job_id,
        "PADDLE_TRAINERS": ",".join(table.addresses),
        "POD_IP": table.addresses[seat.node],
    }


def _paddle_ps(table: Table, seat: Seat, paths: JobPaths) -> Env:
    role = roles.PADDLE[seat.role]
    servers = table.role("pserver")
    env = {
        "PADDLE_PSERVERS_IP_PORT_LIST": table.endpoints("pserver"),
        "PADDLE_TRAINER_ENDPOINTS": table.endpoints("trainer"),
        "PADDLE_PORT": str(table.ports.of[seat.role, seat.rank][0]),
        "PADDLE_ROLE": role,
        "TRAINING_ROLE": role,
        "PADDLE_TRAINERS_NUM": str(len(table.role("trainer"))),
        "POD_IP": table.addresses[seat.node],
        "PADDLE_WITH_GLOO": "1",
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_FS_PATH": f"{paths.ours}/gloo",
        "PADDLE_GLOO_HTTP_ENDPOINT": endpoint(table.addresses[servers[0].node], table.ports.gloo),
    }
    if seat.role == "trainer":
        env["PADDLE_TRAINER_ID"] = str(seat.rank)
    return env


def _paddle_heter(table: Table, seat: Seat) -> Env:
    """The pipeline: trainers are stage 1, heter trainers 2, 3, ...; each gets the previous and the next stage.

    All lists have commas between endpoints, of several stages too: Paddle's role maker splits only at commas.
    """
    env = {"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": table.endpoints("heter")}
    if seat.role == "pserver":
        return env
    number, stages = seat.stage or 1, table.stages
    env.update(
        {
            "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": table.listed(stages[number - 2]) if number > 1 else "",
            "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": table.listed(stages[number]) if number < len(stages) else "",
            "PADDLE_STAGE_TRAINERS_NUM": str([len(stage) for stage in stages]),
            "STAGE_ID": str(number),
            "STAGE_NUM": str(len(stages)),
            "HETER_DEVICE_TYPE": heter_type(table.job, seat, table.kinds[seat.node]),
        }
    )
    return env


def _paddle_v2(table: Table, seat: Seat) -> Env:
    """Paddle v2 programs. The number of trainers is NUM_GRADIENT_SERVERS; TRAINER_COUNT is threads in one trainer."""
    servers = table.role("pserver")
    addresses = list(dict.fromkeys(table.addresses[server.node] for server in servers))
    first = table.ports.of[(seat.role, seat.rank) if seat.role == "pserver" else ("pserver", servers[0].rank)][0]
    env = {
        "PADDLE_INIT_USE_GPU": str(bool(seat.devices) and table.kinds[seat.node] != "cpu"),
        "PADDLE_INIT_TRAINER_COUNT": "1",
        "PADDLE_INIT_PORT": str(first),
        "PADDLE_INIT_PORTS_NUM": str(table.cluster.ports_num),
        "PADDLE_INIT_PORTS_NUM_FOR_SPARSE": str(table.cluster.ports_num_for_sparse),
        "PADDLE_INIT_NUM_GRADIENT_SERVERS": str(len(table.role("trainer"))),
        "PADDLE_INIT_PSERVERS": ",".join(addresses),
        "PADDLE_CLUSTER_TRAIN": "True",
    }
    if seat.role == "trainer":
        env["PADDLE_INIT_TRAINER_ID"] = str(seat.rank)
    return env


def _devices(table: Table, seat: Seat) -> Env:
    """Cards by the variables of their kind; in collective mode also how to communicate where Paddle would not find out."""
    kind, collective = table.kinds[seat.node], table.job.mode == "collective"
    if not seat.devices or kind not in VARIABLES:
        return {"PADDLE_DISTRI_BACKEND": "gloo"} if collective else {}
    visible, selected = VARIABLES[kind]
    env = {
        visible: ",".join(str(device) for device in seat.devices),
        selected: ",".join(str(i) for i in range(len(seat.devices))),
    }
    if kind == "gpu":  # CUDA else numbers the fastest card first, and NVML, the locks and everybody else by the bus
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if collective and kind == "npu":  # for Paddle this is a plug-in device: its name and its backend are required
        env.update({"PADDLE_DISTRI_BACKEND": "xccl", "PADDLE_XCCL_BACKEND": kind})
    return env


def literal(argument: str) -> str:
    """Escape an argument so that fill() returns it unchanged."""
    return argument.replace("{", "{{")


def fill(argv: Sequence[str], values: Mapping[str, str]) -> Tuple[str, ...]:
    """Fill {port}, {rank} ... in a command; {{ is a brace; every other text stays as it is, JSON too."""
    pattern = re.compile(r"\{\{|\{(" + "|".join(values) + r")\}")
    return tuple(pattern.sub(lambda m: values[m.group(1)] if m.group(1) else "{", argument) for argument in argv)
