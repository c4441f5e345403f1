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
    from clustertool.model.wire import agent_answers as answers
    from clustertool.model.wire import agent_requests as requests

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
        """Build a request of this type."""
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

LIST_JOBS: Kind[requests.JobRequest, answers.JobsAnswer] = Kind(
    "jobs", "jobs.queries:list_jobs", limit=16 << 20, of_records=True
)
STATUS: Kind[requests.JobRequest, answers.StatusAnswer] = Kind(
    "status", "jobs.job_report:status", limit=16 << 20, of_records=True
)
REPORT: Kind[requests.ReportRequest, answers.ReportAnswer] = Kind(
    "report", "jobs.job_report:report", limit=32 << 20, long=True, of_records=True
)
TAIL: Kind[requests.TailRequest, answers.TailAnswer] = Kind("tail", "jobs.job_report:tail", of_records=True)
LIST_FILES: Kind[requests.JobRequest, answers.FilesAnswer] = Kind(
    "files", "jobs.job_report:list_files", limit=16 << 20, long=True, of_records=True
)
ATTACHED: Kind[requests.AttachedRequest, answers.Answer] = Kind("attached", "jobs.stop_request:attached")
SIGNAL: Kind[requests.SignalRequest, answers.Answer] = Kind("signal", "jobs.stop_request:signal_ranks")
BASES: Kind[requests.NoFields, answers.BasesAnswer] = Kind("bases", "jobs.records:list_bases")
STOP: Kind[requests.StopRequest, answers.StopAnswer] = Kind("stop", "jobs.stop_request:stop_jobs")
CLEAN: Kind[requests.CleanRequest, answers.CleanAnswer] = Kind("clean", "jobs.clean:clean", long=True, of_records=True)
RANK_SESSION: Kind[requests.RankSessionRequest, answers.RankSessionAnswer] = Kind(
    "rank-session", "agent.rank_session:find"
)
SAME_COMMAND: Kind[requests.SameCommandRequest, answers.SameCommandAnswer] = Kind(
    "same-command", "jobs.same_command:enter"
)
BUNDLE: Kind[requests.BundleRequest, answers.ContentAnswer] = Kind("bundle", "agent.job_requests:read_bundle")
RELEASE: Kind[requests.JobRequest, answers.Answer] = Kind("release", "agent.job_requests:release")
FOLLOW: Kind[requests.FollowRequest, answers.Answer] = Kind(
    "follow", "agent.job_requests:follow", inline=True, of_records=True
)
PLACE: Kind[requests.PlaceRequest, answers.Answer] = Kind("place", "agent.place:place", endless=True)
UNPLACE: Kind[requests.UnplaceRequest, answers.Answer] = Kind("unplace", "agent.place:unplace", long=True)
LAUNCH: Kind[requests.LaunchRequest, answers.Answer] = Kind("start", "agent.launch:start", inline=True)
JOIN: Kind[requests.JoinRequest, answers.JoinAnswer] = Kind("join", "agent.members:join", inline=True)
JOIN_CODE: Kind[requests.JoinCodeRequest, answers.Answer] = Kind("join-code", "agent.members:keep_code")
JOIN_REPORTS: Kind[requests.JoinReportsRequest, answers.JoinReportsAnswer] = Kind(
    "join-reports", "agent.members:reports"
)
LEAVE: Kind[requests.LeaveRequest, answers.LeaveAnswer] = Kind("leave", "agent.members:leave")
END_JOIN: Kind[requests.JoinReportsRequest, answers.Answer] = Kind("join-end", "agent.members:end")

# -- checks before a job: see node/probe, node/devices

PROBE: Kind[requests.ProbeRequest, answers.ProbeAnswer] = Kind("probe", "probe.probe:probe", long=True)
PROBE_FOR_RUN: Kind[requests.ProbeRequest, answers.ProbeAnswer] = Kind(
    "probe-run", "probe.run_probe:probe_for_run", long=True
)
PROBE_FOR_CHECK: Kind[requests.ProbeRequest, answers.ProbeAnswer] = Kind(
    "probe-check", "probe.check_probe:probe_for_check", long=True
)
PROBE_CONTAINER: Kind[requests.ContainerWanted, answers.ContainerAnswer] = Kind(
    "probe-container", "probe.container_probe:read_runtime", long=True
)
MEET: Kind[requests.MeetRequest, answers.SeenAnswer] = Kind("meet", "probe.shared_root:meet")
LINK_OPEN: Kind[requests.OpenRequest, answers.OpenedAnswer] = Kind("link-open", "probe.link_test:open_ports")
LINK_TRY: Kind[requests.TryRequest, answers.TriesAnswer] = Kind("link-try", "probe.link_test:try_targets")
LINK_SEND: Kind[requests.SendRequest, answers.SpeedAnswer] = Kind("link-send", "probe.link_test:fill_link")
LINK_CLOSE: Kind[requests.NoFields, answers.Answer] = Kind("link-close", "probe.link_test:close_ports")
DEVICES: Kind[requests.DevicesRequest, answers.DevicesAnswer] = Kind("devices", "devices.read:answer", limit=4 << 20)
SAMPLE: Kind[requests.GlanceRequest, answers.GlanceAnswer] = Kind("glance", "jobs.live_sample:glance", limit=4 << 20)
SEND_FILE: Kind[requests.SentFileRequest, answers.Answer] = Kind("file", "devices.sent_files:receive")

