"""Words of the command line: settings of a run, and a set that is made in no time."""

TINY_SET = {
    "images_per_class": 2,
    "num_random_nets": 4,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 4,
    "net_train_epochs": 1,
}


def format_settings(settings):
    return " ".join(f"--set {key}={value}" for key, value in settings.items())
