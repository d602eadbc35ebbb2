"""Named gradient inversion attacks, and `invert`, which runs one on all victims of a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from privot.attacks.inversion.labels import recover_labels
from privot.attacks.inversion.objectives import OBJECTIVES
from privot.attacks.inversion.problem import Problem, Reconstruction
from privot.attacks.inversion.search import ImageSearch, SearchCallback, extract_images
from privot.attacks.inversion.search_phase import SearchPhase
from privot.attacks.inversion.trace_recorder import (
    TraceRecorder,
    concatenate_reconstructions,
    remap_callback,
)
from privot.errors import SettingError
from privot.progress import Progress, ignore_progress

# A squared residual below it means that the search found an image; the attacker can observe it.
SOLVED_RESIDUAL = 1e-3
SOLVED_COSINE_RESIDUAL = 1e-6


@dataclass(frozen=True)
class InversionAttack:
    """An attack: its phases, one after another.

    Attributes:
        title: Name and source, for reports.
        phases: The searches; each starts where the previous one ended.
        optimize_labels: Whether labels are searched for together with the images. Otherwise they
            are recovered first, or given.
    """

    title: str
    phases: tuple[SearchPhase, ...]
    optimize_labels: bool = False

    def replace_optimizer(
        self, optimizer: str, steps: int | None = None, learning_rate: float | None = None
    ) -> InversionAttack:
        """Return the same attack with one optimizer in every phase.

        Args:
            optimizer: adam, lbfgs or lbfgs-search.
            steps: Evaluations of each phase. None: as before.
            learning_rate: None: 0.1 for adam and 1 for the others.

        Returns:
            The new attack.
        """
        usual_rate = 0.1 if optimizer == "adam" else 1.0
        phases = [
            replace(
                phase,
                optimizer=optimizer,
                learning_rate=learning_rate or usual_rate,
                steps=steps or phase.steps,
            )
            for phase in self.phases
        ]
        return replace(self, phases=tuple(phases))


COSINE_PHASE = SearchPhase(
    "cosine",
    "adam",
    4800,
    0.1,
    use_gradient_sign=True,
    decay_learning_rate=True,
    clamp_to_bounds=True,
    total_variation_weight=1e-4,
)
# The entries from wdlg-layer to wdlg-critic are other readings of WDLG, for the comparison only:
# see `privot.attacks.inversion.wasserstein_variants`.
INVERSION_ATTACKS = {
    "dlg": InversionAttack(
        "DLG (Zhu et al. 2019)", (SearchPhase("squared"),), optimize_labels=True
    ),
    "idlg": InversionAttack("iDLG (Zhao et al. 2020)", (SearchPhase("squared"),)),
    "wdlg": InversionAttack("WDLG (Wang et al. 2023), the norm", (SearchPhase("norm"),)),
    "wdlg-layer": InversionAttack("WDLG, one critic per tensor", (SearchPhase("by-layer"),)),
    "wdlg-l1": InversionAttack(
        "WDLG, linear critic with clipped weights", (SearchPhase("absolute"),)
    ),
    "wdlg-index": InversionAttack("WDLG, points (index, value)", (SearchPhase("index-value"),)),
    "wdlg-sliced": InversionAttack("WDLG, sliced over filters", (SearchPhase("sliced"),)),
    "wdlg-sorted": InversionAttack("WDLG, sorted entries", (SearchPhase("sorted"),)),
    "wdlg-critic": InversionAttack(
        "WDLG, learned critic", (SearchPhase("critic", "adam", 300, 0.1),)
    ),
    "cosine": InversionAttack("Inverting Gradients (Geiping et al. 2020)", (COSINE_PHASE,)),
    "hybrid": InversionAttack(
        "Adam on the norm, then L-BFGS on its square",
        (SearchPhase("norm", "adam", 100, 0.1), SearchPhase("squared", "lbfgs", 900)),
    ),
}


def invert(
    problem: Problem,
    attack: str | InversionAttack = "wdlg",
    *,
    labels: Tensor | None = None,
    restarts: int = 0,
    seed: int = 0,
    trace_steps: tuple[int, ...] = (),
    callback: SearchCallback | None = None,
    chunk_size: int | None = None,
    progress: Progress = ignore_progress,
) -> Reconstruction:
    """Reconstruct the images and labels behind the updates of all victims at once.

    Args:
        problem: The updates to invert.
        attack: a name in `INVERSION_ATTACKS`, or an attack.
        labels: [N, batch] if the attacker knows the labels.
        restarts: How often a victim is attacked again from another start while its residual says
            that it is not solved. The attempt with the smallest residual counts.
        seed: Seed of the start and of all other random numbers.
        trace_steps: Evaluations of the first attempt at which all images are stored.
        callback: Called at every evaluation of the first attempt with (evaluation, indices of
            victims [n], images [n, batch, c, h, w]).
        chunk_size: Victims in memory at a time. None: all.
        progress: Shows the progress.

    Returns:
        The best reconstruction of each victim.

    Raises:
        SettingError: An unknown attack, or a number out of range.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    >>> images, labels = torch.rand(2, 1, 1, 2, 2).double(), torch.tensor([[0], [2]])
    >>> problem = Problem.from_images(net, nn.functional.cross_entropy, images, labels)
    >>> reconstruction = invert(problem, "idlg", restarts=5)
    >>> bool((reconstruction.images - images).abs().max() < 0.05)
    True
    """
    attack = resolve_inversion_attack(attack)
    if restarts < 0 or (chunk_size is not None and chunk_size < 1):
        raise SettingError(
            f"restarts={restarts}, chunk_size={chunk_size}: restarts must be at least 0 and "
            "chunk_size at least 1."
        )
    shape = (problem.num_victims, problem.batch_size)
    if labels is not None and (
        labels.shape != shape or not 0 <= int(labels.min()) <= int(labels.max()) < problem.classes
    ):
        raise SettingError(
            f"labels: shape {list(shape)} with values from 0 to {problem.classes - 1} is needed."
        )
    generator = torch.Generator().manual_seed(seed)
    if attack.optimize_labels:
        labels = None
    elif labels is None:
        labels = recover_labels(problem, seed)
    all_victims = torch.arange(problem.num_victims, device=problem.reference_tensor.device)
    chunks = []
    for victims in all_victims.split(chunk_size or problem.num_victims):
        recorder = TraceRecorder(trace_steps, remap_callback(callback, victims))
        chunks.append(
            _attack_chunk(
                problem.select(victims),
                attack,
                None if labels is None else labels[victims],
                restarts,
                generator,
                recorder,
                progress,
            )
        )
    return concatenate_reconstructions(chunks)


def resolve_inversion_attack(attack: str | InversionAttack) -> InversionAttack:
    """Look up an attack by its name; an attack is returned as it is.

    Raises:
        SettingError: There is no attack of this name.
    """
    if isinstance(attack, str) and attack not in INVERSION_ATTACKS:
        raise SettingError(
            f"There is no attack {attack!r}. Choose one of {', '.join(INVERSION_ATTACKS)}."
        )
    return INVERSION_ATTACKS[attack] if isinstance(attack, str) else attack


def _attack_chunk(
    problem: Problem,
    attack: InversionAttack,
    labels: Tensor | None,
    restarts: int,
    generator: torch.Generator,
    recorder: TraceRecorder,
    progress: Progress,
) -> Reconstruction:
    """Attack some victims, and attack those that are not solved again.

    Args:
        problem: The updates of these victims.
        attack: The attack.
        labels: [n, batch], or None where the attack searches for labels.
        restarts: Further attempts.
        generator: Random generator of the starts.
        recorder: Records the first attempt.
        progress: Shows the progress.

    Returns:
        The best attempt of each victim.
    """
    best: ImageSearch | None = None
    last_objective = OBJECTIVES[attack.phases[-1].objective]
    is_scale_free = last_objective.residual is OBJECTIVES["cosine"].residual
    solved_residual = SOLVED_COSINE_RESIDUAL if is_scale_free else SOLVED_RESIDUAL
    for attempt in range(restarts + 1):
        if best is None:
            victims = torch.arange(problem.num_victims, device=problem.reference_tensor.device)
        else:
            victims = (~(best.residual < solved_residual)).nonzero()[:, 0]
            if not len(victims):
                break
        search = ImageSearch.initialize(
            problem.select(victims), None if labels is None else labels[victims], generator
        )
        step_offset = 0
        for phase in attack.phases:
            callback = recorder.build_callback(step_offset, victims) if attempt == 0 else None
            search = search.run_phase(phase, generator, callback, progress)
            step_offset += phase.steps
        if best is None:
            best = search
            continue
        is_better = search.residual < best.residual[victims]
        best.x[victims] = torch.where(is_better[:, None], search.x, best.x[victims])
        best.residual[victims] = torch.where(is_better, search.residual, best.residual[victims])
        best.steps[victims] += search.steps
    assert best is not None
    images = extract_images(problem, best.x)
    return Reconstruction(
        images,
        best.decode_labels(best.x),
        best.steps,
        best.residual,
        recorder.build_trace(images) if recorder.trace_steps else None,
    )
