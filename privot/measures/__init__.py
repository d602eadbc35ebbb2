"""Measures: functions to a `Reading`. They see releases and data, never the gate."""

from privot.measures.downstream import downstream
from privot.measures.evaluator import Workbench, measure
from privot.measures.result import Reading
from privot.measures.samples import Subject

__all__ = ["Reading", "Subject", "Workbench", "downstream", "measure"]
