"""A launcher in the trainers' command is found, and the command in the warning is right: what it starts is one training."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from cases import cluster_of, hosts, job_of, of_role, plan_of

from clustertool.cli.launchers import foreign_options
from clustertool.cli.launchers.nested_launcher import find, nesting_warning
from clustertool.model.config.job import Options, started_by
from clustertool.verbs.clusterrun import OWN

CLUSTER = cluster_of(hosts(2))


def reported(script: str, typed: str = "", **options: Any) -> str:
    line = typed or f"clustertool run -w job --script {shlex.quote(script)} --detach"
    made = plan_of(CLUSTER, script=script, **options)
    return nesting_warning(made, Options(script=script, **options), shlex.split(line))


# What is typed as --script, and the options and the program of the right command.
INSIDE = [
    ("torchrun --nproc-per-node 2 train.py --lr 0.1", "--nproc-per-node 2 --script 'train.py --lr 0.1'"),
    ("torchrun --standalone --nproc_per_node=gpu train.py", "--nproc-per-node gpu --script train.py"),
    ("/opt/venv/bin/torchrun --nnodes=1 --max-restarts=2 train.py", "--max-restarts 2 --script train.py"),
    ("torchrun -m pkg.train a 'b c'", "--script 'python3 -u -m pkg.train a '\"'\"'b c'\"'\"''"),
    ("torchrun --no-python ./prog -x", "--script './prog -x'"),
    ("python3 -u -m torch.distributed.run --nproc_per_node 4 train.py", "--nproc-per-node 4 --script train.py"),
    ("python -m torch.distributed.launch --nproc_per_node 4 train.py", "--nproc-per-node 4 --script train.py"),
    ("env OMP_NUM_THREADS=4 torchrun train.py", "--env OMP_NUM_THREADS=4 --script train.py"),
    ("fleetrun --with_gloo 1 train.py", "--env PADDLE_WITH_GLOO=1 --script train.py"),
    ("torchrun --tee 3 train.py --env CartPole-v1", "--all-ranks --script 'train.py --env CartPole-v1'"),
    (
        "fleetrun --servers=10.0.0.1:6170 --workers=10.0.0.1,10.0.0.2 train.py",
        "--servers 10.0.0.1:6170 --workers 10.0.0.1,10.0.0.2 --script train.py",
    ),
    ("fleetrun --gpus=0,1 train.py", "--gpus 0,1 --script train.py"),
    ("python -m paddle.distributed.launch --devices 0,1 t.py", "--devices 0,1 --script t.py"),
    (
        "accelerate launch --num_processes 4 --mixed_precision fp16 train.py --lr 1",
        "--nproc-per-node 2 --script 'train.py --lr 1'",
    ),
    ("accelerate launch train.py", "--script train.py"),
    ("python3 -m accelerate.commands.launch --num_processes=2 train.py", "--nproc-per-node 1 --script train.py"),
    (
        "deepspeed --num_gpus 4 train.py --deepspeed_config ds.json",
        "--nproc-per-node 4 --script 'train.py --deepspeed_config ds.json'",
    ),
    (
        "mpirun -np 8 -x A=1 --bind-to none python3 train.py --np 3",
        "--nproc-per-node 4 --script 'python3 train.py --np 3'",
    ),
    ("horovodrun -np 3 -H a:2,b:1 train.py", "--nproc-per-node 2 --script train.py"),
]


@pytest.mark.parametrize(("script", "right"), INSIDE)
def test_the_right_command_starts_the_program_itself(script: str, right: str) -> None:
    text = reported(script)
    assert text.startswith("each of 2 trainers starts ") and "2 separate trainings begin, not one (--nested" in text
    assert text.endswith(f"\n  fix: clustertool run -w job --detach {right}")
    typed = shlex.split(text.partition("\n  fix: ")[2])[2:]
    given = foreign_options.values_for_run(foreign_options.read(typed, OWN), OWN)
    assert find(job_of(CLUSTER, script=given.script).trainer.command or (), 2) is None


@pytest.mark.parametrize(
    "script",
    [
        "train.py",
        "python3 train.py torchrun",
        "python3 train.py -m torch.distributed.run",
        "sh -c 'torchrun --node-rank=$NODE_RANK --nnodes=2 train.py'",
        "accelerate config",
        "torchrun.py",
        # these meet and are one training
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 train.py",
        "fleetrun --ips=10.0.0.1,10.0.0.2 train.py",
        "python -m paddle.distributed.launch --master 10.0.0.1:6070 --nnodes 2 train.py",
    ],
)
def test_what_is_one_training_gets_no_warning(script: str) -> None:
    assert reported(script) == ""


def test_one_trainer_is_one_training() -> None:
    made = plan_of(cluster_of(hosts(1)), script="torchrun train.py")
    assert nesting_warning(made, Options(script="torchrun train.py"), ("inv", "run")) == ""


def test_its_options_replace_those_that_were_typed() -> None:
    typed = (
        "inv run --script='torchrun --nproc_per_node 2 train.py' --nproc_per_node=1 -w job --env=KEY=xyz --env B=xyz"
    )
    text = reported("torchrun --nproc_per_node 2 train.py", typed)
    assert ": inv run -w job '--env=KEY=***' --env 'B=***' --nproc-per-node 2 --script train.py" in text
    assert "xyz" not in text, "a value may be a secret"


def test_a_switch_that_was_typed_too_is_written_once() -> None:
    text = reported("torchrun --tee 3 train.py", "inv run --all-ranks -w job --script 'torchrun --tee 3 train.py'")
    assert text.endswith(": inv run -w job --all-ranks --script train.py")


def test_options_that_are_not_known_give_no_command() -> None:
    text = reported("torchrun --no-such-option 1 train.py")
    assert text.endswith("  fix: start the program without torchrun, with --nproc-per-node N")


def test_a_command_of_job_toml_is_corrected_there() -> None:
    toml = {"trainer": {"command": ["torchrun", "--nproc-per-node=2", "train.py", "--lr", "1"]}}
    text = nesting_warning(plan_of(CLUSTER, toml), Options(), ("clustertool", "run", "-w", "job"))
    assert text.endswith('in job.toml: [trainer] command = ["python3", "-u", "train.py", "--lr", "1"], per_node = 2')


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        (
            "clusterrun --ips=a,b torchrun --nproc-per-node 2 train.py -v",
            "clusterrun --ips=a,b --nproc-per-node 2 train.py -v",
        ),
        ("clusterrun --no_python torchrun train.py", "clusterrun train.py"),
        ("clusterrun -m torch.distributed.run train.py", "clusterrun train.py"),
        (
            "clusterrun -np 4 -H a:2,b:2 torchrun --nproc-per-node 2 train.py --env E",
            "clusterrun -np 4 -H a:2,b:2 train.py --env E",
        ),
        (
            "clusterrun --nproc_per_node 4 torchrun --nproc-per-node=2 train.py",
            "clusterrun --nproc-per-node 2 train.py",
        ),
        ("clusterrun --detach -- deepspeed --num_gpus=2 train.py", "clusterrun --detach --nproc-per-node 2 train.py"),
    ],
)
def test_clusterrun_keeps_its_own_options(typed: str, right: str) -> None:
    launch = foreign_options.read(typed.split()[1:], OWN)
    command = started_by(launch.how, launch.arguments)
    options = Options(command=command, host_counts=bool(launch.total))
    text = nesting_warning(plan_of(CLUSTER, command=command), options, typed.split())
    assert text.endswith(f"\n  fix: {right}")


def test_pservers_are_no_trainings() -> None:
    made = plan_of(CLUSTER, script="torchrun train.py", server_num="2")
    assert len(of_role(made, "pserver")) == 4
    assert "each of 2 trainers" in nesting_warning(made, Options(script="torchrun train.py"), ("inv", "run"))


# -- in a script that a shell reads


MEGATRON = """#!/bin/bash
# torchrun starts it
GPUS=8
NUM_NODES=%s
ARGS="--nproc_per_node $GPUS --nnodes $NUM_NODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR"
torchrun $ARGS \\
    pretrain_gpt.py
