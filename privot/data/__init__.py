"""What we were given, and what about it is public."""

from privot.data.dataset import Public, Records, Sensitive
from privot.data.loading import catalogue, describe, load
from privot.data.spec import Spec

__all__ = ["Public", "Records", "Sensitive", "Spec", "catalogue", "describe", "load"]
