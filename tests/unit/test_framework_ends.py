"""The ends of ranks as frameworks write them to their logs: which rank is the cause, and which have followed it.

The texts are those of real jobs, shortened. In each history the ranks that follow end first, and the cause last.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clustertool.model.job.outcome import RankExit
from clustertool.node.supervisor import rank_error
from clustertool.node.supervisor.coordinator import job_decisions as l

KEY_ERROR = """step 41 loss 2.1
Traceback (most recent call last):
  File "train.py", line 30, in <module>
    main(batch["labels"])
         ~~~~~^^^^^^^^^^
KeyError: 'labels'
"""
TORCH_KEY_ERROR = """[rank2]: Traceback (most recent call last):
[rank2]:   File "/data/train.py", line 30, in <module>
[rank2]:     main(batch["labels"])
[rank2]: KeyError: 'labels'
[rank2]:[W1128 09:11:02.480071392 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called \
before \
program exit, which can leak resources. (function operator())
"""
GLOO = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/data/train.py", line 31, in <module>
[rank1]:     loss.backward()
[rank1]:   File "/venv/torch/autograd/graph.py", line 825, in _engine_run_backward
[rank1]:     return Variable._execution_engine.run_backward(  # Calls into the C++ engine
[rank1]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711
"""
GLOO_READ = GLOO.replace(
    "pair.cc:534] Connection closed by peer [10.0.0.3]:4711",
    "pair.cc:589] Read error [::1]:1: Connection reset by peer",
)
GLOO_WAIT = GLOO.replace(
    "transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711",
    "transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
)
BARRIER = GLOO.replace(
    "RuntimeError: ",
    "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from \
rank 2. "
    "Please check rank 2 logs for faulty rank.\n[rank1]:  Original exception: \n[rank1]: ",
)
NCCL = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/data/train.py", line 12, in <module>
[rank0]:     dist.all_reduce(x)
[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, \
internal \
error - please report this issue to the NCCL developers, NCCL version 2.20.5
[rank0]: ncclInternalError: Internal check failed.
[rank0]: Last error:
[rank0]: Net : Connection closed by remote peer node3<50260>
"""
NCCL_WATCHDOG = """[rank3]:[E1128 09:11:02.1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation \
timeout: \
WorkNCCL(SeqNum=15, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600540 milliseconds before \
timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: [Rank 3] \
Watchdog \
caught collective operation timeout: WorkNCCL(SeqNum=15) ran for 600540 milliseconds before timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5a9616c1b6 in /venv/lib/libc10.so)
frame #1: <unknown function> + 0xd8198 (0x7fef40f1c198 in /lib/x86_64-linux-gnu/libstdc++.so.6)
frame #2: clone + 0x43 (0x7f35872f2353 in /lib/x86_64-linux-gnu/libc.so.6)
"""
CUDA_WATCHDOG = NCCL_WATCHDOG.replace(
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15) ran for 600540 milliseconds before \
timing out.",
    "CUDA error: an illegal memory access was encountered",
).partition("\n")[2]
STORE = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/data/train.py", line 5, in <module>
[rank1]:     dist.init_process_group("nccl")
[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] \
via c10d \
key-value store by key '0', but store->get('0') got error: Socket Timeout
[rank1]: Exception raised from doWait at ../torch/csrc/distributed/c10d/TCPStore.cpp:570 (most recent call first):
[rank1]: frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f4 in /venv/lib/libc10.so)
"""
STORE_CLOSED = """[W514 18:33:36.5 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3, \
addr=[localhost]:34658)
Traceback (most recent call last):
  File "/data/train.py", line 5, in <module>
    store.get("foo")
torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server \
shutdown or crash?
"""
PORT_IN_USE = """Traceback (most recent call last):
  File "/data/train.py", line 5, in <module>
    dist.init_process_group("gloo")
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, \
useIpv6: \
false, code: -98, name: EADDRINUSE, message: address already in use
"""
PADDLE_NCCL = """I0629 02:33:08.914842 227972 tcp_utils.cc:130] Successfully connected to 172.17.0.4:44130
Traceback (most recent call last):
  File "train.py", line 48, in <module>
    dist.all_reduce(x)
OSError: (External) NCCL error(6), remote process exited or there was a network error.
  [Hint: 'ncclRemoteError'. A call failed possibly due to a network error or a remote process exiting prematurely.] \
(at /paddle/a.cc:75)
"""
PADDLE_STORE = """Traceback (most recent call last):
  File "train.py", line 8, in <module>
    dist.init_parallel_env()
ValueError: (InvalidArgument) TCP receive error. Details: Connection reset by peer.
  [Hint: Expected byte_received > 0, but received byte_received:-1 <= 0:0.] (at \
/paddle/phi/core/distributed/store/tcp_utils.h:84)
"""
PADDLE_SUMMARY = """Traceback (most recent call last):
  File "train.py", line 48, in <module>
    model(x)
OSError:

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   paddle::experimental::matmul(paddle::Tensor const&)
1   phi::enforce::GetCurrentTraceBackString[abi:cxx11](bool)

----------------------
Error Message Summary:
----------------------
ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.0GB memory on GPU 0
"""
HOROVOD = """[1,1]<stderr>:Traceback (most recent call last):
[1,1]<stderr>:  File "train.py", line 20, in <module>
[1,1]<stderr>:    hvd.allreduce(x)
[1,1]<stderr>:horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an \
exception on one \
of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution.
"""
HOROVOD_GLOO = """Traceback (most recent call last):
  File "/venv/horovod/torch/mpi_ops.py", line 948, in synchronize
    mpi_lib.horovod_torch_wait_and_clear(handle)
RuntimeError: [/tmp/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.0.0.3]:4711: Connection reset by peer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 20, in <module>
    optimizer.step()
horovod.common.exceptions.HorovodInternalError: [/tmp/horovod/gloo/transport/tcp/pair.cc:589] Read error
"""
OPEN_MPI = """[node1][[17490,1],1][btl_tcp_frag.c:242:mca_btl_tcp_frag_recv] mca_btl_tcp_frag_recv: readv failed: \
Connection \
reset by peer (104)
"""
OPEN_MPI_ULFM = """[node1:08993] *** An error occurred in MPI_Allreduce
[node1:08993] *** reported by process [2225741825,1]
[node1:08993] *** on communicator MPI_COMM_WORLD
[node1:08993] *** MPI_ERR_PROC_FAILED: Process Failure
[node1:08993] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,
[node1:08993] ***    and MPI will try to terminate your MPI job as well)
"""
OPEN_MPI_OWN = OPEN_MPI_ULFM.replace("MPI_ERR_PROC_FAILED: Process Failure", "MPI_ERR_TRUNCATE: message truncated")
MPICH = """Fatal error in PMPI_Test: A process has failed, error stack:
PMPI_Test(166).............: MPI_Test(request=0x73f750, flag=0x7fbd36633840, status=0x7fbd36633850) failed
MPIR_Test_impl(65).........:
MPID_nem_tcp_connpoll(1826): Communication error with rank 1: Connection reset by peer
"""
MPI4PY = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    comm.Allreduce(a, b)
  File "src/mpi4py/MPI.src/Comm.pyx", line 1115, in mpi4py.MPI.Comm.Allreduce
mpi4py.MPI.Exception: MPI_ERR_PROC_FAILED: Process Failure
"""
TENSORFLOW = """Traceback (most recent call last):
  File "train.py", line 40, in <module>
    model.fit(data)
  File "/venv/tensorflow/python/eager/execute.py", line 53, in quick_execute
    tensors = pywrap_tfe.TFE_Py_Execute(ctx._handle, device_name, op_name,
tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:

Detected at node CollectiveReduceV2 defined at (most recent call last):
  File "train.py", line 40, in <module>

Collective ops is aborted by: Socket closed
Additional GRPC error information from remote target /job:worker/replica:0/task:0:
:{"created":"@1665671700","description":"Error received from peer ipv4:10.0.0.1:2222","grpc_message":"Socket closed"}
"""
JAX_CLIENT = """F1128 09:11:02.000000  227972 client.h:80] Terminating process because the JAX distributed service detected \
fatal errors. This most likely indicates that another task died; see the other task logs for more details.
*** Check failure stack trace: ***
    @     0x7f4210b91b80  absl::LogMessageFatal
"""
JAX_GLOO = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    jax.block_until_ready(f(x))
jaxlib.xla_extension.XlaRuntimeError: FAILED_PRECONDITION: Buffer Definition Event: Gloo all-reduce failed: \
[external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:49220
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception.
"""
HANDLED = """Traceback (most recent call last):
  File "metrics.py", line 3, in send
    post(url)
ConnectionResetError: [Errno 104] Connection reset by peer
the metrics are not sent, going on
step 41 loss nan
the loss is not a number
"""
CLEANUP = (
    KEY_ERROR
    + """
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 33, in <module>
    dist.barrier()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711
"""
)

HISTORIES = {
    "pytorch gloo": (KEY_ERROR, 1, [GLOO, GLOO_READ, GLOO_WAIT]),
    "pytorch monitored barrier": (KEY_ERROR, 1, [BARRIER]),
    "pytorch nccl": (TORCH_KEY_ERROR, 1, [NCCL, STORE]),
    "pytorch nccl watchdog": (CUDA_WATCHDOG, -6, [NCCL_WATCHDOG, NCCL]),
    "pytorch store": (PORT_IN_USE, 1, [STORE_CLOSED, STORE]),
    "paddle": (PADDLE_SUMMARY, 1, [PADDLE_NCCL, PADDLE_STORE]),
    "horovod": (KEY_ERROR, 1, [HOROVOD, HOROVOD_GLOO]),
    "open mpi": (OPEN_MPI_OWN, 15, [OPEN_MPI, OPEN_MPI_ULFM]),
    "mpich and mpi4py": (KEY_ERROR, 1, [MPICH, MPI4PY]),
    "tensorflow": (KEY_ERROR, 1, [TENSORFLOW]),
    "jax": (KEY_ERROR, 1, [JAX_CLIENT, JAX_GLOO]),
    "an exception that was handled": (HANDLED, 1, [GLOO]),
    "a cleanup that fails": (CLEANUP, 1, [GLOO]),
}


def ended(folder: Path, rank: int, text: str, code: int) -> RankExit:
    (folder / "log").write_text(text)
    job = os.open(folder, os.O_RDONLY)
    try:
        found = rank_error.end_of_log(job, "log")
    finally:
        os.close(job)
    error, *about_others = rank_error.classify(found)
    note = rank_error.shown_exception(found, ())
    consequence, timed_out = about_others
    exit = RankExit("trainer", rank, max(code, 0), max(-code, 0), False, note, error, consequence)
    return exit._replace(timed_out=timed_out)


@pytest.mark.parametrize("name", HISTORIES)
def test_the_cause_is_first_whatever_ended_before_it(tmp_path: Path, name: str) -> None:
    cause, code, followed = HISTORIES[name]
    last = len(followed)
    keys = [("trainer", rank) for rank in range(last + 1)]
    shape = l.Shape(frozenset({0}), ("n0",), tuple((key, 0) for key in keys))
    state = l.decide(l.State(shape), l.Joined(0))[0]
    for rank, text in enumerate(followed):
        state = l.decide(state, l.Exited((ended(tmp_path, rank, text, 1),)))[0]
    state = l.decide(state, l.Exited((ended(tmp_path, last, cause, code),)))[0]
    outcome = l.failure(state)
    assert outcome.culprits == (keys[-1], *keys[:-1])
    assert outcome.followed == tuple(keys[:-1])
    name = f"trainer {last} on n0 ended with "
    how = "timed out in a collective" if followed[-1] in (GLOO_WAIT, BARRIER) else "connection lost"
    assert outcome.reason.startswith(name) and outcome.reason.endswith(f" failed after it ({how})")
    watchdog = (
        "trainer 0 on n0 failed after it (timed out in a collective); trainer 1 on n0 failed after it (connection lost)"
    )
    assert NCCL_WATCHDOG not in followed or watchdog in outcome.reason


@pytest.mark.parametrize(
    "text, note",
    [
        (KEY_ERROR, "KeyError: 'labels'"),
        (TORCH_KEY_ERROR, "KeyError: 'labels'"),
        (PADDLE_SUMMARY, "ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.0GB memory on GPU 0"),
        (CLEANUP, "KeyError: 'labels'"),
        (HANDLED, ""),
        (OPEN_MPI, ""),
        ("Traceback (most recent call last):\n  File", ""),
    ],
)
def test_the_exception_that_ended_the_program_is_shown(tmp_path: Path, text: str, note: str) -> None:
    assert ended(tmp_path, 0, text, 1).note == note


@pytest.mark.parametrize("text", ["nccl" * 16_000, "Traceback (most recent call last):\n  x\n" + "gloo dist" * 7_000])
def test_a_line_of_a_program_takes_little_time(tmp_path: Path, text: str) -> None:
    began = time.process_time()
    ended(tmp_path, 0, text, 1)
    assert time.process_time() - began < 2, "the supervisor sends nothing meanwhile, and counts as lost"
