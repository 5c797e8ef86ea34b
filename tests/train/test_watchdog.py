"""The watchdog tells of a silence, once, with the step and the code that hangs; and of nothing else."""

from __future__ import annotations

import time
from pathlib import Path

from meshpar.train.watchdog import Watchdog


def wait_here_for(condition: Path) -> None:
    """The function whose name the report must show."""
    until = time.monotonic() + 20
    while not condition.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)  # a second report would come here


def test_a_silence_is_told_once_with_its_step_and_its_code(tmp_path: Path) -> None:
    report = tmp_path / "report"
    with report.open("w") as file, Watchdog(0.2, start=7, file=file) as watchdog:
        on_metrics = watchdog.hook().on_metrics
        assert on_metrics is not None
        on_metrics(16, {}, 0.0)
        wait_here_for(report)
    text = report.read_text()
    told = "watchdog: nothing happened for 0.2 s in process 0 since step 16 finished; step 17 or what comes before it"
    assert text.count(told) == 1
    assert "in wait_here_for" in text


def test_a_run_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    report = tmp_path / "report"
    with report.open("w") as file, Watchdog(5.0, file=file) as watchdog:
        for _ in range(10):
            watchdog.touch()
            time.sleep(0.01)
    with report.open("a") as file, Watchdog(0.0, file=file):
        time.sleep(0.1)
    assert report.read_text() == ""
