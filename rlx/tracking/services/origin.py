"""Who creates a run, and with which code: tags for its MLflow page. Left out: the run's settings."""

from __future__ import annotations

import getpass
import os
import subprocess

from rlx import __version__


def origin_tags() -> dict[str, str]:
    """Who creates a run and with what, for the MLflow page."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        user = str(os.getuid())
    source = {"mlflow.source.name": f"rlx {__version__}", "mlflow.source.type": "LOCAL", "rlx.version": __version__}
    return {"mlflow.user": user} | source | ({"mlflow.source.git.commit": commit} if (commit := _git_commit()) else {})


def _git_commit() -> str:
    """The commit of the working folder; empty if git knows none."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # there is no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
