"""Small ensembles, and one of their nets by itself."""

from privot.nets.classifiers.convnet import ConvNet


def extract_convnet(nets, index):
    """The ConvNet with the weights of one net of the ensemble."""
    net = ConvNet(nets.shapes.shape, nets.classes, nets.shapes.width)
    state = {"head.weight": nets.head_weight[index].T, "head.bias": nets.head_bias[index, 0]}
    for block in range(nets.num_blocks):
        for name, key in (
            ("conv", "convs.{}.weight"),
            ("bias", "convs.{}.bias"),
            ("gain", "norms.{}.weight"),
            ("shift", "norms.{}.bias"),
        ):
            state[key.format(block)] = getattr(nets, f"{name}{block}")[index]
    net.load_state_dict(state)
    return net
