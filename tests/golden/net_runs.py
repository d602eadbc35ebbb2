"""Networks, their training, and components that methods build on."""

import dataclasses
import functools
import math

import torch
from golden.core import CPU, bag, golden
from golden.inputs import digits, normal, rng, uniform
from torch import nn

from privot.baselines import kernel_ridge
from privot.baselines.ntk import compute_neural_tangent_kernel
from privot.baselines.zca import ZcaWhitening
from privot.components.dct import LearnableImages, centered_dct_basis, dct_basis
from privot.components.dead_leaves import generate_dead_leaves
from privot.components.feature_matching import MatchingRound, compute_unit_features, match_features
from privot.components.glyphs import pretrain_on_glyphs, render_glyphs
from privot.measures.networks.inception import Inception, resize_like_tensorflow
from privot.measures.networks.lpips import Lpips
from privot.nets import GENERATORS, ConvGenerator, augment, initialize_weights
from privot.nets.autoencoders import ConvAutoencoder
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.classifiers.lenet import LeNet
from privot.nets.classifiers.resnet import ResNet18
from privot.nets.classifiers.vgg import VGG11
from privot.nets.conv_shapes import ConvNetShapes
from privot.nets.dp_autoencoder import Autoencoder
from privot.nets.dp_critic import PrivateCritic, count_critic_multiplications
from privot.nets.ema import EmaTrainer, cosine_warmup
from privot.nets.ensemble import Ensemble, FrozenEnsemble
from privot.nets.flat_weights import adam_step
from privot.nets.functional_critic import Critic
from privot.nets.generators.dcgan import ProjectionCritic, gradient_penalty
from privot.nets.generators.dense import DenseGenerator
from privot.nets.tiny_generator import TinyGenerator
from privot.nets.training import Recipe, train_classifier, train_ensemble
from privot.nets.vmap_conv import batched_conv, convolve

GREY = (1, 8, 8)


@golden("net", GENERATORS)
def run_generator(name, folder):
    sizes = [{"shape": GREY, "classes": 3}, {"shape": (3, 12, 10), "classes": 2}]
    if name == "TabularGenerator":
        sizes = [{"shape": (1, 1, 3), "classes": 2, "columns": [[2, -1.0, 1.0], [5]]}]
    small = {"channels": 4} if "channels" in GENERATORS[name].__init__.__code__.co_varnames else {}
    for turn, size in enumerate(sizes):
        net = initialize_weights(GENERATORS[name](**size, **small), rng(turn))
        inputs = (normal(4, net.latent_dim, seed=5), torch.arange(4) % size["classes"])
        images = net(*inputs)
        loss = images.square().sum()
        weights = [weight for weight in net.parameters() if weight.requires_grad]
        gradients = ()
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        yield f"images {turn}", [images, net.eval()(*inputs)]
        yield f"slopes {turn}", list(gradients)
        yield f"weights {turn}", list(net.state_dict().values())


def evaluate_net(net, *inputs, seed=0):
    """Outputs of a net of seeded weights in training, its gradients, and outputs afterwards."""
    initialize_weights(net, rng(seed))
    out = net(*inputs)
    gradients = torch.autograd.grad(out.square().sum(), list(net.parameters()), allow_unused=True)
    with torch.no_grad():
        return [out, *(grad for grad in gradients if grad is not None), net.eval()(*inputs)]


@golden("net/classifiers")
def run_classifiers(folder):
    grey = uniform(3, *GREY)
    colour = uniform(2, 3, 20, 20)
    lenets = (LeNet(GREY, 4), LeNet((3, 20, 20), 4))
    yield "lenet", [evaluate_net(lenets[0], grey), evaluate_net(lenets[1], colour)]
    convnets = (ConvNet(GREY, 4, 8), ConvNet((3, 20, 20), 4, 8, 2))
    yield "convnet", [evaluate_net(convnets[0], grey), evaluate_net(convnets[1], colour)]
    yield "vgg", evaluate_net(VGG11(GREY, 4), grey)[0]
    yield "resnet", evaluate_net(ResNet18(GREY, 4), grey)[0]


@golden("net/critics")
def run_critics(folder):
    images = uniform(4, *GREY)
    labels = torch.arange(4) % 3
    critic = Critic(GREY, 3, 4)
    generator = TinyGenerator(GREY, 3, 4, 4)
    weights, directions = critic.init_weights(2, rng(0))
    weights = weights + 0.01 * normal(*weights.shape, seed=1)
    generator_weights = generator.init_weights(2, rng(1))
    turned = torch.func.vmap(critic.power_iterate)(weights, directions)
    generate = torch.func.vmap(generator.generate, in_dims=(0, None, None))
    fakes = generate(generator_weights, normal(4, 4, seed=2), labels)
    learn = torch.func.grad_and_value(critic.loss)
    learn = torch.func.vmap(learn, in_dims=(0, 0, None, 0, None, None))
    gradient, loss = learn(weights, turned, images, fakes, labels, uniform(4, seed=3))
    empty = torch.zeros_like(gradient)
    state = adam_step(weights, gradient, empty, empty, torch.tensor(1.0), 0.01)
    inputs = images.clone().requires_grad_()
    judge = ProjectionCritic(GREY, 3, 4)
    yield "side by side", [weights, directions, turned, fakes, gradient, loss, *state]
    yield "projection", evaluate_net(judge, images, labels)
    yield "work", [critic.flops, count_critic_multiplications((3, 32, 32), 8)]
    yield "steep", gradient_penalty(judge(inputs, labels), inputs)
    private = PrivateCritic((1, 9, 8), 3, 4)
    yield "private", evaluate_net(private, uniform(4, 1, 9, 8), labels)


