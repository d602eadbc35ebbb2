r"""The private set: a few images per class, optimised against noisy class means of the features of many nets.

**Released** the class sums of the images; then, in rounds, class sums of unit features by random nets, by nets that learned to see from
pictures drawn by code, and by nets trained on the set so far; with the first a noisy count of each class where sizes are not declared.
**Bound** a record's part of each answer has norm at most 1 (k unit vectors over sqrt(k)), and the gate clips it to 1.
**Cost** full-batch Gaussian answers: their squared mu add up to that of one. Nets, centres, images and labels are post-processing.
**Departs** from published private condensation: one full-batch answer for each net instead of thousands of sampled steps; features are
centred by what is already public and scaled to norm 1; further rounds by nets that the first answers taught.
**Notation** u_k(x) = (f_k(a_k(x)) - m_k) / |f_k(a_k(x)) - m_k| with net f_k, its one augmentation a_k and centre m_k. A share is a part
of mu². The loss is the sum over rounds of share * mean over nets of |mean u_k(S_c) - noisy mean u_k(T_c)|², over classes c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.components.dead_leaves import scenes
from privot.components.feature_matching import Round, match, unit
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.nets.augment import Drawn, draw, operations
from privot.nets.conv_shapes import Outline
from privot.nets.ensemble import Ensemble, Frozen
from privot.nets.training import Recipe, train_ensemble
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.artifact import Product
from privot.runtime import Progress, Streams

COUNT_SHARE = 0.1  # of a part's norm goes to the class count, where sizes are not declared
REACH = (
    12 / 28
)  # an image's norm for each root of its pixels, at most; a brighter one is scaled down
# nets in one answer at least, and answers of a round at most: so many are kept, so that a crashed run can go on
GROUP = 10
ANSWERS = 64
MOST = 100_000  # of any count
# of scenes: kinds, and pictures of each
KINDS = 100
EACH = 200
# How a budget is shared, by channels: class means, random nets, nets that know scenes, then each round of trained nets. How chosen:
# docs/methods/private-set.md.
SHARES = {1: (0.05, 0.35, 0.0, 0.60), 3: (0.05, 0.0, 0.35, 0.60)}
TEXTURE = {1: 0.0, 3: 0.7}
SKETCHED = {1: False, 3: True}
DETAIL = {
    1: 1.0,
    3: 0.5,
}  # part of the frequencies in which images are drawn: what is not there cannot take up noise
LARGE = {"nets": 150, "trained": 40, "width": 128, "steps": 2000, "lessons": 200}
SMALL = {
    "nets": 30,
    "trained": 10,
    "width": 16,
    "steps": 150,
    "lessons": 40,
}  # of images under 24 pixels a side, which need no more
# Of colour images on a CPU: nets that learn scenes take most of the time there, and random ones do better in the same time.
COLOUR_ON_CPU = {
    "shares": (0.1, 0.3, 0.0, 0.6),
    "nets": 20,
    "width": 16,
    "steps": 250,
    "trained": 5,
    "lessons": 25,
    "at_once": 1,
}
CALLS = 500  # of tensor operators, in a step of the set or of the nets
PAINTED = 200  # passes over the pixels of a scene while it is drawn
# passes over the maps of an image, for each way through a net; more with textures
PLAIN = 2.5
TEXTURED = 5.0
DRAWN = {"plane": (2, 3), "hole": (4,), "colour": (3,)}  # of an augmentation: its numbers
# norm of a class's mean unit feature (.27 to .40 were seen), and directions that take up noise, a place;
SIGNAL = 0.3
DIRECTIONS = 16
# on digits wider nets are no worse at the same epsilon, and accuracy falls to 0.6 where these predict a ratio of 1


def picture(image: Tensor, label: Tensor, reach: float, share: float) -> Tensor:
    """A record's part of the class sums: its pixels within a ball, scaled to the unit ball, and a constant that counts it."""
    flat = image.flatten()
    flat = flat / flat.norm().clamp(min=reach)
    return torch.cat([flat * math.sqrt(1 - share**2), flat.new_full((1,), share)])


def directions(
    image: Tensor,
    label: Tensor,
    nets: Ensemble,
    weights: dict[str, Tensor],
    drawn: Drawn,
    centre: Tensor,
) -> Tensor:
    """A record's part of a round: its unit features by each of k nets, of norm 1 together: [k * numbers]."""
    return (
        unit(nets, weights, image[None], drawn, centre)[:, 0] / math.sqrt(len(centre))
    ).flatten()


