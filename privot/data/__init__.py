"""Data sets: sensitive or public records, and what about them is public."""

from privot.data.catalog import describe_dataset, load_catalog
from privot.data.dataset import Public, Records, Sensitive
from privot.data.loading import load_dataset
from privot.data.spec import Spec

__all__ = [
    "Public",
    "Records",
    "Sensitive",
    "Spec",
    "describe_dataset",
    "load_catalog",
    "load_dataset",
]
