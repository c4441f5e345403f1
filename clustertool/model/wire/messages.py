"""The registry of requests: of each one the type, the code on the node that handles it, its answer, and its limits.

A request on the wire is {"type", "id", "now", ...fields}: `id` pairs it with its answer, `now` is the laptop's clock. The
answer is {"re": id, ...fields}, or {"re": id, "error": {kind, what, fix}}. {"re": id, "progress": count} may come before.
A request without an id gets no answer. Frames that are not answers: stream_messages.py.

STATUS({"job": job}) is a request whose answer is a StatusAnswer, also for the type checker. Answers come from machines on which
programs of jobs run, so each one is checked before other code uses it (answers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Generic, Mapping, Optional, TypeVar

from clustertool.model.wire import answers
from clustertool.model.wire.shape import Check

if TYPE_CHECKING:
    from clustertool.model.wire import agent_answers as a
    from clustertool.model.wire import agent_requests as r

Fields = TypeVar("Fields", bound=Mapping[str, object])
Answered = TypeVar("Answered", bound=Mapping[str, object], covariant=True)
_LISTING = 32 << 20  # bytes of the answer to a probe that lists the files of --job-workspace


class RequestKind(Generic[Fields, Answered]):
    """One type of request.

    handler: `module:function` below clustertool.node. The function gets (agent, fields) and returns the answer.
    limit: bytes of the answer's header. inline: the handler runs in the agent's loop, not in a thread.
    long: the answer may take up to 20 times the request's timeout, as long as the node reports progress; endless: longer, too.
    No other request is extended: a hostile node could delay a stop with it.
    """

    def __init__(
        self,
        type: str,
        handler: str,
        check: Check,
        limit: int = 1 << 20,
        inline: bool = False,
        long: bool = False,
        endless: bool = False,
    ) -> None:
        self.type = type
        self.handler = handler
        self.check = check
        self.limit = limit
        self.inline = inline
        self.long = long or endless
        self.endless = endless
        REQUESTS[type] = self

    def __repr__(self) -> str:
        return f"<request {self.type}>"

    def __call__(self, fields: Fields) -> Request[Answered]:
        return Request(self, fields)

    def check_answer(self, answer: Mapping[str, object]) -> None:
        """Raises shape.Malformed for what is neither an answer to this request nor an error in its place."""
        if answer.get("error") is not None:
            answers.error(answer["error"], "error")
        else:
            self.check(answer, "")


class Request(Generic[Answered]):
    """One request, to be sent to one node or to several. It holds values that JSON can express, and no objects of a process."""

    def __init__(self, kind: RequestKind[Any, Answered], fields: Mapping[str, object]) -> None:
        self.kind = kind
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and (self.kind, self.fields) == (other.kind, other.fields)

    def __repr__(self) -> str:
        return f"<request {self.kind.type}: {', '.join(self.fields)}>"

    @property
    def limit(self) -> int:
        """Bytes that the header of the answer may have."""
        return _LISTING if self.fields.get("job_workspace") else self.kind.limit

    def header(self, number: Optional[int], now: float) -> Dict[str, object]:
        """The request as it travels. number: of this request on its connection; None: the answer is not wanted."""
        return {**self.fields, "type": self.kind.type, "id": number, "now": now}


REQUESTS: Dict[str, RequestKind[Any, Any]] = {}  # by type

# -- jobs: see node/jobs

LIST_JOBS: RequestKind[r.JobRequest, a.JobsAnswer] = RequestKind(
    "jobs", "jobs.queries:list_jobs", answers.jobs, limit=16 << 20
)
STATUS: RequestKind[r.JobRequest, a.StatusAnswer] = RequestKind(
    "status", "jobs.queries:status", answers.status, limit=16 << 20
)
REPORT: RequestKind[r.ReportRequest, a.ReportAnswer] = RequestKind(
    "report", "jobs.queries:report", answers.report, limit=32 << 20, long=True
)
TAIL: RequestKind[r.TailRequest, a.TailAnswer] = RequestKind("tail", "jobs.queries:tail", answers.tail)
LIST_FILES: RequestKind[r.JobRequest, a.FilesAnswer] = RequestKind(
    "files", "jobs.queries:list_files", answers.files, limit=16 << 20, long=True
)
ATTACHED: RequestKind[r.JobRequest, a.Answer] = RequestKind("attached", "jobs.queries:attached", answers.done)
STOP: RequestKind[r.StopRequest, a.StopAnswer] = RequestKind("stop", "jobs.queries:stop_jobs", answers.stopped)
CLEAN: RequestKind[r.CleanRequest, a.CleanAnswer] = RequestKind(
    "clean", "jobs.queries:clean", answers.cleaned, long=True
)
FOLLOW: RequestKind[r.FollowRequest, a.Answer] = RequestKind(
    "follow", "agent.job_requests:follow", answers.done, inline=True
)
PLACE: RequestKind[r.PlaceRequest, a.Answer] = RequestKind(
    "place", "agent.start_requests:place", answers.done, endless=True
)
UNPLACE: RequestKind[r.UnplaceRequest, a.Answer] = RequestKind(
    "unplace", "agent.start_requests:unplace", answers.done, long=True
)
LAUNCH: RequestKind[r.LaunchRequest, a.Answer] = RequestKind(
    "start", "agent.start_requests:start", answers.done, inline=True
)

# -- checks before a job: see node/probe, node/devices

PROBE: RequestKind[r.ProbeRequest, a.ProbeAnswer] = RequestKind("probe", "probe.probe:probe", answers.probed, long=True)
MEET: RequestKind[r.MeetRequest, a.SeenAnswer] = RequestKind("meet", "probe.shared_root:meet", answers.met)
LINK_OPEN: RequestKind[r.OpenRequest, a.OpenedAnswer] = RequestKind(
    "link-open", "probe.link_test:open_ports", answers.opened
)
LINK_TRY: RequestKind[r.TryRequest, a.TriesAnswer] = RequestKind(
    "link-try", "probe.link_test:try_targets", answers.tried
)
LINK_SEND: RequestKind[r.SendRequest, a.SpeedAnswer] = RequestKind(
    "link-send", "probe.link_test:fill_link", answers.sent
)
LINK_CLOSE: RequestKind[r.NoFields, a.Answer] = RequestKind("link-close", "probe.link_test:close_ports", answers.done)
DEVICES: RequestKind[r.DevicesRequest, a.DevicesAnswer] = RequestKind(
    "devices", "devices.read:answer", answers.devices, limit=4 << 20
)
SAMPLE: RequestKind[r.GlanceRequest, a.GlanceAnswer] = RequestKind(
    "glance", "agent.device_requests:glance", answers.sample, limit=4 << 20
)
NVML_MODULE: RequestKind[r.ModuleRequest, a.Answer] = RequestKind("module", "devices.nvml:receive_module", answers.done)

# -- dispatch: see node/storage, node/dispatch

PATCH: RequestKind[r.PatchRequest, a.PatchAnswer] = RequestKind(
    "patch", "storage.patch:patch", answers.patched, long=True
)
STAGE: RequestKind[r.StageRequest, a.StagedAnswer] = RequestKind("stage", "storage.staging:stage", answers.staged)
BUILD: RequestKind[r.BuildRequest, a.Answer] = RequestKind("build", "storage.staging:build", answers.done, endless=True)
LIST_FOLDER: RequestKind[r.FolderRequest, a.TreeAnswer] = RequestKind(
    "tree", "storage.folder_reader:tree", answers.listed, limit=32 << 20, long=True
)
READ_FILE: RequestKind[r.ContentRequest, a.ContentAnswer] = RequestKind(
    "content", "storage.folder_reader:content", answers.content
)
VERIFY: RequestKind[r.VerifyRequest, a.VerifyAnswer] = RequestKind(
    "verify", "storage.verify_store:verify", answers.verified, endless=True
)
RELAY: RequestKind[r.RelayRequest, a.Answer] = RequestKind(
    "relay", "agent.dispatch_requests:relay", answers.done, inline=True
)
END_RELAY: RequestKind[r.NoFields, a.Answer] = RequestKind(
    "unrelay", "agent.dispatch_requests:unrelay", answers.done, inline=True
)
