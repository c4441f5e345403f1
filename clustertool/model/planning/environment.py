"""This module builds the environment of each process, as docs/reference.md (environment) defines it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

from clustertool.model import roles
from clustertool.model.cards import VARIABLES, has_mig_instance
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import grouped
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import ByNode, Identity
from clustertool.model.paths import FLIGHT, FLIGHT_PIPE, JobPaths
from clustertool.model.planning.devices import heter_type, visible
from clustertool.model.planning.ports import Ports
from clustertool.model.planning.ranks import Seat

Env = Dict[str, str]


@dataclass(frozen=True)
class Table:
    """What all processes of a job know of each other."""

    identity: Identity
    cluster: Cluster
    job: JobSpec
    facts: ByNode
    seats: Tuple[Seat, ...]
    ports: Ports
    kinds: Tuple[str, ...]

    @cached_property
    def addresses(self) -> Tuple[str, ...]:
        """The training address of each node."""
        return tuple(self.facts[host.index].address for host in self.cluster.hosts)

    @cached_property
    def roles(self) -> Dict[str, Tuple[Seat, ...]]:
        """The seats of each role, in rank order."""
        return {role: tuple(seat for seat in self.seats if seat.role == role) for role in roles.RANKS}

    @cached_property
    def _on_nodes(self) -> Dict[Tuple[str, int], List[Seat]]:
        """The seats of each role on each node, in rank order."""
        return grouped(((seat.role, seat.node), seat) for seat in self.seats)

    def neighbours(self, seat: Seat) -> List[Seat]:
        """Return all seats of the same role on the same node as this one, itself included, in rank order."""
        return self._on_nodes[seat.role, seat.node]

    @cached_property
    def endpoints(self) -> Dict[str, str]:
        """The endpoints of each role, separated by commas."""
        return {role: self.listed(seats) for role, seats in self.roles.items()}

    @cached_property
    def stages(self) -> Tuple[Tuple[Seat, ...], ...]:
        """Of a ps-heter job: the trainers, then the heter trainers of each stage."""
        numbers = range(2, len(self.job.heter) + 2)
        each = [tuple(seat for seat in self.roles["heter"] if seat.stage == number) for number in numbers]
        return (self.roles["trainer"], *each)

    @cached_property
    def servers(self) -> str:
        """The addresses of the nodes with pservers, separated by commas."""
        return ",".join(dict.fromkeys(self.addresses[seat.node] for seat in self.roles["pserver"]))

    def devices(self, node: int, ids: Iterable[int]) -> List[str]:
        """Name these devices of a node for variables: by ids, or in an allocation by the names that it has for them."""
        names = self.facts[node].allocated
        return [str(number) if names is None else names[number] for number in ids]

    @property
    def master(self) -> str:
        """The address of the first trainer's node."""
        return self.addresses[self.roles["trainer"][0].node]

    def first_port(self, seat: Seat) -> int:
        """Return the first port of a process, that of its endpoint."""
        return self.ports.of[seat.role, seat.rank][0]

    def listed(self, seats: Iterable[Seat]) -> str:
        """Join the endpoints of these seats by commas."""
        return ",".join(endpoint(self.addresses[seat.node], self.first_port(seat)) for seat in seats)


def endpoint(address: str, port: int) -> str:
    """Format an endpoint as host:port, with brackets around IPv6, as all programs but Paddle read it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def environment(table: Table, seat: Seat, paths: JobPaths, nic: str) -> Env:
    """Compute all variables of one process but the user's own, which the plan lays over them."""
    env = _tool(table, seat, paths)
    if nic:
        env.update({"NCCL_SOCKET_IFNAME": nic, "GLOO_SOCKET_IFNAME": nic})
    if seat.role == "trainer":
        env.update(_torch(table, seat, paths))
        env.update(_mpi(table, seat, nic))
    env.update(_paddle(table, seat))
    if table.job.has_pservers:
        env.update(_paddle_ps(table, seat, paths))
        env.update(_paddle_v2(table, seat))
    elif table.job.mode == "rpc":
        env.update(_rpc(table, seat, nic))
    else:
        env.update(_paddle_collective(table, seat))
    if table.job.mode == "ps-heter":
        env.update(_paddle_heter(table, seat))
    env.update(_devices(table, seat))
    return env


