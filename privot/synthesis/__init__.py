"""From a data set, a method and a budget to a release, or from a release to another size."""

from privot.synthesis.pipeline import synthesize
from privot.synthesis.resize import resize

__all__ = ["resize", "synthesize"]
