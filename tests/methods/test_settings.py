"""Settings out of range, and data that a method cannot use, are errors that name the cause."""

import pytest

from privot.components.federated_settings import MAX_SETTING
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import make_method

OUT_OF_RANGE = {
    "dp-gan": "sample_rate=0 sample_rate=1.5 clip_norm=0 steps=0 batch_size=1 critic_steps=0 "
    "noise_multiplier=-1 balance_threshold=2 ema_decay=1",
    "merf-ae": "embedding_share=0 embedding_share=1 sample_rate=0 autoencoder_dim=1 "
    "autoencoder_steps=0 bandwidths=0.0 batch_per_class=1 noise_multiplier=-1",
    "dp-sinkhorn": "sample_rate=0 batch_size=1 clip_norm=0 fresh_fraction=1.5 noise_multiplier=-1 "
    "frequency_fraction=0 l1_weight=1",
    "entropic-gan": "loss=w generator=none batch_size=1 steps=0 learning_rate=1 learning_rate=0 "
    "regularization=0",
    "federated-average-gan": "rounds=0 clip_norm=0 batch_size=1 noise_multiplier=-1 ema_decay=1 "
    "critic_learning_rate=0 records_per_client=0 generator_learning_rate=1",
    "federated-gs-wgan": "unit=user generator=vae pretrain=mnist rounds=0 records_per_critic=0 "
    "num_critics=-1 clients_per_round=-1 window_size=-1 warmup_rounds=-1 frequency_fraction=0 "
    "frequency_fraction=nan generator_learning_rate=1 critic_learning_rate=inf ema_decay=1 "
    "noise_multiplier=-1 noise_multiplier=nan noise_multiplier=inf critic_channels=1000000000 "
    f"batch_per_class={MAX_SETTING + 1}",
    "gs-wgan": "routing=batch num_critics=0 generator=vae frequency_fraction=0 pretrain_steps=0 "
    "noise_multiplier=-1 warmup_rounds=-1 max_shift=-1",
    "g-pate": "num_bins=1 num_directions=0 generator_learning_rate=1 ema_decay=1",
    "private-set": "neighbours=local images_per_class=0 num_random_nets=0 num_pretrained_nets=0 "
    "augmentations=0 soft_label_weight=1 soft_label_weight=-0.1 nets_per_round=-1 net_width=0 "
    "net_depth=0 steps=0 nets_per_step=0 net_train_epochs=0 budget_shares=0.5,0.5 "
    "budget_shares=0,1,0 budget_shares=0.5,0,0,0.5 budget_shares=0.5,0.5,-0.1 "
    "budget_shares=0.5,0.5,nan budget_shares=0.5,inf,0 budget_shares=0.3,0.3,0,0 "
    "texture_norm=-0.1 texture_norm=nan learning_rate=0 learning_rate=1 frequency_fraction=0 "
    "frequency_fraction=1.5 noise_multiplier=-1 noise_multiplier=nan noise_multiplier=inf",
    "sliced-flow": "mode=none space=none neighbours=local labeled=false moments_share=1 "
    "relative_radius=0 step_size=0 num_frequencies=0 noise_multiplier=-1 diffusion=-1 "
    "clip_ratio=0 autoencoder_dim=1 public_data= autoencoder_share=1",
    "sliced-generator": "space=none mode=resampled labeled=false label_norm=0 generator=none "
    "moments_share=0 relative_radius=0 batch_per_class=1 learning_rate=1 steps=0 "
    "noise_multiplier=-1",
}

SMALL = (1, 8, 8)
NOT_FOR_THESE_DATA = [
    ("dp-sinkhorn", {}, Spec(SMALL, 2), "Declare"),
    ("federated-average-gan", {}, Spec(SMALL, 2), "clients"),
    ("federated-gs-wgan", {}, Spec(SMALL, 2), "clients"),
    ("gs-wgan", {"num_critics": 1000}, Spec(SMALL, 2, 999), "num_critics=1000"),
    ("g-pate", {"num_critics": 1000}, Spec(SMALL, 2, 999), "num_critics=1000"),
    ("gs-wgan", {"normalize_gradients": True, "routing": "step"}, None, "normalize_gradients"),
    ("gs-wgan", {"pretrain": "glyphs"}, Spec((3, 32, 32), 10), "gray images of 10 or 62 classes"),
    ("entropic-gan", {"debias": "true"}, None, "learn the noise"),
    ("sliced-flow", {}, Spec(SMALL, 2, 10), "class_sizes"),
    ("sliced-flow", {"num_blocks": 9}, Spec(SMALL, 2, 16, (8, 8)), "num_blocks=9"),
    ("sliced-flow", {"mode": "records"}, Spec(SMALL, 2), "needs the number of records"),
    ("sliced-flow", {"mode": "resampled"}, Spec(SMALL, 2), "needs the number of records"),
    (
        "sliced-flow",
        {"space": "private", "autoencoder_batch_size": 300},
        Spec(SMALL, 2, 200, (100, 100)),
        "autoencoder_batch_size=300",
    ),
    (
        "sliced-flow",
        {"space": "private", "mode": "records"},
        Spec(SMALL, 2),
        "needs the number of records",
    ),
    (
        "sliced-flow",
        {"space": "private", "mode": "records", "neighbours": "local"},
        Spec(SMALL, 2, 200),
        "local",
    ),
    ("sliced-generator", {}, Spec(SMALL, 2, 10), "class_sizes"),
    ("sliced-generator", {"mode": "records"}, Spec(SMALL, 2), "--public-size"),
]


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, setting) for name, settings in OUT_OF_RANGE.items() for setting in settings.split()],
)
def test_rejects_a_setting_out_of_range(name, setting):
    key, _, value = setting.partition("=")
    with pytest.raises(SettingError, match=name) as refused:
        make_method(name, {key: value})
    assert key in str(refused.value)


@pytest.mark.parametrize(("name", "settings", "spec", "words"), NOT_FOR_THESE_DATA)
def test_rejects_data_that_a_method_cannot_use(name, settings, spec, words):
    with pytest.raises(SettingError, match=words):
        make_method(name, settings).plan(spec)