def _tool(table: Table, seat: Seat, paths: JobPaths) -> Env:
    """Compute the variables of the tool: those of each process, its place among the ranks, shards and output."""
    return {
        **process_variables(table, seat),
        "PYTHONUNBUFFERED": "1",
        "CLUSTERTOOL_WORLD_SIZE": str(len(table.roles[seat.role])),
        "CLUSTERTOOL_LOCAL_RANK": str(seat.local_rank),
        "CLUSTERTOOL_LOCAL_WORLD_SIZE": str(len(table.neighbours(seat))),
        "CLUSTERTOOL_SHARDS": paths.shards(seat.role, seat.rank),
        "CLUSTERTOOL_OUTPUT": paths.of(table.job.output),
    }


def process_variables(table: Table, seat: Seat) -> Env:
    """Compute the tool's variables for each process, a launcher of ranks too: by them it is found, and programs read them."""
    return {
        "CLUSTERTOOL_JOB": table.identity.job_id,
        "CLUSTERTOOL_ROLE": seat.role,
        "CLUSTERTOOL_RANK": str(seat.rank),
        "CLUSTERTOOL_NODE_RANK": str(seat.node),
        "CLUSTERTOOL_NNODES": str(len(table.addresses)),
        "CLUSTERTOOL_HOSTS": ",".join(table.addresses),
        "CLUSTERTOOL_ATTEMPT": "0",
        "CLUSTERTOOL_MARK": mark(table.identity.job_id, table.cluster.hosts[seat.node].node_id, table.identity.token),
    }


def mark(job_id: str, node: int, token: str) -> str:
    """Build the marker by which a process of this job on this node is known in /proc/PID/environ."""
    return f"{job_id}/{node}/{token}"


def _each(names: str, value: object) -> Env:
    """Give several variables the same value."""
    return dict.fromkeys(names.split(), str(value))


