"""How rlx uses Ray Data: settings of its context, and errors from its tasks as one line.

Left out: what is read with it (files.py, prompts.py, stream.py).
"""

from __future__ import annotations

import logging
import re


def configure() -> None:
    """Makes Ray Data keep the order of rows and print nothing: errors are raised."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def error_reason(error: Exception) -> str:
    """Returns an error as one line.

    An error in a Ray task arrives as the text of a chain of tracebacks; the first of them has the cause.
    """
    import ray.exceptions

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = str(error).partition("\n\nThe above exception")[0]
        return re.sub(r"^[\w.]+: ", "", cause.strip().splitlines()[-1])
    return " ".join(str(error).split()) or type(error).__name__
