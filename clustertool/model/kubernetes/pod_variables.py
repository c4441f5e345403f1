"""Variables of a pod state its place in the job: those of an Indexed Job, of PaddleJob's operator, of the manifest."""

from __future__ import annotations

from typing import Mapping

from clustertool.errors import UsageError
from clustertool.model.quantities import whole

KUBERNETES = "kubernetes"  # the engine
FIRST_NODE = "CLUSTERTOOL_FIRST_NODE"  # the number of the first node of the pod's role; the manifest sets it
POD_IP = "POD_IP"  # the manifest (downward API) or the operator sets it
INDEX = "JOB_COMPLETION_INDEX"  # of a pod in its Indexed Job, and in a Job of a JobSet (Job, spec.completionMode)
_OPERATOR_INDEX = "PADDLE_TRAINER_ID"  # of a pod in its role of a PaddleJob, for pservers as well
# The worker pods of a PaddleJob, comma-separated: addresses or names (spec.intranet).
_OPERATOR_HOSTS = "PADDLE_TRAINERS"
_MOST = 99999
_FIX = "start the bundle by a manifest of clustertool: export --engine kubernetes writes one"


def pod_node(environ: Mapping[str, str]) -> int:
    """Return the number of the node that this pod is: that of its role's first node, and its index in the role.

    Raises UsageError if one of their variables is not set, or no number.
    """
    index = INDEX if INDEX in environ else _OPERATOR_INDEX
    return _number_of_variable(environ, FIRST_NODE) + _number_of_variable(environ, index)


def coordinator(environ: Mapping[str, str]) -> str:
    """Return the host of node 0 from the operator's variable, in a PaddleJob. Raises UsageError if it is not set."""
    first = environ.get(_OPERATOR_HOSTS, "").split(",")[0].strip()
    if not first:
        raise UsageError(f"{_OPERATOR_HOSTS} is not set: the host of the first pod is not known", _FIX)
    return first


def _number_of_variable(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable. Raises UsageError if it is not set or no number."""
    found = environ.get(name, "")
    value = whole(found, 0, _MOST)
    if value is None:
        what = f"{name} is {found!r}, no number" if found else f"{name} is not set: this is no pod of a job"
        raise UsageError(what, _FIX)
    return value
