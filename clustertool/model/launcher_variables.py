"""Launchers compute these variables for processes, or read them as their own options. No job gets those of a shell.

Sources: paddle.distributed.launch 2.6.2 and 3.3.1 (controllers/*.py, context/args_envs.py), its elastic manager, PaddleCloud's
operator, the old paddle.py, torchrun of torch 2.13.
"""

from __future__ import annotations

from typing import Dict, Mapping, Optional

SECRET = "CLUSTERTOOL_SECRET"  # of the user's typed commands: no program that the tool starts needs it

_PADDLE = """
    ALL_HETER_TRAINER_IP_PORT_LIST AUTO_CLUSTER AUTO_PARALLEL_CONFIG BACKUP_ENV_PATH CLUSTER_TOPO_PATH CLUSTER_TRAIN
    COORDINATOR_ENDPOINTS COORDINATOR_NUM CURRENT_ENDPOINT DEVICES DISTRI_BACKEND ENABLE_AUTO_MAPPING GLOBAL_RANK
    GLOBAL_SIZE GLOO_PORT HETER_TRAINER_IP_PORT_LIST HOST ID IPS IS_LOCAL JOB_ID LOCAL_DEVICE_IDS LOCAL_RANK
    LOCAL_SIZE LOG_DIR LOG_LEVEL LOG_OVERWRITE MASTER MASTER_ENDPOINT MAX_RESTART NEED_RANK_MAPPING
    NEXT_HETER_TRAINER_IP_PORT_LIST NIC NNODES NPROC_PER_NODE PORT PORTS_NUM PORTS_NUM_FOR_SPARSE
    PREVIOUS_HETER_TRAINER_IP_PORT_LIST PSERVERS PSERVERS_IP_PORT_LIST PSERVER_ENDPOINTS PSERVER_ID RANK RANK_IN_NODE
    RANK_MAPPING_PATH ROLE RUNNING_ENV RUNNING_PLATFORM RUN_MODE SCALE SERVERS_ENDPOINTS SERVER_NUM SORT_IP
    STAGE_TRAINERS_NUM START_PORT TRAINERS TRAINERS_ENDPOINTS TRAINERS_NUM TRAINER_ENDPOINTS TRAINER_ID TRAINER_NUM
    USE_GPU WITH_GLOO WORKER_ENDPOINT WORLD_DEVICE_IDS XCCL_BACKEND
""".split()
_OTHERS = """
    DISTRIBUTED_TRAINER_ENDPOINTS FLAGS_START_PORT GROUP_RANK GROUP_WORLD_SIZE HETER_DEVICE_TYPE LOCAL_RANK LOCAL_WORLD_SIZE
    MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC_PER_NODE POD_IP POD_NAME RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
    STAGE_ID STAGE_NUM TRAINER_PORTS_NUM TRAINING_ROLE WORLD_SIZE
""".split()
# Of the computed variables those that a shell sets for programs: a job on this machine alone keeps the values of its shell.
SHELL_DEFAULTS = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_NAMES = {*(f"PADDLE_{name}" for name in _PADDLE), *_OTHERS}
_PREFIXES = tuple(
    "CLUSTERTOOL_ FLAGS_selected_ OMPI_ PADDLE_ELASTIC_ PADDLE_GLOO_ PADDLE_INIT_ PET_ TORCHELASTIC_".split()
)


# Of a scheduler's task. Lightning, accelerate and JAX take the number of tasks for the number of ranks.
_OF_TASK = ("SLURM_", "SLURMD_", "SRUN_", "PMI")  # PMIX_, too
_OF_ALLOCATION = "SLURM_CLUSTER_NAME SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_PARTITION".split()

# By these a launcher of MPI takes its place from a scheduler, and starts its daemons with the scheduler's programs.
_OF_SCHEDULER = (*_OF_TASK, "PBS_", "LSB_", "LSF_", "LS_", "SGE_", "PE_HOSTFILE", "OAR_", "COBALT_", "FLUX_")


def of_scheduler(name: str) -> bool:
    """Check whether a variable is a scheduler's, so that mpirun would find the scheduler by it."""
    return name.startswith(_OF_SCHEDULER)


def of_task(name: str) -> bool:
    """Check whether a variable describes a task of a scheduler, and not the whole allocation, whose variables ranks keep."""
    return name.startswith(_OF_TASK) and name not in _OF_ALLOCATION


def cpus_of_task(environ: Mapping[str, str]) -> Optional[int]:
    """Read SLURM_CPUS_ON_NODE, how many CPUs of this node a scheduler's task has; None if that is not known."""
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) or None if text.isdecimal() else None


def without_secret(environ: Mapping[str, str]) -> Dict[str, str]:
    """Copy an environment without CLUSTERTOOL_SECRET, for a program that the tool starts."""
    return {name: value for name, value in environ.items() if name != SECRET}


def of_launcher(name: str) -> bool:
    """Check whether a launcher computes this variable, or reads it as an option of its own."""
    return name in _NAMES or name.startswith(_PREFIXES)


def for_frameworks(name: str) -> bool:
    """Check whether a variable is Paddle's and no launcher computes it: PADDLE_PG_TIMEOUT, PADDLE_LAUNCH_LOG, FLAGS_..."""
    return name.startswith(("PADDLE_", "FLAGS_")) and not of_launcher(name)


def patterns() -> str:
    """Return the variables of launchers and of a scheduler's task, as patterns of a shell's `case`: A|B|C*."""
    return "|".join([*sorted(_NAMES), *(f"{prefix}*" for prefix in (*_PREFIXES, *_OF_TASK))])


def of_allocation(name: str) -> bool:
    """Check whether a variable describes the whole allocation of a scheduler: ranks keep it."""
    return name in _OF_ALLOCATION
