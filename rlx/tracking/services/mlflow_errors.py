"""Errors of the MLflow client: whether another attempt helps, and the cause in a few words without a password.

Left out: making another attempt (rlx.tracking.delivery).
"""

from __future__ import annotations

import re

from rlx.config.errors import one_line
from rlx.tracking.base import Failure

# Without BAD_REQUEST: MLflow also answers that when its database has run out of connections.
_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS"}
_DELETED = re.compile(  # what begins with "Could not" is said of folders of files
    r"^(?:\w+: )?(?:The|Could not create run under non-active) (run|experiment) (?:with ID )?(\w+)"
    r"(?: must be in (?:the )?'active'|\.)"
)
_REFUSED_UPLOADS = {400, 413}  # HTTP status of a refused artifact
_CAUSE = re.compile(
    r"connection refused|timed out|connection reset|remote end closed|too many \d+ error responses"
    r"|name or service not known|database is locked|error code \d+",
    re.IGNORECASE,
)


def failure(error: Exception) -> Failure:
    """Which kind of failure it is that MLflow has not taken a record."""
    if deleted(error) or is_purged(error):
        return Failure.DELETED
    http_status = getattr(getattr(error, "response", None), "status_code", None)
    refused = getattr(error, "error_code", None) in _REFUSALS or http_status in _REFUSED_UPLOADS
    return Failure.REFUSED if refused else Failure.AWAY


def deleted(error: Exception) -> tuple[str, str] | None:
    """Whether a run or an experiment is deleted, "run" or "experiment", and its id; None: the error is another one."""
    found = _DELETED.match(str(error))
    return (found[1], found[2]) if found else None


def is_purged(error: Exception) -> bool:
    """Whether there is no such run: it was deleted for good, or another store answers than the one that has it."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


def cause(error: Exception) -> str:
    """Why the MLflow client failed, in a few words and without the password of an address."""
    known = _CAUSE.search(text := one_line(error, 2000))
    return known[0].lower() if known else without_password(text)[:300]


def without_password(text: str) -> str:
    """A text without the user names and passwords of its addresses."""
    return re.sub(r"//[^/\s]*@", "//", text)
