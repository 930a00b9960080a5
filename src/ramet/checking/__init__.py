"""The proof of a task, without a model: the engine plays it, functions write what a model would."""

from ramet.checking.check import check_task
from ramet.checking.report import Finding, Report
from ramet.checking.stand_in import Limits, Shown, StandIn

__all__ = ["Finding", "Limits", "Report", "Shown", "StandIn", "check_task"]
