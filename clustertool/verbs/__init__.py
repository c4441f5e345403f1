"""The verbs a person types, as one Invoke collection: `from clustertool.verbs import ns` in a tasks.py is all it takes."""

from __future__ import annotations

from clustertool.verbs import signals

signals.install()

from invoke import Collection  # noqa: E402 - the SIGINT handler stands before anything slow is imported

from clustertool.verbs import (  # noqa: E402
    attach,
    check,
    clean,
    dispatch,
    exec,
    fetch,
    gpus,
    jobs,
    local,
    logs,
    report,
    run,
    split,
    status,
    stop,
    top,
)

ns = Collection()
for _task in (
    run.run,
    check.check,
    dispatch.dispatch,
    stop.stop,
    status.status,
    jobs.jobs,
    logs.logs,
    attach.attach,
    fetch.fetch,
    exec.exec_,
    gpus.gpus,
    top.top,
    split.split,
    clean.clean,
    report.report,
):
    ns.add_task(_task)
ns.add_collection(Collection("cluster", up=local.up, down=local.down))
