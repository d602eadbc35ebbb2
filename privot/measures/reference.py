"""The real data that image metrics compare with, and what is computed from it only once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.measures.feature_extractors import (
    FeatureExtractor,
    load_inception_extractor,
    train_domain_extractor,
)
from privot.measures.result import MetricResult
from privot.progress import Progress, ignore_progress

MAX_INCEPTION_IMAGES_ON_CPU = 1000  # one takes about 0.2 s


@dataclass
class Reference:
    """Real data, the feature extractors, and the features of the real data.

    Attributes:
        data: The real data.
        device: Device of the networks.
        inception_weights: File of the Inception weights; None to look in the data folders.
        seed: Seed of subsets and of the domain extractor.
        progress: Called while features are computed and networks are trained.
    """

    data: Sensitive | Public
    device: torch.device
    inception_weights: Path | None = None
    seed: int = 0
    progress: Progress = ignore_progress
    _features: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def inception_extractor(self) -> FeatureExtractor:
        """The Inception network of FID."""
        return load_inception_extractor(self.device, self.inception_weights)

    @cached_property
    def domain_extractor(self) -> FeatureExtractor:
        """The small network that is trained on the real data."""
        return train_domain_extractor(self.data, self.device, self.seed, self.progress)

    def extract_features(self, extractor: FeatureExtractor) -> Tensor:
        """Extract the features [n, d] of the real data, or of a random subset for Inception."""
        if extractor.description not in self._features:
            indices = self.select_indices(extractor, self.data._count_records())
            # privacy: the number of sensitive records is secret unless it is declared, and progress
            # would show it.
            is_size_public = isinstance(self.data, Public) or self.data.spec.size is not None
            self._features[extractor.description] = extractor.extract_features(
                self.data._read_records(indices).images,
                self.progress if is_size_public else ignore_progress,
            )
        return self._features[extractor.description]

    def select_indices(self, extractor: FeatureExtractor, count: int) -> Tensor:
        """Choose which of ``count`` images an extractor processes: fewer for Inception on a CPU."""
        is_slow = self.device.type != "cuda" and not extractor.metric_prefix
        return self.subsample_indices(count, MAX_INCEPTION_IMAGES_ON_CPU if is_slow else count)

    def subsample_indices(self, count: int, max_count: int) -> Tensor:
        """Choose at most ``max_count`` of ``count`` indices at random, as files may be sorted."""
        if count <= max_count:
            return torch.arange(count)
        return torch.randperm(count, generator=self.build_generator())[:max_count]

    def build_generator(self) -> torch.Generator:
        """Build a new random generator with the seed."""
        return torch.Generator().manual_seed(self.seed)

    def build_result(
        self,
        name: str,
        value: float,
        standard_error: float,
        num_samples: int,
        protocol: str,
        start_time: float,
        *,
        reference_size: int | None = None,
        is_public: bool = True,
        **fields: Any,
    ) -> MetricResult:
        """Build a result against this data.

        Args:
            name: Name of the metric.
            value: The value.
            standard_error: Its standard error.
            num_samples: Number of synthetic images.
            protocol: Network, weights and settings.
            start_time: When the measurement started, by ``time.perf_counter``.
            reference_size: Number of real records; None for all of them.
            is_public: Whether the network saw no sensitive record.
            **fields: Further fields of `MetricResult`.

        Returns:
            The result, publishable only if this data and the network are public.
        """
        return MetricResult(
            name,
            value,
            standard_error,
            num_samples,
            self.data.name,
            reference_size or self.data._count_records(),
            is_public and isinstance(self.data, Public),
            protocol,
            seconds=time.perf_counter() - start_time,
            **fields,
        )
