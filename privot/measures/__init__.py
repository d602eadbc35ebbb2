"""Metrics of synthetic images. They read releases and real data, and never use the gate."""

from privot.measures.downstream import measure_downstream
from privot.measures.evaluator import Evaluator, measure
from privot.measures.result import MetricResult
from privot.measures.samples import Samples

__all__ = ["Evaluator", "MetricResult", "Samples", "measure", "measure_downstream"]
