"""What of a rank's objects follows from the config alone."""

import pytest

from rlx.config.loading import from_tree
from rlx.training.setup import threads


@pytest.mark.parametrize(("share", "expected"), [({"CPU": 0.5}, 1), ({"CPU": 1}, 1), ({"CPU": 1.9}, 2), ({"x": 1}, 1)])
def test_a_worker_computes_with_as_many_threads_as_its_share_of_cpus(share: dict[str, float], expected: int) -> None:
    assert threads(from_tree({"scaling": {"resources_per_worker": share}}).scaling) == expected
