"""Measures: functions to a `Reading`. They see releases and data, never the gate."""

from privot.measures.downstream import downstream
from privot.measures.reading import Reading
from privot.measures.subject import Subject
from privot.measures.suite import Workbench, measure

__all__ = ["Reading", "Subject", "Workbench", "downstream", "measure"]