STACK_TOOLS: Kind[requests.NoFields, answers.StackToolAnswer] = Kind("stack-tools", "devices.sent_files:list_tools")
STACKS: Kind[requests.StacksRequest, answers.StacksAnswer] = Kind("stacks", "jobs.stack_sampler:stacks", limit=64 << 20)

# -- jobs in the queue of a scheduler: see node/storage/submissions.py

SUBMIT: Kind[requests.SubmitRequest, answers.Answer] = Kind("submit", "storage.submissions:submit")
SUBMITTED: Kind[requests.SubmittedRequest, answers.Answer] = Kind("submitted", "storage.submissions:submitted")
SUBMISSIONS: Kind[requests.NoFields, answers.SubmissionsAnswer] = Kind(
    "submissions", "storage.submissions:submissions", limit=16 << 20
)
SUBMISSION_OUTPUT: Kind[requests.OutputRequest, answers.SubmissionOutputAnswer] = Kind(
    "submission-output", "storage.submissions:read_output"
)
WITHDRAW: Kind[requests.WithdrawRequest, answers.Answer] = Kind("withdraw", "storage.submissions:withdraw")
END_PROGRAMS: Kind[requests.NoFields, answers.Answer] = Kind("programs-end", "system.programs:end_programs")
PROGRAM: Kind[requests.ProgramRequest, answers.ProgramAnswer] = Kind(
    "program", "system.programs:run_program", limit=16 << 20
)

# -- dispatch: see node/storage, node/dispatch

PATCH: Kind[requests.PatchRequest, answers.PatchAnswer] = Kind("patch", "storage.release_builder:patch", long=True)
STAGE: Kind[requests.StageRequest, answers.StagedAnswer] = Kind("stage", "storage.release_builder:stage")
BUILD: Kind[requests.BuildRequest, answers.Answer] = Kind("build", "storage.release_builder:build", endless=True)
LIST_FOLDER: Kind[requests.FolderRequest, answers.TreeAnswer] = Kind(
    "tree", "storage.folder_reader:tree", limit=32 << 20, long=True, of_records=True
)
FIND_FILE: Kind[requests.FileRequest, answers.FileAnswer] = Kind(
    "find-file", "storage.folder_reader:find_file", of_records=True
)
SPANS: Kind[requests.SpansRequest, answers.SpansAnswer] = Kind(
    "spans", "jobs.writers:spans", limit=4 << 20, of_records=True
)
READ_FILE: Kind[requests.ContentRequest, answers.ContentAnswer] = Kind(
    "content", "storage.folder_reader:content", of_records=True
)
VERIFY: Kind[requests.VerifyRequest, answers.VerifyAnswer] = Kind("verify", "storage.verify_store:verify", endless=True)
RELAY: Kind[requests.RelayRequest, answers.Answer] = Kind("relay", "agent.loop:relay", inline=True)
END_RELAY: Kind[requests.NoFields, answers.Answer] = Kind("unrelay", "agent.loop:unrelay", inline=True)

# -- images: see node/container

PULL_IMAGE: Kind[requests.ImageRequest, answers.ImageAnswer] = Kind(
    "image-pull", "container.image_store:pull_image", endless=True
)
SAVE_IMAGE: Kind[requests.SaveImageRequest, answers.SavedImageAnswer] = Kind(
    "image-save", "container.image_store:save_image", limit=17 << 20, endless=True
)
LOAD_IMAGE: Kind[requests.LoadImageRequest, answers.ImageAnswer] = Kind(
    "image-load", "container.image_store:load_image", endless=True
)


def stop_request(job: str, how: requests.StopHow) -> Request[answers.StopAnswer]:
    """Build the request to end a job, "" for all."""
    return STOP({"job": job, "exact": bool(job), **how})
