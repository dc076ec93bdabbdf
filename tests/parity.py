"""What a comparison with the serial model must show, in float64."""

from __future__ import annotations

from cubeloom.tools.verify import Report


def holds(report: Report) -> None:
    assert report.loss_diff <= 1e-10
    assert report.grad_diff <= 1e-10
    assert report.weight_diff <= 1e-10
    assert report.bytes_agree, (report.counted, report.predicted)
    assert report.replicas_agree
