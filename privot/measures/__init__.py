"""Measures: functions to a `Reading`. They see releases and data, never the gate."""

from privot.measures.downstream import downstream
from privot.measures.reading import Reading

__all__ = ["Reading", "downstream"]
