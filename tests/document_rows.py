"""The command lines of Paddle's documents: what they have people type, what to type here, and what is checked of it.

docs/coming-from-fleetrun.md has these rows as a table. `python -m tests.document_rows` writes it there.
tests/unit/test_document_rows.py compares both, and makes the plan of each row that has `plans`.
tests/here/test_typed_rows.py runs those that have `runs`. `ran_by` names a test that runs what the row has; `not_run`
states why no test here can.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs/coming-from-fleetrun.md"
BEGIN, END = "<!-- rows of tests/document_rows.py -->", "<!-- end of these rows -->"
DOCUMENTS = {
    "A": "paddle.distributed.launch (API)",
    "F": "starting with fleetrun",
    "G": "guide to launching",
    "D": "guide to deployment",
    "C": "old guide to clusters",
}
IPS, TWO = "192.168.0.1,192.168.0.2", "--ips=192.168.0.1,192.168.0.2"
EIGHT = "0,1,2,3,4,5,6,7"
MASTER = "--master 192.168.0.1:8090 --nnodes 2"


@dataclass(frozen=True)
class Row:
    """One line of the documents.

    typed: what they have. now: the command line here, or what is to be done. result: "works", "differs: ..." or
    "not here: ...". plans: what the plan of `now` has, by the names of tests/unit/test_document_rows.py. runs: what happens
    where it is run on this machine, by the names of tests/here/test_typed_rows.py. has: the devices of each node, "" for
    none.
    """

    document: str
    typed: str
    now: str
    result: str = "works"
    plans: Mapping[str, Any] = field(default_factory=dict)
    runs: Mapping[str, Any] = field(default_factory=dict)
    ran_by: str = ""
    not_run: str = ""
    has: str = "gpu"


def have(**values: Any) -> dict[str, Any]:
    return values


def _lists(servers: str, workers: str) -> str:
    return f'--servers="{servers}" --workers="{workers}"'


_A, _B = "192.168.0.1", "192.168.0.2"
_EXACT = _lists(
    f"{_A}:6170,{_B}:6171",
    ",".join([*(f"{_A}:{p}" for p in range(6172, 6176)), *(f"{_B}:{p}" for p in range(6176, 6180))]),
)
_ONE_EACH = _lists(f"{_A}:6170,{_B}:6170", f"{_A}:6171,{_B}:6171")
_K8S = "tests/kubernetes/test_paddlejob_examples.py::test_the_native_form_has_each_field_of_the_example"
_TYPED = "tests/lab/test_typed.py::test_examples_of_the_launchers_documents"
_OPERATOR = "kubectl's own command; the operator must be there"
_PADDLE = "the text is that of Paddle itself"
_NATIVE = "`clustertool export --native --workspace ./job`"

ROWS = (
    # -- paddle.distributed.launch
    Row(
        "A G",
        f"--gpus {EIGHT} train.py --batch_size=64",
        f"clusterrun --gpus {EIGHT} train.py --batch_size=64",
        plans=have(trainers=8, cards=EIGHT, ends="--batch_size=64"),
    ),
    Row(
        "A",
        "train.py (no --gpus)",
        "clusterrun train.py",
        "works: all cards of the node",
        plans=have(trainers=8, cards=EIGHT),
    ),
    Row(
        "A G",
        "--gpus 2,3 train.py",
        "clusterrun --gpus 2,3 train.py",
        plans=have(trainers=2, cards="2,3", selected="0 1"),
    ),
    Row(
        "A G",
        f"{TWO} --gpus={EIGHT} train.py",
        f"clusterrun {TWO} --gpus={EIGHT} train.py",
        "works, typed once",
        plans=have(trainers=16, each=(8, 8)),
    ),
    Row(
        "A",
        f"{TWO} --gpus=0,1,2,3 train.py",
        f"clusterrun {TWO} --gpus=0,1,2,3 train.py",
        "works, typed once",
        plans=have(trainers=8, each=(4, 4)),
    ),
    Row(
        "A",
        "the same on each of the two nodes",
        f"clusterrun {MASTER} --gpus=0,1,2,3 train.py",
        "differs: with `--ips` one command starts all nodes; on the second node it ends with 64 and shows this form",
        plans=have(meets=(f"{_A}:8090", 2)),
    ),
    Row(
        "A G",
        "--gpus=0,1 on the first node, --gpus=2,3 on the second",
        f'clusterrun {TWO} --only "{_A}:0,1@{_B}:2,3" train.py',
        "differs: one command has the cards of each node, by `--only` or HOSTS",
        plans=have(each=(2, 2), own="0 1 2 3"),
    ),
    Row(
        "A",
        "--ips in the same order on all nodes",
        f"clusterrun --ips={_B},{_A} train.py",
        "works: it is typed once",
        plans=have(hosts=f"{_B},{_A}"),
    ),
    Row(
        "A",
        "the same number of cards on all nodes",
        f'clusterrun {TWO} --only "{_A}:0@{_B}:1,2,3" train.py',
        "works: other numbers are possible",
        plans=have(each=(1, 3)),
    ),
    Row(
        "A",
        "-h",
        "clusterrun -h",
        runs=have(out=("options of fleetrun and python -m paddle.distributed.launch", "--ips")),
        has="",
    ),
    Row(
        "A",
        "--log_dir=mylog train.py",
        "clusterrun --log_dir=mylog train.py",
        runs=have(files={"mylog/workerlog.0": "rank 0 of 1", "mylog/endpoints.log": "PADDLE_TRAINER_ENDPOINTS:"}),
        has="",
    ),
    Row(
        "A",
        f"{TWO} --log_dir=mylog: all logs are there",
        f"clusterrun {TWO} --log_dir=mylog --fetch-logs train.py",
        "differs: without `--fetch-logs` the logs of rank 0 and those shown are there; all are on the nodes",
        plans=have(trainers=16, given=have(log_dir="mylog", fetch_logs=True)),
    ),
    Row(
        "A",
        f"{TWO} --log_dir=mylog: endpoints.log is there",
        f"clusterrun {TWO} --log_dir=mylog train.py",
        plans=have(given=have(log_dir="mylog")),
        ran_by="tests/ssh/test_cli_logs.py::test_logs_on_this_machine_while_the_job_runs",
    ),
    Row(
        "A",
        "--run_mode=ps (collective, ps-heter)",
        "clusterrun --run_mode=ps --server_num=1 --worker_num=1 train.py",
        plans=have(mode="ps", pservers=1, trainers=1),
        runs=have(err=("1 pserver, 1 trainer on 1 node",)),
        has="",
    ),
    Row(
        "A",
        "export CUDA_VISIBLE_DEVICES=4,5,6,7; --gpus 4,6",
        "CUDA_VISIBLE_DEVICES=4,5,6,7 clusterrun --gpus 4,6 train.py",
        "works: physical numbers; others are refused (64)",
        plans=have(cards="4,6", selected="0 1"),
    ),
    Row("A", "the terminal shows the first card's log", "clusterrun train.py", plans=have(shown=[("trainer", 0)])),
    Row(
        "A",
        f"{_ONE_EACH} train.py",
        f"clusterrun {_ONE_EACH} train.py",
        plans=have(endpoints=f"{_A}:6170 {_B}:6170 {_A}:6171 {_B}:6171"),
    ),
    Row(
        "A",
        "--workers with addresses only",
        f"clusterrun {_lists(f'{_A}:6170', IPS)} train.py",
        plans=have(pservers=1, each=(1, 1)),
    ),
    Row(
        "A",
        "--heter_workers=...",
        f"clusterrun {_lists(f'{_A}:6170', f'{_A}:6171')} --heter_workers={_A}:6172 --heter_devices=gpu train.py",
        "works. The example of the document gives one port to two processes: an error (69) that names it",
        plans=have(mode="ps-heter", pservers=1, trainers=1, heters=1),
    ),
    Row(
        "A",
        "--worker_num=2 --server_num=2 --heter_worker_num=2",
        "clusterrun --server_num=2 --worker_num=2 --heter_worker_num=2 --heter_devices=cpu train.py",
        plans=have(pservers=2, trainers=2, heters=2),
    ),
    Row(
        "A",
        "--http_port=6179",
        "clusterrun --server_num=1 --worker_num=1 --http_port=6179 train.py",
        plans=have(gloo="127.0.0.1:6179"),
    ),
    Row(
        "A G",
        f"{TWO} --elastic_server=127.0.0.1:2379 --np=2 --job_id=job1 train.py",
        f"clusterrun {TWO} --elastic_server=127.0.0.1:2379 --np=2 --job_id=job1 train.py",
        "works: a fixed number of nodes needs no etcd, and a note states it",
        plans=have(trainers=16, job_id="job1", says="--elastic-server is not needed"),
    ),
    Row(
        "A G",
        "--job_id=job1, typed again",
        "clusterrun --job_id=job1 train.py",
        "works: the second one is job1-2; while job1 runs, it is refused (64)",
        runs=have(again="job1-2"),
        has="",
    ),
    Row(
        "A G",
        "--host=IP, by default POD_IP",
        "clusterrun --host=127.0.0.1 train.py",
        "works: an address of this machine. POD_IP of the shell is not read",
        plans=have(trainers=8, hosts="127.0.0.1"),
    ),
    # -- fleetrun
    Row(
        "F",
        "export CUDA_VISIBLE_DEVICES=0; python train.py",
        "the same",
        "not here: it starts no launcher",
        not_run="Python alone",
    ),
    Row("F", "--gpus=0 train.py", "clusterrun --gpus=0 train.py", plans=have(trainers=1, cards="0")),
    Row(
        "F",
        "export CUDA_VISIBLE_DEVICES=0; train.py",
        "CUDA_VISIBLE_DEVICES=0 clusterrun train.py",
        plans=have(trainers=1, cards="0"),
    ),
    Row("F", "--gpus=0,1,2,3 train.py", "clusterrun --gpus=0,1,2,3 train.py", plans=have(trainers=4, cards="0,1,2,3")),
    Row(
        "F",
        "export CUDA_VISIBLE_DEVICES=0,1,2,3; train.py",
        "CUDA_VISIBLE_DEVICES=0,1,2,3 clusterrun train.py",
        plans=have(trainers=4, cards="0,1,2,3"),
    ),
    Row(
        "F",
        f'--ips="{IPS}" --gpus=0,1,2,3 train.py',
        f'clusterrun --ips="{IPS}" --gpus=0,1,2,3 train.py',
        "works, typed once",
        plans=have(trainers=8, each=(4, 4)),
    ),
    Row(
        "F",
        f'export CUDA_VISIBLE_DEVICES=0,1,2,3; --ips="{IPS}" train.py',
        f'CUDA_VISIBLE_DEVICES=0,1,2,3 clusterrun --ips="{IPS}" train.py',
        "works, typed once",
        plans=have(trainers=8, each=(4, 4), cards="0,1,2,3"),
    ),
    Row(
        "F",
        f'--ips="{IPS}" train.py',
        f'clusterrun --ips="{IPS}" train.py',
        "works, typed once",
        plans=have(trainers=16, each=(8, 8)),
    ),
    Row(
        "F",
        "--server_num=1 --worker_num=4 train.py",
        "clusterrun --server_num=1 --worker_num=4 train.py",
        plans=have(pservers=1, trainers=4),
        runs=have(
            err=("1 pserver, 4 trainers on 1 node",),
            files={"log/serverlog.0": "pserver", "log/workerlog.3": "rank 3 of 4"},
        ),
        has="",
    ),
    Row(
        "F",
        "2 servers and 8 workers by addresses",
        f"clusterrun {_lists(f'{_A}:6170,{_B}:6171', ','.join([_A] * 4 + [_B] * 4))} train.py",
        plans=have(pservers=2, each=(4, 4)),
        has="",
    ),
    Row(
        "F",
        "2 servers and 8 workers with ports",
        f"clusterrun {_EXACT} train.py",
        plans=have(pservers=2, each=(4, 4), ports="6172 6173 6174 6175 6176 6177 6178 6179"),
        has="",
    ),
    Row(
        "F",
        "2 servers, 4 workers with a card each",
        "CUDA_VISIBLE_DEVICES=0,1,2,3 clusterrun --server_num=2 --worker_num=4 train.py",
        plans=have(pservers=2, own="0 1 2 3", server_cards="-1"),
    ),
    Row(
        "F",
        "export CUDA_VISIBLE_DEVICES=0; 2 servers, 2 workers",
        "CUDA_VISIBLE_DEVICES=0 clusterrun --server_num=2 --worker_num=2 train.py",
        "works: the workers share card 0",
        plans=have(own="0 0", server_cards="-1"),
    ),
    Row(
        "F",
        "the same on 2 machines with 1 + 1",
        f"CUDA_VISIBLE_DEVICES=0 clusterrun {_ONE_EACH} train.py",
        plans=have(each=(1, 1), own="0 0"),
    ),
    Row(
        "F",
        "export CUDA_VISIBLE_DEVICES=0,1,2,3; 2 machines with 1 + 4",
        f"CUDA_VISIBLE_DEVICES=0,1,2,3 clusterrun {_EXACT} train.py",
        plans=have(each=(4, 4), own="0 1 2 3 0 1 2 3"),
    ),
    Row(
        "F",
        "2 servers, 2 workers, 2 heter workers with a card each",
        "CUDA_VISIBLE_DEVICES=0,1 clusterrun --server_num=2 --worker_num=2 --heter_worker_num=2 --heter_devices=gpu train.py",
        plans=have(heters=2, heter_own="0 1", own="- -"),
    ),
    Row("F", "--ips: by default 127.0.0.1", "clusterrun train.py", plans=have(hosts="127.0.0.1")),
    Row(
        "F",
        "--gpus: by default those of CUDA_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES=1,3 clusterrun train.py",
        plans=have(cards="1,3"),
    ),
    Row(
        "F",
        f"export CUDA_VISIBLE_DEVICES={EIGHT}; --nproc_per_node=4",
        f"CUDA_VISIBLE_DEVICES={EIGHT} clusterrun --nproc_per_node=4 train.py",
        "works: two cards each. `int(FLAGS_selected_gpus)` of the example program fails then, as with Paddle's launcher",
        plans=have(trainers=4, own="0,1 2,3 4,5 6,7", selected="0,1 0,1 0,1 0,1"),
    ),
    Row(
        "F",
        "--nproc_per_node: at most the number of cards",
        "CUDA_VISIBLE_DEVICES=0,1 clusterrun --nproc_per_node=4 train.py",
        "works: more processes share the cards",
        plans=have(own="0 1 0 1"),
    ),
    Row(
        "F",
        "--nproc_per_node=4 without cards",
        "clusterrun --nproc_per_node=4 train.py",
        plans=have(trainers=4, own="- - - -"),
        runs=have(err=("4 trainers on 1 node",), files={"log/workerlog.3": "rank 3 of 4"}),
        has="",
    ),
    Row(
        "F",
        "--log_dir: by default ./log",
        "clusterrun train.py",
        runs=have(files={"log/workerlog.0": "rank 0 of 1"}),
        has="",
    ),
    Row(
        "F",
        "program with CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))",
        "clusterrun --gpus=0,1 train.py",
        "works with one card for each process",
        plans=have(selected="0 1"),
    ),
    Row(
        "F",
        "block Configuration Arguments",
        "clusterrun --gpus=0 train.py",
        "works: with the options that were given, where the script imports Paddle, else with `-v`",
        ran_by="tests/here/test_clusterrun_here.py::test_what_fleetruns_users_search",
    ),
    Row(
        "F",
        "table Distributed Envs",
        "clusterrun train.py",
        "works, as the block above",
        ran_by="tests/here/test_clusterrun_here.py::test_what_fleetruns_users_search",
    ),
    Row(
        "F",
        "each card's log is in ./log",
        "clusterrun --nproc_per_node=2 train.py",
        runs=have(files={"log/workerlog.1": "rank 1 of 2"}),
        has="",
    ),
    Row(
        "F",
        "fleetrun is python -m paddle.distributed.launch",
        "clusterrun train.py",
        "works. As the script of clusterrun the launcher is named in a warning, with the right command",
        ran_by="tests/here/test_clusterrun_here.py::test_a_launcher_that_each_trainer_would_start",
    ),
    # -- guide to launching
    Row(
        "G",
        "[--ips] [--gpus] [--run_mode] script [arguments]",
        f"clusterrun {TWO} --gpus=0,1 --run_mode=collective train.py --lr 0.1",
        plans=have(trainers=4, ends="0.1"),
    ),
    Row(
        "G",
        f"PaddleCloud: --gpus={EIGHT} train.py on each node",
        f"clusterrun {MASTER} --rank 0 --gpus={EIGHT} train.py",
        "differs: PADDLE_TRAINERS, POD_IP and PADDLE_TRAINER_ID of the shell join no machines; a warning has this command",
        plans=have(meets=(f"{_A}:8090", 2)),
    ),
    Row(
        "G",
        "ping from each node to the other",
        "clustertool check",
        ran_by="tests/ssh/test_cli_verbs.py::test_check_is_one_matrix",
    ),
    Row(
        "G",
        f"{TWO} --gpus=0,1 (0,1,2,3; none)",
        f"clusterrun {TWO} --gpus=0,1 train.py",
        "works, typed once",
        plans=have(each=(2, 2)),
    ),
    Row(
        "G",
        "a process for each card, a free port for each",
        "clusterrun --gpus=0,1,2,3 train.py",
        plans=have(trainers=4, different_ports=4),
    ),
    Row(
        "G",
        "too few free ports: the start fails",
        "clusterrun --start_port=6170 train.py",
        "works: 69, which names the process that has the port",
        ran_by="tests/unit/test_ports.py::test_a_port_that_was_asked_for_and_is_busy_is_refused_with_its_holder",
    ),
    Row(
        "G",
        "rank = M_id * N + N_id, by --ips and --gpus",
        f"clusterrun {TWO} --gpus 3,1 train.py",
        plans=have(own="3 1 3 1", ranks="0.0 0.1 1.0 1.1"),
    ),
    Row(
        "G",
        "rank 0 on the terminal, the others in log_dir",
        f"clusterrun {TWO} --log_dir=mylog --fetch-logs train.py",
        "differs: the logs of the others are on their nodes, and with `--fetch-logs` in log_dir at the end",
        plans=have(given=have(log_dir="mylog", fetch_logs=True)),
    ),
    Row(
        "G",
        "workerlog.N, N the rank of the job, on each node",
        f"clusterrun {TWO} --gpus=0,1 train.py",
        plans=have(logs="0:workerlog.0 0:workerlog.1 1:workerlog.2 1:workerlog.3"),
    ),
    Row(
        "G",
        "endpoints.log",
        "clusterrun --nproc_per_node=2 train.py",
        runs=have(files={"log/endpoints.log": r"PADDLE_TRAINER_ENDPOINTS:( |\n)\S+:\d+\n\S+:\d+\n"}),
        has="",
    ),
    Row(
        "G",
        "logs are appended",
        "clusterrun train.py",
        "differs: each job has a log folder of its own, and `log` leads to the newest",
        not_run="nothing is appended",
    ),
    Row(
        "G",
        "ABORT!!! Out of all 8 trainers, the trainer process with rank=[2,3] was aborted.",
        "clusterrun --nproc_per_node=4 bad.py",
        "works, word for word",
        runs=have(
            code=3,
            err=(
                "ABORT!!! Out of all 4 trainers, the trainer process with rank=[2,3] was aborted. Please check its log.",
            ),
        ),
        has="",
    ),
    Row(
        "G",
        "workerlog.2 and .3 have the errors",
        "clusterrun --nproc_per_node=4 bad.py",
        "works; `clustertool logs --rank 2` shows it",
        runs=have(code=3, then="2"),
        has="",
    ),
    Row("G", "SignalInfo: SIGTERM in the log of another rank", "clusterrun train.py", "works", not_run=_PADDLE),
    Row(
        "G",
        "servers, workers and elastic options again",
        "clusterrun --server_num=2 --worker_num=2 train.py",
        "works, as above",
        plans=have(pservers=2, trainers=2),
    ),
    # -- guide to deployment
    Row(
        "D",
        "GPU, XPU, NPU, DCU, CPU",
        "clusterrun --xpus=0,1 train.py",
        "works; DCU was not tried",
        plans=have(own="0 1", xpus="0,1"),
        has="xpu",
    ),
    Row(
        "D",
        "docker run --net=host -v $PWD:/paddle IMAGE",
        "clusterrun --image IMAGE train.py",
        "differs: `--image` or `CONTAINER` in conf.py start each process in a container ([containers.md](containers.md))",
        ran_by="tests/lab/test_docker.py::test_docker_on_a_node",
    ),
    Row(
        "D",
        "pip install paddlepaddle on each node",
        'clustertool exec --command "python3 -m pip install paddlepaddle"',
        ran_by="tests/ssh/test_cli_verbs.py::test_exec_gathers_equal_output",
    ),
    Row(
        "D",
        "paddle.utils.run_check()",
        "clustertool check --framework paddle",
        ran_by="tests/frameworks/test_paddle.py::test_check_tries_it_on_all_nodes",
    ),
    Row(
        "D",
        "--nnodes=2 demo.py on any node, the command for the other is shown",
        "clusterrun --nnodes=2 demo.py",
        "works with a common secret; without it 64, and the fix names it ([without-ssh.md](without-ssh.md))",
        ran_by="tests/lab/test_typed.py::test_the_first_machine_of_paddles_documents_names_no_place",
    ),
    Row(
        "D",
        "--master 123.45.67.89:25880 --nnodes=2 demo.py on the other",
        "clusterrun --master 123.45.67.89:25880 --nnodes=2 demo.py",
        plans=have(meets=("123.45.67.89:25880", 2)),
        ran_by=_TYPED,
    ),
    Row("D", "--nnodes: by default 1", "clusterrun demo.py", plans=have(hosts="127.0.0.1")),
    Row(
        "D",
        "--master with any free port",
        "clusterrun --master 192.168.0.1:45678 --nnodes=2 demo.py",
        plans=have(meets=(f"{_A}:45678", 2)),
    ),
    Row("D", "--help", "clusterrun --help", runs=have(out=("usage: clusterrun",)), has=""),
    Row(
        "D",
        "more than 5 machines: Kubernetes",
        'ENGINE = "kubernetes" in conf.py',
        "works ([kubernetes.md](kubernetes.md))",
        ran_by="tests/kubernetes/test_kubernetes_runs.py::test_a_job_runs_and_every_verb_knows_it",
    ),
    Row(
        "D",
        "kubectl apply -f crd.yaml, operator.yaml, and 3 more",
        "the same",
        "not here: kubectl's own",
        not_run=_OPERATOR,
    ),
    Row(
        "D",
        "kubectl create -f wide_and_deep.yaml",
        _NATIVE,
        "differs: the manifest is made of job.toml and conf.py ([kubernetes.md](kubernetes.md))",
        ran_by=_K8S,
    ),
    Row(
        "D",
        "demo-wide-and-deep.yaml: ps 2, worker 2, withGloo 1, intranet PodIP, OnCompletion",
        _NATIVE,
        "works: all fields. `--name` gives the name, `image_command` keeps the command ([kubernetes.md](kubernetes.md))",
        ran_by=_K8S,
    ),
    Row(
        "D",
        "names must be unique",
        _NATIVE,
        ran_by="tests/kubernetes/test_kubernetes_runs.py::test_an_id_is_free_again_when_its_job_has_ended",
    ),
    Row("D", "ps needs ps and worker, collective worker only", _NATIVE, ran_by=_K8S),
    Row("D", "withGloo 0, 1, 2", _NATIVE, ran_by=_K8S),
    Row("D", "cleanPodPolicy Always, Never, OnFailure, OnCompletion", _NATIVE, ran_by=_K8S),
    Row("D", "intranet Service, PodIP", _NATIVE, ran_by=_K8S),
    Row(
        "D",
        "further fields of the pod template",
        _NATIVE,
        ran_by="tests/kubernetes/test_paddlejob_examples.py::test_each_further_field_has_a_reason",
    ),
    Row(
        "D",
        "kubectl create -f job.yaml",
        _NATIVE,
        "works: kubectl creates what is exported",
        ran_by="tests/kubernetes/test_kubernetes_runs.py::test_an_exported_job_runs_when_kubectl_has_applied_it",
    ),
    Row(
        "D",
        "kubectl get pdj",
        "clustertool status",
        "differs: it shows state, mode and age of the job and each process",
        ran_by="tests/kubernetes/test_kubernetes_runs.py::test_a_job_runs_and_every_verb_knows_it",
    ),
    Row("D", "resnet.yaml: python -m paddle.distributed.launch train_fleet.py, a GPU, /dev/shm", _NATIVE, ran_by=_K8S),
    Row(
        "D",
        "a launcher in the command, without --native",
        "clustertool run --workspace ./job --script train_fleet.py",
        "differs: each trainer would start a launcher. A warning has this command",
        ran_by="tests/here/test_clusterrun_here.py::test_a_launcher_that_each_trainer_would_start",
    ),
    Row("D", "Kubernetes of CCE, ACK, BML", "the same", "not here: their own consoles", not_run="no such cluster"),
    Row(
        "D",
        "LAUNCH INFO lines, status running",
        "clustertool status",
        "differs: the lines are those of the tool",
        ran_by="tests/ssh/test_cli_verbs.py::test_status_and_jobs_and_attach_of_a_detached_job",
    ),
    Row(
        "D",
        "export CUDA_VISIBLE_DEVICES=6,7; --devices=6",
        "CUDA_VISIBLE_DEVICES=6,7 clusterrun --devices=6 demo.py",
        "works: physical numbers",
        plans=have(cards="6", selected="0"),
    ),
    Row(
        "D",
        "several logical nodes on one machine",
        f"clusterrun --ips={_A},{_A} --nproc_per_node=2 demo.py",
        "works. Typed twice it needs `--rank` and two folders",
        plans=have(each=(2, 2)),
        has="",
    ),
    Row("D", "--job_id against conflicts", "clusterrun --job_id=job1 demo.py", plans=have(job_id="job1")),
    Row(
        "D",
        "--log_level DEBUG",
        "clusterrun --log_level DEBUG demo.py",
        "works: as `-v`",
        plans=have(trainers=8, given=have(verbose=True)),
    ),
    Row(
        "D",
        "as many processes as cards; nvidia-smi",
        "clustertool gpus",
        ran_by="tests/ssh/test_cli_gpus.py::test_cards_and_their_users",
    ),
    Row(
        "D",
        "elastic: --nnodes=2:4 --job_id=job1",
        f"clusterrun --ips={_A},{_B},192.168.0.3,192.168.0.4 --nnodes=2:4 --job_id=job1 train.py",
        "works ([elastic.md](elastic.md))",
        plans=have(elastic="2:4", job_id="job1"),
    ),
    Row(
        "D",
        "elastic: --master etcd://192.168.0.9:2379 --nnodes=2:4",
        f"clusterrun --ips={_A},{_B},192.168.0.3,192.168.0.4 --master etcd://192.168.0.9:2379 --nnodes=2:4 train.py",
        "works where one command starts the nodes. Typed on each machine: `--master HOST:PORT --elastic_server etcd://...`",
        plans=have(elastic="2:4", etcd="http://192.168.0.9:2379"),
    ),
    Row(
        "D",
        "elastic: --elastic_timeout=30",
        f"clusterrun {TWO} --nnodes=1:2 --elastic_timeout=30 train.py",
        plans=have(elastic="1:2", elastic_timeout=30.0),
    ),
    # -- old guide to clusters
    Row(
        "C",
        "python paddle.py --job_dispatch_package=./job --config=./trainer_config.py --use_gpu=0",
        "clusterrun --job_dispatch_package=./job --config=./trainer_config.py --use_gpu=0",
        "works: `paddle pserver` and `paddle train` on each host of conf.py",
        plans=have(mode="ps", ends="--trainer_id=0"),
        ran_by="tests/ssh/test_cli_clusterrun.py::test_the_old_tools_sample_command",
    ),
    Row(
        "C",
        "PADDLE_INIT_* and PADDLE_CLUSTER_TRAIN, python train.py",
        "clustertool run --workspace ./job --mode ps",
        "works, also on the embedded cluster",
        ran_by="tests/ssh/test_local_cluster.py::test_a_program_of_paddle_v2_reaches_all_pservers_at_one_port",
    ),
    Row(
        "C",
        "SPLIT_COUNT: shards train.txt-00000 ..., one set for each trainer",
        "clustertool split --data train.txt --shards 4",
        ran_by="tests/ssh/test_cli_data.py::test_split_makes_what_a_job_reads",
    ),
    Row(
        "C",
        "Ctrl+C ends all; server.log, train.log; nodefile",
        "clusterrun --job_dispatch_package=./job --config=./trainer_config.py --use_gpu=0",
        plans=have(pservers=1, trainers=1),
        ran_by="tests/ssh/test_cli_clusterrun.py::test_ctrl_c_and_failure",
    ),
    Row(
        "C",
        "mpirun -hostfile machines -n 3 start_mpi_train.sh",
        "clusterrun -hostfile machines -n 3 --no-python ./start_mpi_train.sh",
        "works; `clustertool exec --hostfile machines` for mkdir and the like",
        plans=have(each=(1, 1, 1), ends="./start_mpi_train.sh"),
        has="",
    ),
    Row(
        "C",
        "ssh_servers.yaml, head.yaml, mpi-nodes.yaml, scp of shards",
        "clustertool run --workspace ./job --only-where-read",
        "differs: own machines or the engine kubernetes; each node gets the shards that it reads",
        ran_by="tests/ssh/test_cli_data.py::test_nodes_hold_exactly_their_shards",
    ),
)


def parts(now: str) -> tuple[dict[str, str], list[str]]:
    """`A=1 clusterrun --x y` -> the variables, and the words of the command."""
    tokens, shell = shlex.split(now), {}
    while tokens and re.match(r"[A-Z_]+=", tokens[0]):
        name, _, shell_value = tokens.pop(0).partition("=")
        shell[name] = shell_value
    return shell, tokens


def table() -> str:
    """The rows as the page has them."""
    head = "| document | they type | here | result |\n| --- | --- | --- | --- |\n"
    return head + "".join(_line(row) for row in ROWS)


def _line(row: Row) -> str:
    documents = ", ".join(row.document.split())
    now = row.now if row.now.startswith("`") or row.now == "the same" else f"`{row.now}`"
    return f"| {documents} | `{row.typed}` | {now} | {row.result} |\n"


def in_page(text: str) -> str:
    """The text of the page with the rows between its two marks."""
    before, _, rest = text.partition(BEGIN + "\n\n")
    assert rest, f"{PAGE} has no {BEGIN}"
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(in_page(PAGE.read_text()))