def _torch(table: Table, seat: Seat, paths: JobPaths) -> Env:
    """Compute the variables of torchrun and Open MPI; a rank is the same number in both. mpirun sets those of Open MPI itself.

    All ranks of torchrun have one role. OMP_NUM_THREADS is 1 on a node with several trainers, but not in a job with pservers or
    rpc.
    """
    here = len(table.neighbours(seat))
    env = {
        **_each("RANK ROLE_RANK OMPI_COMM_WORLD_RANK", seat.rank),
        **_each("WORLD_SIZE ROLE_WORLD_SIZE OMPI_COMM_WORLD_SIZE", len(table.roles["trainer"])),
        **_each("LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK", seat.local_rank),
        **_each("LOCAL_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE", here),
        **_each("NODE_RANK GROUP_RANK", seat.node),
        "GROUP_WORLD_SIZE": str(len(table.addresses)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": table.master,
        "MASTER_PORT": str(table.ports.master),
        "TORCHELASTIC_RUN_ID": table.identity.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(table.job.policy.max_restarts),
        "TORCHELASTIC_ERROR_FILE": paths.of(paths.error_file(seat.role, seat.rank)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if seat.node in table.ports.ras:  # what NCCL and torch know of a hang
        env["NCCL_RAS_ADDR"] = f"127.0.0.1:{table.ports.ras[seat.node]}"  # all users of a node share the default port
        env["TORCH_FR_BUFFER_SIZE"] = "2000"  # without it torch makes no pipe
        env["TORCH_FR_DUMP_TEMP_FILE"] = paths.of(FLIGHT, "rank-")
        env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = paths.of(FLIGHT_PIPE)
    if table.job.by_mpirun:  # it sets its own
        env = {name: value for name, value in env.items() if not name.startswith("OMPI_")}
    env.update(_front_end(table, seat))
    if here > 1 and table.job.mode in ("collective", "mpi") and not table.job.has_pservers:
        env["OMP_NUM_THREADS"] = "1"
    return env


def _front_end(table: Table, seat: Seat) -> Env:
    """Compute what LLaMA-Factory, ms-swift and scripts pass on to torchrun besides NODE_RANK and MASTER_*.

    {} where a node has several trainers: ms-swift takes NNODES as the request to start torchrun, and each would; {} also on a
    single node, unless trainers start a launcher.
    """
    nodes, trainers = len(table.addresses), table.roles["trainer"]
    if len(trainers) != nodes or any(one.rank != one.node for one in trainers) or not (table.job.nested or nodes > 1):
        return {}
    return {"NNODES": str(nodes), **({"NPROC_PER_NODE": str(len(seat.devices) or 1)} if table.job.nested else {})}


def _mpi(table: Table, seat: Seat, nic: str) -> Env:
    """Compute MPICH's variables for address and interface, since it would take the host's name, or any; {} without mpirun."""
    if not table.job.by_mpirun:
        return {}
    named = {"FI_TCP_IFACE": nic, "FI_SOCKETS_IFACE": nic} if nic else {}
    return {"MPIR_CVAR_CH3_INTERFACE_HOSTNAME": table.addresses[seat.node], **named}


def _paddle(table: Table, seat: Seat) -> Env:
    """Compute the variables of Paddle that all processes have in all modes.

    POD_NAME is the launcher on a node: where it is not set, paddle.distributed.to_static does not start the communication.
    """
    return {
        "PADDLE_TRAINERS_NUM": str(len(table.roles["trainer"])),
        "PADDLE_TRAINER_ENDPOINTS": table.endpoints["trainer"],
        "PADDLE_NNODES": str(len(table.addresses)),
        "POD_IP": table.addresses[seat.node],
        "POD_NAME": f"node{seat.node}",
    }


def _paddle_trainer(table: Table, seat: Seat) -> Env:
    """Compute the variables of Paddle that trainers have in all jobs without pservers."""
    return {
        "PADDLE_TRAINER_ID": str(seat.rank),
        "PADDLE_RANK_IN_NODE": str(seat.local_rank),
        "PADDLE_CURRENT_ENDPOINT": table.listed([seat]),
        "PADDLE_JOB_ID": table.identity.run_id,
    }


def _paddle_collective(table: Table, seat: Seat) -> Env:
    """Compute the variables of Paddle for a process of a job in mode collective, or in mode mpi without pservers."""
    return {
        **_paddle_trainer(table, seat),
        "PADDLE_GLOBAL_RANK": str(seat.rank),
        "PADDLE_GLOBAL_SIZE": str(len(table.roles["trainer"])),
        "PADDLE_LOCAL_RANK": str(seat.local_rank),
        "PADDLE_LOCAL_SIZE": str(len(table.neighbours(seat))),
        "PADDLE_MASTER": endpoint(table.master, table.ports.master),
        "PADDLE_TRAINERS": ",".join(table.addresses),
        **_paddle_cloud(table, seat),
        **_paddle_elastic(table),
    }


def _paddle_cloud(table: Table, seat: Seat) -> Env:
    """Compute what PaddleCloud sets for collective jobs: read by paddle.distributed.cloud_utils and by role makers.

    PADDLE_PORT is the process's own port, as with pservers: POD_IP:PADDLE_PORT is its endpoint. Lists of devices have commas
    between ranks and colons inside a rank.
    """
    env = {
        "TRAINING_ROLE": roles.PADDLE[seat.role],
        "TRAINER_PORTS_NUM": str(len(table.neighbours(seat))),
        "DISTRIBUTED_TRAINER_ENDPOINTS": table.endpoints["trainer"],
        "PADDLE_PORT": str(table.first_port(seat)),
    }
    if seat.devices:
        each = [":".join(table.devices(one.node, one.devices)) for one in table.roles["trainer"]]
        env["PADDLE_LOCAL_DEVICE_IDS"] = ",".join(table.devices(seat.node, seat.devices))
        env["PADDLE_WORLD_DEVICE_IDS"] = ",".join(each)
    return env


def _paddle_elastic(table: Table) -> Env:
    """Compute what Paddle's elastic manager reads about a job, without the server: with one, it would take over the job."""
    return {
        "PADDLE_ELASTIC_JOB_ID": table.identity.run_id,
        "PADDLE_ELASTIC_NP": str(len(table.addresses)),
        "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": str(int(table.job.policy.max_restarts > 0)),
    }


def _rpc(table: Table, seat: Seat, nic: str) -> Env:
    """Compute the variables of paddle.distributed.rpc, and the interface on which the workers of torch's rpc listen."""
    return {
        **_paddle_trainer(table, seat),
        "PADDLE_MASTER_ENDPOINT": endpoint(table.master, table.ports.master),
        "PADDLE_WORKER_ENDPOINT": table.listed([seat]),
        **({"TP_SOCKET_IFNAME": nic} if nic else {}),
    }


def _paddle_ps(table: Table, seat: Seat, paths: JobPaths) -> Env:
    """Compute the variables of Paddle for a process of a job with pservers."""
    servers = table.roles["pserver"]
    env = {
        **_each("PADDLE_ROLE TRAINING_ROLE", roles.PADDLE[seat.role]),
        "PADDLE_PSERVERS_IP_PORT_LIST": table.endpoints["pserver"],
        "PADDLE_PORT": str(table.first_port(seat)),
        "PADDLE_TRAINERS": ",".join(table.addresses[one.node] for one in table.roles["trainer"]),
        "TRAINER_PORTS_NUM": "1",
        "PADDLE_WITH_GLOO": "1",
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_FS_PATH": f"{paths.ours}/gloo",
        "PADDLE_GLOO_HTTP_ENDPOINT": endpoint(table.addresses[servers[0].node], table.ports.gloo),
    }
    if seat.role == "trainer":
        env["PADDLE_TRAINER_ID"] = str(seat.rank)
    return env


def _paddle_heter(table: Table, seat: Seat) -> Env:
    """Compute the variables of Paddle for a pipeline of stages: trainers are 1, heter trainers 2, 3, ...

    All get the list of all heter trainers, all but pservers also the previous and the next stage. All lists have commas between
    endpoints, of several stages too: Paddle's role maker splits only at commas.
    """
    env = {"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": table.endpoints["heter"]}
    if seat.role == "pserver":
        return env
    number, stages = seat.stage or 1, table.stages
    return {
        **env,
        "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": table.listed(stages[number - 2]) if number > 1 else "",
        "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": table.listed(stages[number]) if number < len(stages) else "",
        "PADDLE_STAGE_TRAINERS_NUM": str([len(stage) for stage in stages]),
        "STAGE_ID": str(number),
        "STAGE_NUM": str(len(stages)),
        "HETER_DEVICE_TYPE": heter_type(table.job, seat, table.kinds[seat.node]),
    }


def _paddle_v2(table: Table, seat: Seat) -> Env:
    """Compute the variables of Paddle v2 programs.

    The number of trainers is NUM_GRADIENT_SERVERS; TRAINER_COUNT is threads in one trainer. PORT is a pserver's own one, for
    others that of the first pserver.
    """
    own = seat if seat.role == "pserver" else table.roles["pserver"][0]
    env = {
        "PADDLE_INIT_USE_GPU": str(bool(seat.devices) and table.kinds[seat.node] != "cpu"),
        "PADDLE_INIT_TRAINER_COUNT": "1",
        "PADDLE_INIT_PORT": str(table.first_port(own)),
        "PADDLE_INIT_PORTS_NUM": str(table.cluster.ports_num),
        "PADDLE_INIT_PORTS_NUM_FOR_SPARSE": str(table.cluster.ports_num_for_sparse),
        "PADDLE_INIT_NUM_GRADIENT_SERVERS": str(len(table.roles["trainer"])),
        "PADDLE_INIT_PSERVERS": table.servers,
        "PADDLE_CLUSTER_TRAIN": "True",
    }
    if seat.role == "trainer":
        env["PADDLE_INIT_TRAINER_ID"] = str(seat.rank)
    return env


def _devices(table: Table, seat: Seat) -> Env:
    """Compute the variables that name a process's cards; without pservers also how to communicate where Paddle cannot find out.

    That of the kind has the cards that the process sees, Paddle's flag the positions of its own ones among them. A process of a
    job with parameter servers that gets no card sees none, on a node that has some: -1 hides all of them. The same holds for
    every process without a card where the shell of clusterrun names the devices: it may allow none.
    """
    kind, collective = table.kinds[seat.node], not table.job.has_pservers
    if not seat.devices or kind not in VARIABLES:
        hiding = table.cluster.shell_devices if collective or kind not in VARIABLES else VARIABLES[kind][0]
        hidden = {hiding: "-1"} if hiding else {}
        return {"PADDLE_DISTRI_BACKEND": "gloo", **hidden} if collective else hidden
    setting = table.cluster.device_visibility or (
        "own" if has_mig_instance(table.facts[seat.node].allocated or ()) else ""
    )
    seen = visible(setting, collective, seat, table.neighbours(seat))
    shown, selected = VARIABLES[kind]
    names = ",".join(table.devices(seat.node, seen))
    env = {shown: names, selected: ",".join(str(seen.index(device)) for device in seat.devices)}
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