@golden("net/autoencoders")
def run_autoencoders(folder):
    images = uniform(4, *GREY)
    small = ConvAutoencoder(GREY, 3, 4)
    yield "convolutional", evaluate_net(small, images)
    yield "large", evaluate_net(ConvAutoencoder((3, 36, 36), 4, 2), uniform(2, 3, 36, 36))
    yield "dense", evaluate_net(Autoencoder(GREY, 3, 6, 5), images)
    small.encoder.standardize_latents(images)
    yield "spread", small.encoder.encode_unnormalized(images)


@golden("net/ensemble")
def run_ensemble(folder):
    nets = Ensemble(3, GREY, 4, 4, texture_norm=0.5, generator=rng(0))
    images = uniform(5, *GREY)
    loss = (logits := nets(images)).square().sum()
    gradients = torch.autograd.grad(loss, list(nets.parameters()), allow_unused=True)
    frozen = FrozenEnsemble(nets)[torch.tensor([1, 2])]
    other = Ensemble(2, GREY, 4, 4, generator=rng(1))
    other.copy_blocks_from(nets)
    sizes = ConvNetShapes((3, 28, 28), 16, 3)
    counts = [sizes.num_blocks, sizes.num_features, sizes.num_activations, sizes.flops]
    yield "logits", [logits, nets(uniform(3, 5, *GREY))]
    yield "slopes", [gradient for gradient in gradients if gradient is not None]
    yield "features", nets.features(images, nets.select(torch.tensor([2, 0])))
    yield "seen", nets.extract_features(images, frozen)
    yield "layers", nets.pool_block_features(images, max_side=2)
    yield "followed", list(other.state_dict().values())
    yield "outline", [*counts, nets.num_extracted_features]


SHIFTED = {"weight_decay": 1e-3, "lr_milestones": (1,), "max_shift": 1, "horizontal_flip": True}
ADAM = {"use_adam": True, "ema_decay": 0.9, "even_batches": True, "half_precision": True}
RECIPES = {
    "plain": Recipe(2, 0.05, batch_size=8, **SHIFTED),
    "adam": Recipe(2, 1e-3, batch_size=8, **ADAM),
    "augmented": Recipe(1, 0.05, batch_size=8, augmentations=augment.AUGMENTATIONS),
}


@golden("net/training")
def run_training(folder):
    images, labels = digits(20)
    for name, recipe in RECIPES.items():
        net = train_classifier(LeNet, images, labels, 10, recipe, CPU.device, seed=3)
        outputs = [net.predict_proba(images), net.predict(images)]
        yield name, [*outputs, *net.net.state_dict().values()]
    many = dataclasses.replace(RECIPES["augmented"], num_repeats=2)
    net = train_classifier(ConvNet, images, labels, 10, many, CPU.device)
    yield "repeated", [net.predict_proba(images), net.features(images)]
    soft = nn.functional.one_hot(labels, 10).float() * 0.9 + 0.01
    for name, generators in (("one", rng(1)), ("each", [rng(1), rng(2)])):
        nets = Ensemble(2, GREY, 10, 4, generator=rng(0))
        train_ensemble(nets, images, soft, RECIPES["augmented"], generators)
        yield name, list(nets.state_dict().values())


@golden("net/pictures")
def run_images(folder):
    params = augment.sample_augment_params(12, (8, 6), rng(0))
    net = DenseGenerator(GREY, 10, 4, 8, 4)
    start = evaluate_net(net, normal(3, 4), torch.arange(3))
    pretrain_on_glyphs(net.train(), 4, GREY, 10, 3, 5, rng(2))
    codes = normal(6, 16)
    shapes = ((3, 8, 8), (1, 6, 9))
    scenes = [list(generate_dead_leaves(3, 2, shape, rng(1), CPU.device)) for shape in shapes]
    labels = torch.arange(6)
    yield "drawn", list(params)
    yield "augmented", augment.apply_augmentations(uniform(12, 3, 8, 6), params)
    yield "scenes", scenes
    yield "glyphs", [render_glyphs(codes, labels, (1, 12, 12), count) for count in (10, 62)]
    yield "taught", [start, list(net.state_dict().values())]


