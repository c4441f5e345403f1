"""The registry of requests has of each one the type, the code on the node that handles it, its answer, and its limits.

A request on the wire is {"type", "id", "now", ...fields}: `id` pairs it with its answer, `now` is the laptop's clock. The
answer is {"re": id, ...fields}, or {"re": id, "error": {kind, what, fix}}. {"re": id, "progress": count} may come before.
A request without an id gets no answer. Frames that are not answers: stream_messages.py.

A request with "of_base" is about another node, whose records lie in a folder of a shared ROOT_DIR: see
node/jobs/records.py.

STATUS({"job": job}) is a request whose answer is a StatusAnswer, also for the type checker. Answers come from machines on which
programs of jobs run, so each one is checked by its type before other code uses it (answers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Generic, Mapping, Optional, TypeVar

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as a
    from clustertool.model.wire import agent_requests as r

Fields = TypeVar("Fields", bound=Mapping[str, object])
Answered = TypeVar("Answered", bound=Mapping[str, object], covariant=True)
_LISTING = 32 << 20  # bytes of the answer to a probe that lists the files of --job-workspace


class Kind(Generic[Fields, Answered]):
    """One type of request.

    handler: `module:function` below clustertool.node. The function gets (agent, fields) and returns the answer.
    limit: bytes of the answer's header. inline: the handler runs in the agent's loop, not in a thread.
    long: the answer may take up to 20 times the request's timeout, as long as the node reports progress; endless: longer, too.
    No other request is extended: a hostile node could delay a stop with it. of_records: it needs files only, so it can be
    about another node, whose records are on a shared directory.
    """

    def __init__(
        self,
        type: str,
        handler: str,
        limit: int = 1 << 20,
        inline: bool = False,
        long: bool = False,
        endless: bool = False,
        of_records: bool = False,
    ) -> None:
        self.type = type
        self.handler = handler
        self.limit = limit
        self.inline = inline
        self.long = long or endless
        self.endless = endless
        self.of_records = of_records
        REQUESTS[type] = self

    def __repr__(self) -> str:
        return f"<request {self.type}>"

    def __call__(self, fields: Fields) -> Request[Answered]:
        return Request(self, fields)


class Request(Generic[Answered]):
    """One request, to be sent to one node or to several. It holds values that JSON can express, and no objects of a process.

    base: the folder of the node that it is about, see above. None: it is about the node that gets it.
    """

    def __init__(self, kind: Kind[Any, Answered], fields: Mapping[str, object], base: Optional[str] = None) -> None:
        self.kind = kind
        self.fields = fields
        self.base = base

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"<request {self.kind.type}: {', '.join(self.fields)}>"

    @property
    def limit(self) -> int:
        """Bytes that the header of the answer may have."""
        return _LISTING if self.fields.get("job_workspace") else self.kind.limit

    def about(self, base: str) -> Request[Answered]:
        """Return the same request about the node whose folder is `base`, to be answered by another node."""
        return Request(self.kind, self.fields, base)

    def header(self, number: Optional[int], now: float) -> Dict[str, object]:
        """Build the header of the request's frame. number: of this request on its connection; None: the answer is not wanted.

        now: the laptop's time.
        """
        about = {} if self.base is None else {"of_base": self.base}
        return {**self.fields, **about, "type": self.kind.type, "id": number, "now": now}


REQUESTS: Dict[str, Kind[Any, Any]] = {}  # by type

# -- jobs: see node/jobs

LIST_JOBS: Kind[r.JobRequest, a.JobsAnswer] = Kind("jobs", "jobs.queries:list_jobs", limit=16 << 20, of_records=True)
STATUS: Kind[r.JobRequest, a.StatusAnswer] = Kind("status", "jobs.job_report:status", limit=16 << 20, of_records=True)
REPORT: Kind[r.ReportRequest, a.ReportAnswer] = Kind(
    "report", "jobs.job_report:report", limit=32 << 20, long=True, of_records=True
)
TAIL: Kind[r.TailRequest, a.TailAnswer] = Kind("tail", "jobs.job_report:tail", of_records=True)
LIST_FILES: Kind[r.JobRequest, a.FilesAnswer] = Kind(
    "files", "jobs.job_report:list_files", limit=16 << 20, long=True, of_records=True
)
ATTACHED: Kind[r.JobRequest, a.Answer] = Kind("attached", "jobs.stop_request:attached")
SIGNAL: Kind[r.SignalRequest, a.Answer] = Kind("signal", "jobs.stop_request:signal_ranks")
BASES: Kind[r.NoFields, a.BasesAnswer] = Kind("bases", "jobs.records:list_bases")
STOP: Kind[r.StopRequest, a.StopAnswer] = Kind("stop", "jobs.stop_request:stop_jobs")
CLEAN: Kind[r.CleanRequest, a.CleanAnswer] = Kind("clean", "jobs.clean:clean", long=True, of_records=True)
RANK_SESSION: Kind[r.RankSessionRequest, a.RankSessionAnswer] = Kind("rank-session", "agent.rank_session:find")
SAME_COMMAND: Kind[r.SameCommandRequest, a.SameCommandAnswer] = Kind("same-command", "jobs.same_command:enter")
BUNDLE: Kind[r.BundleRequest, a.ContentAnswer] = Kind("bundle", "agent.job_requests:read_bundle")
RELEASE: Kind[r.JobRequest, a.Answer] = Kind("release", "agent.job_requests:release")
FOLLOW: Kind[r.FollowRequest, a.Answer] = Kind("follow", "agent.job_requests:follow", inline=True, of_records=True)
PLACE: Kind[r.PlaceRequest, a.Answer] = Kind("place", "agent.place:place", endless=True)
UNPLACE: Kind[r.UnplaceRequest, a.Answer] = Kind("unplace", "agent.place:unplace", long=True)
LAUNCH: Kind[r.LaunchRequest, a.Answer] = Kind("start", "agent.launch:start", inline=True)
JOIN: Kind[r.JoinRequest, a.JoinAnswer] = Kind("join", "agent.members:join", inline=True)
JOIN_CODE: Kind[r.JoinCodeRequest, a.Answer] = Kind("join-code", "agent.members:keep_code")
JOIN_REPORTS: Kind[r.JoinReportsRequest, a.JoinReportsAnswer] = Kind("join-reports", "agent.members:reports")
LEAVE: Kind[r.LeaveRequest, a.LeaveAnswer] = Kind("leave", "agent.members:leave")
END_JOIN: Kind[r.JoinReportsRequest, a.Answer] = Kind("join-end", "agent.members:end")

# -- checks before a job: see node/probe, node/devices

PROBE: Kind[r.ProbeRequest, a.ProbeAnswer] = Kind("probe", "probe.probe:probe", long=True)
PROBE_FOR_RUN: Kind[r.ProbeRequest, a.ProbeAnswer] = Kind("probe-run", "probe.run_probe:probe_for_run", long=True)
PROBE_FOR_CHECK: Kind[r.ProbeRequest, a.ProbeAnswer] = Kind(
    "probe-check", "probe.check_probe:probe_for_check", long=True
)
PROBE_CONTAINER: Kind[r.ContainerWanted, a.ContainerAnswer] = Kind(
    "probe-container", "probe.container_probe:read_runtime", long=True
)
MEET: Kind[r.MeetRequest, a.SeenAnswer] = Kind("meet", "probe.shared_root:meet")
LINK_OPEN: Kind[r.OpenRequest, a.OpenedAnswer] = Kind("link-open", "probe.link_test:open_ports")
LINK_TRY: Kind[r.TryRequest, a.TriesAnswer] = Kind("link-try", "probe.link_test:try_targets")
LINK_SEND: Kind[r.SendRequest, a.SpeedAnswer] = Kind("link-send", "probe.link_test:fill_link")
LINK_CLOSE: Kind[r.NoFields, a.Answer] = Kind("link-close", "probe.link_test:close_ports")
DEVICES: Kind[r.DevicesRequest, a.DevicesAnswer] = Kind("devices", "devices.read:answer", limit=4 << 20)
SAMPLE: Kind[r.GlanceRequest, a.GlanceAnswer] = Kind("glance", "jobs.live_sample:glance", limit=4 << 20)
NVML_MODULE: Kind[r.ModuleRequest, a.Answer] = Kind("module", "devices.nvml:receive_module")

# -- jobs in the queue of a scheduler: see node/storage/submissions.py

SUBMIT: Kind[r.SubmitRequest, a.Answer] = Kind("submit", "storage.submissions:submit")
SUBMITTED: Kind[r.SubmittedRequest, a.Answer] = Kind("submitted", "storage.submissions:submitted")
SUBMISSIONS: Kind[r.NoFields, a.SubmissionsAnswer] = Kind(
    "submissions", "storage.submissions:submissions", limit=16 << 20
)
SUBMISSION_OUTPUT: Kind[r.OutputRequest, a.SubmissionOutputAnswer] = Kind(
    "submission-output", "storage.submissions:read_output"
)
WITHDRAW: Kind[r.WithdrawRequest, a.Answer] = Kind("withdraw", "storage.submissions:withdraw")
END_PROGRAMS: Kind[r.NoFields, a.Answer] = Kind("programs-end", "system.programs:end_programs")
PROGRAM: Kind[r.ProgramRequest, a.ProgramAnswer] = Kind("program", "system.programs:run_program", limit=16 << 20)

# -- dispatch: see node/storage, node/dispatch

PATCH: Kind[r.PatchRequest, a.PatchAnswer] = Kind("patch", "storage.release_builder:patch", long=True)
STAGE: Kind[r.StageRequest, a.StagedAnswer] = Kind("stage", "storage.release_builder:stage")
BUILD: Kind[r.BuildRequest, a.Answer] = Kind("build", "storage.release_builder:build", endless=True)
LIST_FOLDER: Kind[r.FolderRequest, a.TreeAnswer] = Kind(
    "tree", "storage.folder_reader:tree", limit=32 << 20, long=True, of_records=True
)
FIND_FILE: Kind[r.FileRequest, a.FileAnswer] = Kind("find-file", "storage.folder_reader:find_file", of_records=True)
SPANS: Kind[r.SpansRequest, a.SpansAnswer] = Kind("spans", "jobs.writers:spans", limit=4 << 20, of_records=True)
READ_FILE: Kind[r.ContentRequest, a.ContentAnswer] = Kind("content", "storage.folder_reader:content", of_records=True)
VERIFY: Kind[r.VerifyRequest, a.VerifyAnswer] = Kind("verify", "storage.verify_store:verify", endless=True)
RELAY: Kind[r.RelayRequest, a.Answer] = Kind("relay", "agent.loop:relay", inline=True)
END_RELAY: Kind[r.NoFields, a.Answer] = Kind("unrelay", "agent.loop:unrelay", inline=True)

# -- images: see node/container

PULL_IMAGE: Kind[r.ImageRequest, a.ImageAnswer] = Kind("image-pull", "container.image_store:pull_image", endless=True)
SAVE_IMAGE: Kind[r.SaveImageRequest, a.SavedImageAnswer] = Kind(
    "image-save", "container.image_store:save_image", limit=17 << 20, endless=True
)
LOAD_IMAGE: Kind[r.LoadImageRequest, a.ImageAnswer] = Kind(
    "image-load", "container.image_store:load_image", endless=True
)


def stop_request(job: str, how: r.StopHow) -> Request[a.StopAnswer]:
    """Build the request to end a job, "" for all."""
    return STOP({"job": job, "exact": bool(job), **how})
