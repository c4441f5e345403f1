"""This module prints what users of fleetrun expect at a start: the configuration, and the first process's environment."""

from __future__ import annotations

from collections.abc import Mapping

from clustertool.show.table import table
from clustertool.show.terminal import Terminal

_RULE = "-----------  Configuration Arguments  -----------"
_NAMES = (
    "TRAINING_ROLE",
    "PADDLE_TRAINER_ID",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
    "POD_IP",
    "PADDLE_PORT",
    "PADDLE_MASTER",
    "PADDLE_GLOO_HTTP_ENDPOINT",
    "PADDLE_DISTRI_BACKEND",
    "PADDLE_RANK_IN_NODE",
    "FLAGS_selected_gpus",
    "FLAGS_selected_xpus",
    "FLAGS_selected_npus",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "XPU_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ENDPOINTS = 3  # of a longer list the first ones and their number are enough: log/endpoints.log has all


def configuration(values: Mapping[str, str], terminal: Terminal) -> None:
    """`name: value` lines by name, between two rules."""
    terminal.line(_RULE, "bold")
    for name in sorted(values):
        terminal.line(f"{name}: {values[name]}")
    terminal.line("-" * len(_RULE), "bold")


def environment(title: str, env: Mapping[str, str], terminal: Terminal) -> None:
    """The variables that place a process, in the order in which fleetrun has them."""
    rows = [(name, _short(env[name])) for name in _NAMES if name in env]
    table(title, ("Distributed Envs", "Value"), rows, terminal=terminal)


def _short(value: str) -> str:
    parts = value.split(",")
    return value if len(parts) <= _ENDPOINTS else f"{','.join(parts[:_ENDPOINTS])},... ({len(parts)} in all)"
