"""clusterrun obeys these variables of the user's shell as fleetrun does, where no HOSTS of a conf.py name the nodes. Pure.

`run` reads none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from clustertool.errors import UsageError
from clustertool.model.cards import VARIABLES, device_names
from clustertool.model.config.cluster import Cluster
from clustertool.model.launcher_variables import for_frameworks
from clustertool.model.quantities import whole

# Of PaddleCloud, and no options of Paddle's launcher; here --gloo-port has parameter servers.
_NO_OPTIONS = ("GLOO_PORT", "HOST", "SERVERS", "TRAINERS")
_PLAIN = {"NNODES": "NODE_RANK", "WORLD_SIZE": "RANK"}  # a number of machines: the number of this one


class Visible(NamedTuple):
    """Devices that a shell lets one use. Without ids: kind "cpu", no device."""

    variable: str
    kind: str
    ids: tuple[int, ...]


def apply_to(cluster: Cluster, environ: Mapping[str, str], chosen: bool) -> Cluster:
    """Apply the devices and Paddle's settings of a shell to the cluster. Raises UsageError for devices that mean nothing here.

    chosen: the command line names devices; then a variable that cannot be used is ignored. A process on this machine inherits
    the settings; for other nodes they have the lowest priority among the user's variables.
    """
    seen = visible(environ, strict=not chosen)
    if seen:
        hosts = cluster.hosts
        if seen.ids:
            hosts = tuple(replace(host, devices=seen.ids[: len(host.slots or seen.ids)]) for host in hosts)
        kind = seen.kind if cluster.device_kind == "auto" else cluster.device_kind
        cluster = replace(cluster, hosts=hosts, device_kind=kind, shell_devices=seen.variable)
    if all(host.here for host in cluster.hosts):
        return cluster
    return replace(cluster, env=(*paddle_settings(cluster, environ).items(), *cluster.env))


def paddle_settings(cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Select Paddle's variables that no launcher computes and that conf.py does not set."""
    own = {name for name, _ in cluster.env}
    return {name: value for name, value in sorted(environ.items()) if for_frameworks(name) and name not in own}


def describe(cluster: Cluster, environ: Mapping[str, str]) -> str:
    """Describe in one line which devices and settings `cluster` has from the shell, "" if none."""
    variable = cluster.shell_devices
    passed = [name for name, value in cluster.env if for_frameworks(name) and environ.get(name) == value]
    parts = [f"{variable}={environ[variable]} is for every node (env -u {variable}: all devices)"] if variable else []
    parts += [f"{', '.join(passed)} {'is' if len(passed) == 1 else 'are'} passed on"] if passed else []
    return f"from this shell: {'; '.join(parts)}" if parts else ""


def cloud_machines(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the machines that PaddleCloud's variables name, by number, where they are several; () for one machine.

    paddle.distributed.launch joins them without --ips.
    """
    if not all(environ.get(name) for name in ("PADDLE_TRAINERS", "POD_IP", "PADDLE_TRAINER_ID")):
        return ()
    found = tuple(filter(None, re.split(r"[,\s]+", environ["PADDLE_TRAINERS"])))
    return found if len(found) > 1 else ()


def launch_options(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Map each variable (PET_* of torchrun, PADDLE_* of Paddle's launch) to the option that it may stand for: (name, value).

    Variables with an empty value are left out. {} in a rank of any launcher: it has the variables of its own job.
    """
    found: dict[str, tuple[str, str]] = {}
    for variable, value in sorted(environ.items()) if not _in_rank(environ) else ():
        prefix, _, name = variable.partition("_")
        if value and (prefix == "PET" or (prefix == "PADDLE" and name not in _NO_OPTIONS)):
            found[variable] = re.sub("_ENDPOINTS$", "", name).lower().replace("_", "-"), value
    return found


def front_end_machines(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the variable by which front ends and operators state several machines, and their number; ("", 0) without one.

    LLaMA-Factory and ms-swift start torchrun by NNODES. Pods of Kubeflow's PyTorchJob have WORLD_SIZE, RANK and MASTER_ADDR. In
    a rank of a launcher they do not count.
    """
    for name, own in _PLAIN.items():
        number = whole(environ.get(name, ""), 2, 100_000)
        if number and not _in_rank(environ) and (name == "NNODES" or (environ.get(own) and environ.get("MASTER_ADDR"))):
            return name, number
    return "", 0


def _in_rank(environ: Mapping[str, str]) -> bool:
    """Check whether this shell is in a process that a launcher has started as a rank.

    It is if RANK and LOCAL_RANK are set, or a variable for the rank of clustertool or of Paddle's launcher.
    """
    torchs = environ.get("RANK") and environ.get("LOCAL_RANK")
    return bool(torchs or any(environ.get(f"{name}_RANK") for name in ("CLUSTERTOOL", "PADDLE_LOCAL", "PADDLE_GLOBAL")))


def visible(environ: Mapping[str, str], strict: bool = True) -> Visible | None:
    """Read what CUDA_VISIBLE_DEVICES and the variables of other kinds allow, None if none is set.

    The first one with devices counts, in the order of VARIABLES; without such, an empty value hides all devices, as for CUDA.
    Raises UsageError for what is no number; not `strict`: such a value does not count, and neither does an empty one.
    """
    hidden: Visible | None = None
    for kind, (variable, _) in VARIABLES.items():
        text = environ.get(variable, "all").strip()
        if text == "all":
            continue
        names = device_names(text)
        odd = next((name for name in names if not name.isdecimal()), "")
        if odd:
            if strict:
                raise _odd(variable, text, odd)
        elif names:
            return Visible(variable, kind, tuple(map(int, dict.fromkeys(names))))
        elif strict or text.strip(", "):
            hidden = hidden or Visible(variable, "cpu", ())
    return hidden


def _odd(variable: str, text: str, odd: str) -> UsageError:
    """Create the error for a device that is named by no number. variable, text: its name and its value. odd: the device."""
    what = "is a UUID" if re.match("GPU-", odd) else "is a MIG instance" if re.match("MIG-", odd) else "is no number"
    fix = f"nvidia-smi -L lists the numbers: --devices 0,1, or env -u {variable} clusterrun ... for all devices"
    return UsageError(f"{variable}={text}: {odd!r} {what}, and devices are named by numbers here", fix)