"""
SCRIPTS = {
    "train.sh": "set -e\nexport A=1\nCUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 \\\n  train.py\n",
    "outer.sh": "cd . && exec bash train.sh\n",
    "again.sh": "bash again.sh\n",
    "module": "#!/usr/bin/env bash\n$PYTHON -m torch.distributed.run train.py\n",
    "one.sh": MEGATRON % 1,
    "two.sh": MEGATRON % "${NNODES:-1}",
    "plain.sh": "# torchrun train.py\necho torchrun\npython3 train.py --with torchrun\n",
    "prog": "#!/usr/bin/python3\nimport os  # torchrun x\n",
}


@pytest.fixture
def scripts(tmp_path: Path) -> str:
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe.sh")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("bash train.sh", "torchrun in train.sh"),
        ("env X=1 bash -euo pipefail train.sh --lr 1", "torchrun in train.sh"),
        ("./module", "$PYTHON -m torch.distributed.run in ./module"),
        ("bash -lc 'cd x; torchrun train.py'", "torchrun in bash -c"),
        ("sh outer.sh", "torchrun in train.sh"),
        ("bash one.sh", "torchrun in one.sh"),
        ("bash two.sh", ""),
        ("bash plain.sh", ""),
        ("bash again.sh", ""),
        ("./prog", ""),
        ("bash missing.sh", ""),
        ("bash pipe.sh", ""),
        ("bash", ""),
        ("bash ''", ""),
        ("sh -c 'bash plain.sh; bash plain.sh; bash train.sh'", "torchrun in train.sh"),
    ],
)
def test_a_launcher_in_a_script(scripts: str, script: str, shown: str) -> None:
    text = nesting_warning(plan_of(CLUSTER, script=script), Options(script=script), ("clustertool", "run"), scripts)
    assert text.partition(":")[0] == (f"each of 2 trainers starts {shown}" if shown else "")
    assert ("--nested, one on each node" in text) == bool(shown)


@pytest.mark.parametrize(
    "script", ["llamafactory-cli train x.yaml", "sh -c 'FORCE_TORCHRUN=1 llamafactory-cli train x.yaml'"]
)
def test_a_front_end_in_each_trainer(script: str) -> None:
    text = reported(script, nproc_per_node="2")
    assert text.startswith("each of 4 trainers starts llamafactory-cli train")
    assert "--nested, one on each node" in text
    assert reported(script) == "", "with one trainer on a node it reads NNODES"
    assert reported("llamafactory-cli version", nproc_per_node="2") == ""


def test_a_script_that_meets_does_not_where_a_node_has_several_trainers(scripts: str) -> None:
    made = plan_of(CLUSTER, script="bash two.sh", nproc_per_node="2")
    assert nesting_warning(made, Options(script="bash two.sh"), ("clustertool", "run"), scripts)


def test_a_script_is_read_up_to_a_limit(scripts: str) -> None:
    Path(scripts, "long.sh").write_text("true\n" * (1 << 15) + "torchrun train.py\n")
    made = plan_of(CLUSTER, script="bash long.sh")
    assert not nesting_warning(made, Options(script="bash long.sh"), ("clustertool", "run"), scripts)
