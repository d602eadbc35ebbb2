"""Settings with which every method of the package is quick on the tiny dataset."""

from privot.methods import list_methods
from privot.testing import tiny_data
from privot.testing.tiny_data import (  # noqa: F401
    NUM_CLASSES,
    NUM_CLIENTS,
    NUM_RECORDS,
    SHAPE,
    choose_epsilon,
    choose_spec,
    has_no_mechanism,
    is_local,
    make_method_input,
    make_records,
    seal_records,
)

# Where the general rule is not enough. At small sample rates few of so few records are sampled,
# and the cost takes long to compute.
EXTRA_SETTINGS: dict[str, dict] = {
    "distribution-matching": {"steps": 8},
    "dp-gan": {"sample_rate": 0.5, "generator_channels": 48},
    "dp-sinkhorn": {"sample_rate": 0.5},
    "merf-ae": {"sample_rate": 0.5},
    "gs-wgan": {"num_critics": 4, "warmup_rounds": 1, "critic_batch_size": 2},
    "g-pate": {"num_critics": 4, "warmup_rounds": 1, "critic_batch_size": 2},
    "federated-average-gan": {
        "rounds": 3,
        "generator_steps": 1,
        "records_per_client": 4,
        "critic_batch_size": 2,
    },
    "federated-gs-wgan": {
        "rounds": 3,
        "batch_per_class": 2,
        "records_per_critic": 12,
        "warmup_rounds": 1,
        "critic_batch_size": 2,
    },
    "gradient-matching": {"num_networks": 8, "outer_steps": 2, "inner_steps": 2},
    "sliced-flow": {"num_frequencies": 3, "num_bases": 2, "patch_size": 2, "num_blocks": 4},
    "sliced-generator": {"num_frequencies": 3, "num_bases": 2, "patch_size": 2, "num_blocks": 4},
}


def choose_tiny_settings(name):
    """Choose tiny settings for the method of this name."""
    return {
        **tiny_data.choose_tiny_settings(list_methods()[name]),
        **EXTRA_SETTINGS.get(name, {}),
    }
