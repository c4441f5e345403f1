"""The lines of `scontrol -o show job`. All are answers of Slurm 22.05.8, with SLURM_TIME_FORMAT=%s."""

import pytest

from clustertool.model.slurm.slurm_answers import ENDED, SlurmJob, read_jobs

_MIDDLE = (
    " Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={exit} RunTime=00:00:02"
    " TimeLimit=00:01:00 TimeMin=N/A SubmitTime=1795435519 EligibleTime=1795435519 AccrueTime=1795435519"
    " StartTime={start} EndTime={end} Deadline=N/A PreemptEligibleTime=1795435520 PreemptTime={preempted}"
    " SuspendTime=None SecsPreSuspend=0 LastSchedEval=1795435520 Scheduler=Backfill Partition=main"
    " AllocNode:Sid=localhost:14058 ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=h2"
    " NumNodes={count} NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,mem=8000M,node=2,billing=2"
    " Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0"
    " Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)"
    " Command=(null) WorkDir=/home/me {comment}StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power= "
)


def _line(
    state, reason="None", exit="0:0", start=1795435520, end=1795435522, preempted="None", nodes="h[2-3]", **more
) -> str:
    head = (
        f"JobId=2 JobName={more.get('name', 'two')}{more.get('set', '')} UserId=me(1000) GroupId=me(1000) MCS_label=N/A"
    )
    head += f" Priority=4294901758 Nice=0 Account=(null) QOS=(null) JobState={state} Reason={reason}"
    fields = {"exit": exit, "start": start, "end": end, "preempted": preempted, "nodes": nodes}
    return head + _MIDDLE.format(count=more.get("count", "2"), comment=more.get("comment", ""), **fields)


def _job(*given, **fields) -> SlurmJob:
    (job,) = read_jobs(_line(*given, **fields))
    return job


def test_a_running_job_has_a_start():
    assert _job("RUNNING") == SlurmJob(
        id=2,
        state="RUNNING",
        submitted=1795435519.0,
        started=1795435520.0,
        nodelist="h[2-3]",
        requeue=True,
        output="/dev/null",
    )


@pytest.mark.parametrize("path", ["/home/me/slurm.out", "/home/me/a b/./slurm.out"])
@pytest.mark.parametrize("more", ["Power= ", "", "TresPerNode=gpu:1 MailUser=me MailType=END"])
def test_the_output_of_a_job(path, more):
    line = _line("FAILED").replace("StdOut=/dev/null Power= ", f"StdOut={path} {more}")
    (job,) = read_jobs(line)
    assert job.output == path


def test_a_pending_job_has_a_reason_and_an_expected_start():
    job = _job("PENDING", "Resources", end="Unknown", nodes="", count="2-4")
    assert (job.state, job.reason, job.started, job.ended, job.expected) == (
        "PENDING",
        "Resources",
        None,
        None,
        1795435520.0,
    )
    assert job.nodelist == ""
    assert _job("PENDING", "PartitionNodeLimit", start="Unknown", end="Unknown", nodes="").expected is None


@pytest.mark.parametrize(
    "state, reason, exit",
    [
        ("COMPLETED", "None", "0:0"),
        ("FAILED", "NonZeroExitCode", "7:0"),
        ("CANCELLED", "None", "0:15"),
        ("TIMEOUT", "TimeLimit", "0:15"),
        ("NODE_FAIL", "NodeDown", "0:1"),
        ("OUT_OF_MEMORY", "OutOfMemory", "0:125"),
    ],
)
def test_an_ended_job_has_its_reason_and_its_end(state, reason, exit):
    job = _job(state, reason, exit)
    assert (job.state in ENDED, job.ended) == (True, 1795435522.0)
    assert job.reason == ("" if reason == "None" else reason)


def test_a_job_whose_processes_end_is_not_over():
    job = _job("COMPLETING", "TimeLimit", end=1795435742)
    assert (job.state, job.state in ENDED, job.ended) == ("COMPLETING", False, 1795435742.0)


def test_a_job_that_makes_room_and_one_that_waits_again():
    assert _job("RUNNING", preempted=1795435619).preempted == 1795435619.0
    (job,) = read_jobs(_line("PENDING", "BeginTime").replace("Restarts=0", "Restarts=1"))
    assert (job.restarts, job.preempted) == (1, None)


@pytest.mark.parametrize(
    "name",
    [
        "a name JobState=FAILED Reason=Fake",
        "with  UserId=evil(0) GroupId=x MCS_label=y Priority=1 Nice=0",
        "Comment=x StdErr=y",
        "",
    ],
)
def test_a_name_that_has_the_form_of_fields_is_a_name(name):
    assert _job("RUNNING", name=name) == _job("RUNNING")


@pytest.mark.parametrize("comment", ["hello world Reason=Evil x=1", "a StdErr=b Power=c", "NodeList=x Restarts=7"])
def test_a_comment_that_has_the_form_of_fields_is_a_comment(comment):
    job = _job("RUNNING", comment=f"Comment={comment}  ")
    assert (job.comment, job.reason, job.nodelist) == (comment, "", "h[2-3]")


def test_parts_of_an_array_and_of_a_heterogeneous_job():
    array = _line("PENDING").replace("JobId=2 ", "JobId=16 ArrayJobId=16 ArrayTaskId=1-4%2 ArrayTaskThrottle=2 ")
    part = _line("RUNNING", set=" HetJobIdSet=14-15").replace("JobId=2 ", "JobId=15 HetJobId=14 HetJobOffset=1 ")
    assert [(job.id, job.state) for job in read_jobs(f"{array}\n{part}\n")] == [(16, "PENDING"), (15, "RUNNING")]


@pytest.mark.parametrize("text", ["", "\n", "No jobs in the system\n", "JobId=2 JobName=x\n", "   UserId=root(0)\n"])
def test_what_is_no_job_is_left_out(text):
    assert read_jobs(text) == []


def test_times_that_are_no_seconds_are_left_out():
    """A local time has no zone, and its reader may be in another one."""
    assert _job("RUNNING", start="2026-11-23T12:05:20").started is None
