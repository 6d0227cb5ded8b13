"""The page of metrics is that of the table."""

from pathlib import Path

from rlx.tracking import metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_of_metrics_is_current() -> None:
    assert PAGE.read_text() == metrics.page(), "python -m rlx.tracking.metrics > docs/metrics.md"
