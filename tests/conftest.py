"""Fixtures that several test files share."""

import logging
from collections.abc import Iterator

import pytest
import ray

from rlx import launch


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster for the whole session: starting one takes ten seconds."""
    launch._quiet_environment()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