@golden("net/kernels")
def run_kernels(folder):
    support = uniform(4, *GREY, seed=1)
    images = uniform(6, *GREY, seed=2)
    labels = torch.eye(4)
    nets = Ensemble(2, GREY, 2, 4, generator=rng(0))
    features = kernel_ridge.ConvFeatureRegression(nets)
    first = features.predict(support, labels, images, 1e-3)
    features.resample(rng(5))
    leaves = support.clone().requires_grad_()
    dense = kernel_ridge.DenseNtkRegression(2).predict(leaves, labels, images, 1e-3)
    whitening = ZcaWhitening(images)
    kernel = compute_neural_tangent_kernel(support.double(), images.double(), 3)
    yield "features", [first, features.predict(support, labels, images, 1e-3)]
    yield "dense", [dense, torch.autograd.grad(dense.square().sum(), leaves)[0]]
    yield "tangents", kernel
    yield "solved", kernel_ridge.solve_kernel_ridge(kernel @ kernel.T, labels, 1e-2)
    yield "white", [whitening(images), whitening.inverse_transform(whitening(images))]


@golden("net/matching")
def run_matching(folder):
    nets = Ensemble(2, GREY, 3, 4, generator=rng(0)).requires_grad_(False)
    params = augment.sample_augment_params(4, 8, rng(1))
    center = 0.1 * normal(4, nets.num_extracted_features, seed=2)
    targets = 0.1 * normal(4, 3, nets.num_extracted_features, seed=3)
    part = MatchingRound(nets, params, center, targets, 1.0)
    images = uniform(6, *GREY, seed=4)
    settings = {"steps": 3, "nets_per_step": 2, "learning_rate": 0.05, "generator": rng(5)}
    weights = nets.select(torch.tensor([0, 1, 0, 1]))
    centers = (None, center)
    yield "unit", [compute_unit_features(nets, weights, images, params, c) for c in centers]
    settings["progress"] = lambda step, of: None
    match = functools.partial(match_features, images, [part], **settings)
    yield "matched", [match(frequency_fraction=fraction) for fraction in (1.0, 0.5)]
    yield "canvas", LearnableImages(images, 0.5).to_images()
    yield "waves", [dct_basis(8, 3), centered_dct_basis(9, 4, 2)]


@golden("net/averaged")
def run_moving_average(folder):
    net = initialize_weights(ConvGenerator(GREY, 3, 4, 8, 4), rng(0))
    trainer = EmaTrainer(net, 0.01, (0.5, 0.9), 0.99)
    inputs = (normal(6, 4), torch.arange(6) % 3)
    for step in range(3):
        trainer.net(*inputs).square().sum().backward()
        trainer.prepare_step(cosine_warmup(0.01, step, 3))
        trainer.apply_step()
    yield "kept", bag(trainer.state_dict().values())
    mean = trainer.recalibrate(lambda net: net(*inputs))
    yield "mean", list(mean.state_dict().values())


@golden("net/convolutions")
def run_convolutions(folder):
    """Convolutions of networks side by side, with their second derivatives."""
    x = normal(3, 2, 2, 6, 6)
    weight = normal(3, 4, 2, 3, 3, seed=1)
    bias = normal(3, 4, seed=2)

    def penalize(function, weight, maps, bias):
        def value(maps):
            return function(maps, weight, bias, 2, 1).tanh().sum()

        return torch.func.grad(value)(maps).square().sum()

    for name, function in (("torch", convolve), ("faces", batched_conv)):
        outs = torch.func.vmap(functools.partial(function, stride=2, padding=1))(x, weight, bias)
        penalty = torch.func.grad(functools.partial(penalize, function))
        yield name, [outs, torch.func.vmap(penalty)(weight, x, bias)]


def set_random_heads(lpips, seed):
    with torch.no_grad():
        for head in lpips.heads:
            head.uniform_(0, 1, generator=rng(seed))


def make_random_lpips(device=None):
    """The network of LPIPS with seeded weights."""
    net = Lpips()
    initialize_weights(net.net, rng(1))
    set_random_heads(net, 2)
    return net.eval().requires_grad_(False)


@golden("net/large")
def run_large_networks(folder):
    """The networks of FID and LPIPS with random weights."""
    lpips = Lpips()
    evaluate_net(lpips.net.features, uniform(1, 3, 64, 64))
    set_random_heads(lpips, 3)
    with torch.no_grad():
        inception = Inception(logits=True).eval()
        for index, weight in enumerate(inception.parameters()):
            scale = 1.5 / math.sqrt(weight[0].numel()) if weight.ndim > 1 else 0.1
            weight.copy_(scale * normal(*weight.shape, seed=index))
        yield "lpips", lpips(uniform(1, 3, 64, 64, seed=1), uniform(1, 3, 64, 64, seed=2))
        yield "inception", inception.features(uniform(1, *GREY))
        yield "resized", resize_like_tensorflow(uniform(2, 1, 5, 7), 11)