@dataclass(frozen=True, kw_only=True)
class PrivateSet:
    """Settings of the private set. ``noise`` fixes the multiplier of the whole; without it the budget does.

    >>> plan = PrivateSet(noise=3.7306).plan(Spec((1, 28, 28), 10))
    >>> [(stage.name, stage.steps) for stage in plan.stages], round(plan.cost().epsilon(1e-5), 3)
    ([('means', 1), ('random', 15), ('trained1', 4)], 1.0)
    """

    name: ClassVar[str] = "private-set"
    title: ClassVar[str] = "Private set: a few images per class that train a classifier"
    trusts: ClassVar[str] = "the data owner"
    promise: ClassVar[str] = "(epsilon, delta), all answers together one Gaussian"
    citation: ClassVar[str] = """@software{privot2026privateset,
  title   = {The private set: dataset condensation with a proof},
  author  = {{The Privot authors}},
  year    = {2026},
  note    = {Part of Privot, a toolkit for private synthetic data by optimal transport}
}
@inproceedings{zhao2023dm,
  title     = {Dataset Condensation with Distribution Matching},
  author    = {Zhao, Bo and Bilen, Hakan},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year      = {2023}
}"""

    # Settings that may change when a crashed run goes on: nothing asked so far depends on them.
    free: ClassVar[tuple[str, ...]] = ("steps", "at_once", "rate", "lessons", "soft", "keep")

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {
        "width": 16,
        "steps": 50,
        "scene_epochs": 2,
        "seeing": 4,
        "nets": 20,
        "lessons": 25,
        "trained": 5,
        "at_once": 1,
    }

    # By channels. How it was measured: docs/methods/private-set.md.
    economy_accuracy: ClassVar[dict[int, str]] = {
        3: "accuracy of these was not measured; the defaults of about 20 minutes read 39 % on CIFAR-10 at epsilon 1, a GPU's 55 %"
    }

    noise: float | None = None
    neighbours: str = "add-remove"
    per_class: int = 50  # images; others can be had later at no cost
    shares: tuple[float, ...] | None = None  # see SHARES; None: by the channels
    nets: int | None = (
        None  # random ones; None, here and below: by the side of the images, see LARGE and SMALL
    )
    seeing: int = 20  # nets that learned from scenes
    scene_epochs: int = 15  # epochs of these
    views: int = 1  # augmentations, and so features, of each net that learned
    trained: int | None = None  # nets in each round
    width: int | None = None
    depth: int = 3
    texture: float | None = (
        None  # norm of a net's textures beside its features; None: by the channels, see TEXTURE
    )
    sketched: bool | None = (
        None  # images start from scenes around the class means, not from noise around them; None: see SKETCHED
    )
    detail: float | None = None  # None: by the channels, see DETAIL
    steps: int | None = None  # before each round of trained nets, and after the last
    at_once: int = 4  # nets of each round in one step
    rate: float = 0.02  # of Adam, on pixels
    lessons: int | None = None  # epochs of the nets trained on the set
    soft: float = (
        0.0  # weight of what nets think of an image in its soft label; 0: hard labels alone
    )
    keep: bool = True  # the answers, in the release, so that sets of other sizes can be made of it

    def __post_init__(self) -> None:
        if self.neighbours not in ("replace", "add-remove"):
            raise SettingError(f"private-set.neighbours={self.neighbours!r}: replace or add-remove")
        for key in (
            "per_class",
            "nets",
            "seeing",
            "scene_epochs",
            "views",
            "trained",
            "width",
            "depth",
            "steps",
            "at_once",
            "lessons",
        ):
            if (value := getattr(self, key)) is not None and not 1 <= value <= MOST:
                raise SettingError(f"private-set.{key}={value}: 1 to {MOST:,} is needed")
        if self.shares is not None:
            if (
                len(self.shares) < 3
                or not all(0 <= share <= 1e6 for share in self.shares)
                or not sum(self.shares[1:3])
            ):
                raise SettingError(
                    "private-set.shares: parts for means, random nets, seeing nets (of these two one above 0), then each round"
                )
            if not all(share > 0 for share in (self.shares[0], *self.shares[3:])):
                raise SettingError(
                    "private-set.shares: the means and every round of trained nets need a part above 0"
                )
        if (
            not 0 < self.rate < 1
            or not (self.detail is None or 0 < self.detail <= 1)
            or not 0 <= self.soft < 1
            or not 0 <= (self.texture or 0) <= 10
        ):
            raise SettingError(
                "private-set: 0 < rate < 1, 0 < detail <= 1, 0 <= soft < 1 and 0 <= texture <= 10 are needed"
            )
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(
                f"private-set.noise={self.noise}: a multiplier of 0 or more is needed"
            )

    def plan(self, spec: Spec) -> Plan:
        scale = 1.0 if self.noise is None else self.noise
        stages = [Stage("means", "sum", scale / math.sqrt(self._shares(spec)[0]))]
        for name, (nets, share) in self._rounds(spec).items():
            answers = _answers(nets)
            stages.append(Stage(name, "sum", scale * math.sqrt(answers / share), answers))
        return Plan(tuple(stages), Neighbours(self.neighbours))

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        smallest = (
            min(spec.class_sizes)
            if spec.class_sizes
            else spec.size / spec.classes
            if spec.size
            else None
        )
        outline = Outline(spec.shape, self._size(spec, "width"), self.depth)
        # All rounds are one Gaussian; its noise along one direction of the features, as a part of a class's sum of unit vectors.
        whole = (
            1 / math.sqrt(sum(stage.steps / stage.noise**2 for stage in plan.stages))
            if all(s.noise for s in plan.stages)
            else 0
        )
        noise_std = whole * (2 if plan.neighbours is Neighbours.REPLACE else 1)
        directions = (
            DIRECTIONS * outline.numbers / outline.width if outline.blocks else outline.numbers
        )
        ratio = (
            SIGNAL * smallest / (noise_std * math.sqrt(directions))
            if smallest and noise_std
            else None
        )
        rounds = self._rounds(spec)
        images = spec.classes * self.per_class
        read = (spec.size or 0) * sum(count for count, _ in rounds.values())
        later = len(self._shares(spec)) - 3
        moved = images * self.at_once * self._size(spec, "steps") * (later + 1) * len(rounds)
        taught = images * self._size(spec, "trained") * self._size(spec, "lessons") * later
        taught += KINDS * EACH * self.scene_epochs * self.seeing * bool(self._shares(spec)[2])
        work = outline.work * (read + 3 * (moved + taught))
        batches = later * self._size(spec, "lessons") * math.ceil(images / 256)
        batches += KINDS * EACH * self.scene_epochs // 200 * bool(self._shares(spec)[2])
        textured = TEXTURE[spec.shape[0]] if self.texture is None else self.texture
        passes = (read + 3 * (moved + taught)) * (TEXTURED if textured else PLAIN)
        drawn = PAINTED * KINDS * EACH * spec.pixels * bool(self._shares(spec)[2])
        calls = CALLS * (self._size(spec, "steps") * (later + 1) * len(rounds) + batches)
        return {
            "images": images,
            "signal_to_noise_per_class": ratio,
            "floating_point_operations": work,
            "elementwise_operations": passes * outline.elements + drawn,
            "operator_calls": calls,
        }

    @staticmethod
    def suitable(spec: Spec) -> dict[str, Any]:
        """Return the settings for images of this side; see LARGE and SMALL."""
        return dict(LARGE if spec.shape[1] >= 24 else SMALL)

    @staticmethod
    def suitable_on_cpu(spec: Spec) -> dict[str, Any]:
        """Return the settings that differ on a CPU; how chosen: docs/methods/private-set.md."""
        return dict(COLOUR_ON_CPU) if spec.shape[0] == 3 and spec.shape[1] >= 24 else {}

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        self._rehearse(spec, streams)
        seeing = (
            self._seeing(spec, streams, progress) if self._shares(spec)[2] else None
        )  # long, and before anything is charged
        means, counts = self._means(gate, device)
        images, labels = self._start(means, streams)
        rounds: dict[str, Round] = {}
        for name, (_, share) in self._rounds(spec).items():
            if name == "random":
                nets = self._random(spec, streams).to(device)
            elif name == "seeing":
                nets = seeing  # type: ignore[assignment]
            else:
                images = self._match(images, rounds, spec, streams, f"before {name}", progress)
                nets = self._learn(images, labels, seeing, spec, streams, name, progress)
            rounds[name] = self._ask(
                gate, name, nets.requires_grad_(False), share, images, counts, streams, progress
            )
        images = self._match(images, rounds, spec, streams, "last", progress)
        soft = self._soft(images, labels, spec, streams, progress)
        return Product.set(images, labels, soft, self._kept(means, rounds) if self.keep else {})

    def again(self, made: Product, spec: Spec, streams: Streams, progress: Progress) -> Product:
        """A set of ``per_class`` images from what an earlier run kept: no record is asked, so it costs nothing."""
        means, rounds = self._remembered(made.kept, spec, streams)
        images, labels = self._start(means, streams)
        images = self._match(images, rounds, spec, streams, "again", progress)
        return Product.set(
            images, labels, self._soft(images, labels, spec, streams, progress), made.kept
        )

    # What is asked

    def _shares(self, spec: Spec) -> tuple[float, ...]:
        shares = self.shares or SHARES[spec.shape[0]]
        return tuple(share / sum(shares) for share in shares)

    def _rounds(self, spec: Spec) -> dict[str, tuple[int, float]]:
        """Of each round: how many features (a net that learned gives several), and its share."""
        _, random, seeing, *later = self._shares(spec)
        rounds = {
            "random": (self._size(spec, "nets"), random),
            "seeing": (self.seeing * self.views, seeing),
        }
        rounds |= {
            f"trained{turn + 1}": (self._size(spec, "trained") * self.views, share)
            for turn, share in enumerate(later)
        }
        return {name: each for name, each in rounds.items() if each[1]}

    def _rehearse(self, spec: Spec, streams: Streams) -> None:
        """The largest query on black images, as many as the gate takes at a time: what cannot run here fails before anything is charged."""
        device = streams.runtime.target
        count = max(-(-nets // _answers(nets)) for nets, _ in self._rounds(spec).values())
        nets = (
            self._net(count, spec, streams.generator("rehearsal")).to(device).requires_grad_(False)
        )
        drawn = draw(
            count, spec.shape[1:], streams.generator("rehearsal"), operations(spec.mirrored)
        ).to(device)
        black = torch.zeros(streams.runtime.portion, *spec.shape, device=device)
        label = torch.zeros(streams.runtime.portion, device=device)
        many = torch.func.vmap(directions, in_dims=(0, 0, None, None, None, None))
        many(
            black,
            label,
            nets,
            Frozen(nets)[:],
            drawn,
            torch.zeros(count, nets.seen_numbers, device=device),
        )

    def _means(self, gate: Gate, device: torch.device) -> tuple[Tensor, Tensor]:
        """Noisy class means [classes, ...] and class sizes [classes]."""
        spec = gate.spec
        reach = REACH * math.sqrt(spec.pixels)
        share = 0.0 if spec.class_sizes else COUNT_SHARE
        answer = gate.sum("means", picture, reach, share, bound=1.0, per_class=True)
        counts = (
            answer[:, -1] / share
            if share
            else torch.tensor(spec.class_sizes, dtype=torch.float64, device=device)
        )
        counts = counts.clamp(min=1)
        means = answer[:, :-1] * (reach / math.sqrt(1 - share**2)) / counts[:, None]
        return means.float().view(-1, *spec.shape), counts

    def _ask(
        self,
        gate: Gate,
        stage: str,
        nets: Ensemble,
        share: float,
        images: Tensor,
        counts: Tensor,
        streams: Streams,
        progress: Progress,
    ) -> Round:
        """Noisy class means of the unit features by each net, centred by the images so far."""
        spec = gate.spec
        frozen = Frozen(nets)
        count = self._rounds(gate.spec)[stage][0]
        groups = torch.arange(count, device=images.device).tensor_split(_answers(count))
        fresh = draw(
            count,
            spec.shape[1:],
            streams.generator(f"{stage} augmentations"),
            operations(spec.mirrored),
        ).to(images.device)

        def made() -> dict[str, Tensor]:
            with torch.no_grad():
                centres = [
                    unit(nets, frozen[group % nets.nets], images, fresh.chosen(group), None).mean(1)
                    for group in groups
                ]
            return {
                "centre": torch.cat(centres),
                **dict(zip(DRAWN, fresh, strict=True)),
                **_blocks(nets, 1),
            }

        asked = streams.once(f"{stage} asked", made)
        if any(not torch.equal(value, asked[name]) for name, value in _blocks(nets, 1).items()):
            raise ReleaseError(
                "this version of PyTorch draws other random nets than the one that began the run: go on with that one"
            )
        drawn = Drawn(*(asked[name] for name in DRAWN))
        targets = []
        for group in groups:
            weights = frozen[group % nets.nets]
            some = drawn.chosen(group)
            centre = asked["centre"][group]
            answer = gate.sum(
                stage, directions, nets, weights, some, centre, bound=1.0, per_class=True
            )
            mean = answer * math.sqrt(len(group)) / counts[:, None]
            targets.append(mean.float().view(spec.classes, len(group), -1).transpose(0, 1))
            progress(f"features by {stage} nets", sum(map(len, targets)), count)
        return Round(nets, drawn, asked["centre"], torch.cat(targets), share)

    # What is free

    def _net(
        self, count: int, spec: Spec, generator: torch.Generator, classes: int | None = None
    ) -> Ensemble:
        sizes = (spec.shape, classes or spec.classes, self._size(spec, "width"), self.depth)
        texture = TEXTURE[spec.shape[0]] if self.texture is None else self.texture
        return Ensemble(count, *sizes, texture=texture, generator=generator)

    def _random(self, spec: Spec, streams: Streams) -> Ensemble:
        return self._net(self._size(spec, "nets"), spec, streams.generator("random"))

    def _size(self, spec: Spec, key: str) -> int:
        return getattr(self, key) or (LARGE if spec.shape[1] >= 24 else SMALL)[key]

    def _start(self, means: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        labels = torch.arange(len(means), device=means.device).repeat_interleave(self.per_class)
        generator = streams.generator("start")
        if SKETCHED[means.shape[1]] if self.sketched is None else self.sketched:
            channels, height, width = means.shape[1:]
            drawn, _ = scenes(
                len(means), self.per_class, (channels, height, width), generator, means.device
            )  # each class is a kind
            return (means[labels] + 0.5 * (drawn - drawn.mean(0))).clamp(0, 1), labels
        noise = torch.randn(len(labels), *means.shape[1:], generator=generator).to(means.device)
        return (means[labels] + 0.3 * noise).clamp(0, 1), labels

    def _seeing(self, spec: Spec, streams: Streams, progress: Progress) -> Ensemble:
        """Nets that learned to tell scenes apart: no record was seen."""
        nets = self._net(self.seeing, spec, streams.generator("seeing"), KINDS).to(
            device := streams.runtime.target
        )
        epochs = self.scene_epochs
        drops = (epochs // 2, epochs * 4 // 5)
        recipe = Recipe(
            epochs,
            0.02,
            batch=200,
            decay=5e-4,
            drops=drops,
            half=True,
            augment=operations(spec.mirrored),
        )

        def made() -> dict[str, Tensor]:
            images, kinds = scenes(KINDS, EACH, spec.shape, streams.generator("scenes"), device)
            train_ensemble(
                nets,
                images,
                kinds,
                recipe,
                streams.generator("looking"),
                progress=progress,
                stage="learning to see from scenes",
            )
            return nets.state_dict()

        nets.load_state_dict(streams.once("seeing", made))
        return nets

    def _learn(
        self,
        images: Tensor,
        labels: Tensor,
        seeing: Ensemble | None,
        spec: Spec,
        streams: Streams,
        name: str,
        progress: Progress,
    ) -> Ensemble:
        """Nets trained on the set so far; they go on from nets that can see, if there are any."""
        nets = self._net(self._size(spec, "trained"), spec, streams.generator(f"{name} nets")).to(
            images.device
        )
        if seeing is not None:
            nets.follow(seeing)
        epochs = self._size(spec, "lessons")
        lessons = streams.generator(f"{name} lessons")
        recipe = Recipe(
            epochs,
            0.01,
            batch=256,
            decay=5e-4,
            drops=(epochs // 2,),
            half=True,
            even=True,
            augment=operations(spec.mirrored),
        )

        def made() -> dict[str, Tensor]:
            train_ensemble(
                nets,
                images,
                labels,
                recipe,
                lessons,
                progress=progress,
                stage=f"teaching the nets of {name}",
            )
            return nets.state_dict()

        nets.load_state_dict(streams.once(name, made))
        return nets

    def _match(
        self,
        images: Tensor,
        rounds: dict[str, Round],
        spec: Spec,
        streams: Streams,
        name: str,
        progress: Progress,
    ) -> Tensor:
        def made() -> dict[str, Tensor]:
            moved = match(
                images,
                list(rounds.values()),
                steps=self._size(spec, "steps"),
                at_once=self.at_once,
                rate=self.rate,
                detail=self.detail or DETAIL[spec.shape[0]],
                generator=streams.generator(name),
                progress=lambda step, of: progress(f"optimising the set ({name})", step, of),
            )
            return {"images": moved}

        return streams.once(name, made)["images"]

    def _soft(
        self, images: Tensor, labels: Tensor, spec: Spec, streams: Streams, progress: Progress
    ) -> Tensor | None:
        """The label, mixed with what nets think of an image that they were not trained on: [count, classes]."""
        if not self.soft or self.per_class < 2:
            return None
        soft = one_hot(labels, spec.classes).float() * (1 - self.soft)
        for half in range(2):
            nets = self._learn(
                images[half::2], labels[half::2], None, spec, streams, f"soft{half}", progress
            ).requires_grad_(False)
            logits = nets(2 * images[1 - half :: 2] - 1)
            soft[1 - half :: 2] += self.soft * logits.softmax(2).mean(0)
        return soft / soft.sum(1, keepdim=True)

    # What can be used later

    def _kept(self, means: Tensor, rounds: dict[str, Round]) -> dict[str, Tensor]:
        """Random nets come from the seed again; the blocks of all others are kept, in half precision."""
        kept = {"means": means}
        for name, part in rounds.items():
            kept |= {
                f"{name}.centre": part.centre.half(),
                f"{name}.target": part.target.clamp(-6e4, 6e4).half(),
            }
            kept |= {f"{name}.{each}": value for each, value in zip(DRAWN, part.drawn, strict=True)}
            blocks = _blocks(part.nets, 1 if name == "random" else part.nets.nets)
            kept |= {f"{name}.{each}": value.half() for each, value in blocks.items()}
        return kept

    def _remembered(
        self, kept: dict[str, Tensor], spec: Spec, streams: Streams
    ) -> tuple[Tensor, dict[str, Round]]:
        """The other way round; what is not as these settings ask is refused before anything is built of it."""
        device = streams.runtime.target
        rounds = {}

        def known(name: str, *shape: int) -> Tensor:
            value = kept.get(name)
            if value is None or value.shape != shape:
                raise ReleaseError(
                    "the release does not hold what a set of another size needs: was it made with keep=false?"
                )
            return value.float().to(device)

        means = known("means", spec.classes, *spec.shape)
        outline = Outline(spec.shape, self._size(spec, "width"), self.depth)
        for name, (count, share) in self._rounds(spec).items():
            drawn = Drawn(
                *(known(f"{name}.{each}", count, *shape) for each, shape in DRAWN.items())
            )
            many = 1 if name == "random" else count // self.views
            values = {
                each: known(f"{name}.{each}", many, *shape)
                for each, shape in outline.parameters.items()
            }
            nets = (
                self._random(spec, streams)
                if name == "random"
                else self._net(many, spec, torch.Generator())
            ).to(device)
            centre = known(f"{name}.centre", count, nets.seen_numbers)
            target = known(f"{name}.target", count, spec.classes, nets.seen_numbers)
            for each, value in nets.requires_grad_(False).named_parameters():
                if (
                    name == "random"
                    and each in values
                    and not torch.equal(value[:1].half().float(), values[each])
                ):
                    raise ReleaseError(
                        "this version of PyTorch draws other random nets than the one that made the release"
                    )
                if name != "random" and each in values:
                    value.copy_(values[each])
            rounds[name] = Round(nets, drawn, centre, target, share)
        return means, rounds


def _answers(nets: int) -> int:
    """In how many answers so many nets are asked for, as evenly as they go."""
    return min(-(-nets // GROUP), ANSWERS)


def _blocks(nets: Ensemble, count: int) -> dict[str, Tensor]:
    """The blocks of the first nets: all parameters but those of the last layer."""
    return {
        name: value.detach()[:count]
        for name, value in nets.named_parameters()
        if name not in ("head", "tail")
    }


METHOD = PrivateSet
