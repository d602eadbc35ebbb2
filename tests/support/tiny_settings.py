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

# An audit queries eight records: samples must hold the canary, and few queries keep a run short.
AUDIT_SETTINGS = {
    "dp-gan": {"sample_rate": 0.95, "steps": 2},
    "dp-sinkhorn": {"sample_rate": 0.95, "steps": 2},
    "gs-wgan": {
        "num_critics": 2,
        "steps": 2,
        "batch_size": 6,
        "warmup_rounds": 0,
        "critic_batch_size": 4,
        "critic_learning_rate": 0.3,
        "normalize_gradients": True,
    },
    "g-pate": {
        "num_critics": 2,
        "steps": 2,
        "warmup_rounds": 0,
        "critic_batch_size": 4,
        "critic_learning_rate": 0.3,
    },
    "private-set": {
        "num_random_nets": 2,
        "images_per_class": 1,
        "net_width": 2,
        "nets_per_round": 1,
        "steps": 1,
    },
    "federated-average-gan": {"rounds": 2, "generator_steps": 1, "clip_norm": 0.01},
    "federated-gs-wgan": {
        "pretrain_steps": 1,
        "rounds": 2,
        "batch_per_class": 1,
        "warmup_rounds": 0,
    },
    "merf": {"steps": 2},
    "merf-ae": {"sample_rate": 0.95},
    "sliced-flow": {"steps": 1},
}


def choose_tiny_settings(name):
    """Choose tiny settings for the method of this name."""
    return {
        **tiny_data.choose_tiny_settings(list_methods()[name]),
        **EXTRA_SETTINGS.get(name, {}),
    }
