r"""SPEAR (Dimitrov et al. 2024): a whole batch, exactly, if the first layer is linear with a ReLU.

dL/dW = D X, with the images X [b, d] and D = dL/dz [m, b], has rank b. Its factors L R satisfy
D = L Q and X = Q^{-1} R with an unknown Q. A ReLU that is off makes an exact 0 in D, so a column q
of Q is orthogonal to many rows of L, and any b - 1 such rows determine it. The attack tries random
sets of rows, all at once, and keeps the columns q for which L q has many zeros. It needs no label,
no initial image and no optimizer; the number of tries grows like 2^b / b.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from privot.attacks.inversion.labels import recover_labels
from privot.attacks.inversion.layer_chain import ChainLayer, extract_layer_chain
from privot.attacks.inversion.problem import Problem, Reconstruction
from privot.errors import SettingError

# sets of rows in a round, and rounds: enough for 12 images that leave a third of the ReLUs off
TRIES_PER_ROUND = 8192
MAX_ROUNDS = 256
# of the largest entry of a column: rounding in float32 is below, gradients of a model mostly above
LOOSE_TOLERANCE = 1e-2
TIGHT_TOLERANCE = 3e-4
NUM_SHARPENINGS = 2
MAX_BATCH_SIZE = 20
MAX_NEW_CANDIDATES = 256
EXACT_MISMATCH = 1e-3  # share of ReLUs that do not fit, below which the batch counts as found
MISSING_PIXEL = 0.5  # value of images that were not found


def reconstruct_by_spear(
    problem: Problem, *, max_rounds: int = MAX_ROUNDS, seed: int = 0
) -> Reconstruction:
    """Reconstruct the images of each victim, in some order, and the labels.

    Victims are attacked one after another, each with thousands of tries at once.

    Args:
        problem: The updates.
        max_rounds: Rounds of tries for each victim.
        seed: Seed of the tries.

    Returns:
        The reconstruction. Images that were not found are mid-gray. The residual [N] is the share
        of ReLUs whose state does not fit: 0 proves that the batch is right.

    Raises:
        SettingError: The first layer is of another kind, or the batch is too large.
    """
    first_layer = _get_first_layer(problem)
    exact = problem.to_float64()
    images = []
    mismatches = []
    num_tries = []
    for victim in range(problem.num_victims):
        weights = {
            name: weight if exact.has_shared_weights else weight[victim]
            for name, weight in exact.weights.items()
        }
        batch, mismatch, tries = _reconstruct_batch(
            exact.update[f"{first_layer.name}.weight"][victim],
            exact.update[f"{first_layer.name}.bias"][victim],
            weights[f"{first_layer.name}.weight"],
            weights[f"{first_layer.name}.bias"],
            problem.batch_size,
            max_rounds,
            torch.Generator().manual_seed(seed + victim),
        )
        images.append(batch)
        mismatches.append(mismatch)
        num_tries.append(tries)
    reference = problem.reference_tensor
    shape = (problem.num_victims, problem.batch_size, *problem.shape)
    return Reconstruction(
        torch.stack(images).view(shape).to(reference.dtype),
        recover_labels(problem, seed),
        torch.tensor(num_tries, device=reference.device),
        torch.tensor(mismatches, device=reference.device, dtype=reference.dtype),
    )


def _get_first_layer(problem: Problem) -> ChainLayer:
    """Return the first layer, if the attack applies to it."""
    layer = extract_layer_chain(problem.model, problem.shape)[0]
    probe = torch.tensor([-1.0, 1.0])
    has_relu = layer.activation_inverse(probe)[2].tolist() == [0.0, 1.0]
    if not isinstance(layer.module, torch.nn.Linear) or layer.module.bias is None or not has_relu:
        raise SettingError(
            "The attack on a batch needs a linear first layer with a bias and a ReLU after it. "
            "Use an optimizing attack."
        )
    if not 1 <= problem.batch_size <= MAX_BATCH_SIZE:
        raise SettingError(
            f"{problem.batch_size} images are behind an update, but more than {MAX_BATCH_SIZE} "
            "take too many tries. Use an optimizing attack."
        )
    return layer


def _reconstruct_batch(
    weight_gradient: Tensor,
    bias_gradient: Tensor,
    weight: Tensor,
    bias: Tensor,
    batch_size: int,
    max_rounds: int,
    generator: torch.Generator,
) -> tuple[Tensor, float, int]:
    """Reconstruct the images of one victim.

    Args:
        weight_gradient: dL/dW [m, d].
        bias_gradient: dL/db [m].
        weight: W [m, d].
        bias: b [m].
        batch_size: Number of images.
        max_rounds: Rounds of tries.
        generator: Random generator of the tries.

    Returns:
        Images [batch, d], the share of ReLUs that do not fit, and the number of tries.
    """
    left, singular_values, right = torch.linalg.svd(weight_gradient, full_matrices=False)
    num_large = (singular_values > 1e-6 * singular_values[0]).sum()
    rank = int(num_large.clamp(max=batch_size))
    # L [m, r], with equal rounding in every entry, and R [r, d]
    left = left[:, :rank] * singular_values[:rank]
    right = right[:rank]
    # Neurons that are off for every image carry no information.
    row_norms = left.norm(dim=1)
    active_rows = left[row_norms > 1e-6 * row_norms.max()]
    columns = left.new_zeros(0, rank)
    zero_counts = left.new_zeros(0)
    best_images = torch.full(
        (batch_size, weight_gradient.shape[1]),
        MISSING_PIXEL,
        dtype=weight_gradient.dtype,
        device=weight_gradient.device,
    )
    best_mismatch = 1.0
    num_tries = 0
    for _ in range(max_rounds):
        num_tries += TRIES_PER_ROUND
        columns, zero_counts = _add_candidates(active_rows, columns, zero_counts, generator)
        basis = _select_independent(columns, rank)
        if basis is None:
            continue
        images = _solve_images(left, right, basis, bias_gradient)
        mismatch = _compute_relu_mismatch(left @ basis.T, images @ weight.T + bias)
        if mismatch < best_mismatch:
            best_images = best_images.clone()
            best_images[:rank] = images
            best_mismatch = mismatch
        if best_mismatch < EXACT_MISMATCH:
            break
    return best_images, best_mismatch, num_tries


def _add_candidates(
    active_rows: Tensor, columns: Tensor, zero_counts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Add new candidates for columns of Q, and sort by the number of zeros of L q.

    Args:
        active_rows: Rows of L [m, r] of neurons that are on for some image.
        columns: Earlier candidates [k, r].
        zero_counts: Zeros of L q of each [k].
        generator: Random generator of the random sets of rows.

    Returns:
        Distinct candidates [k', r] and their zero counts [k'].
    """
    rank = active_rows.shape[1]
    if rank == 1:
        return torch.ones_like(active_rows[:1]), active_rows.new_ones(1)
    row_indices = torch.randint(len(active_rows), (TRIES_PER_ROUND, rank - 1), generator=generator)
    row_sets = active_rows[row_indices.to(active_rows.device)]  # [tries, r - 1, r]
    # The last entry of q is 1. A set with a repeated row gives NaN, so no zeros.
    solution, _ = torch.linalg.solve_ex(row_sets[..., :-1], -row_sets[..., -1:])
    directions = normalize(
        torch.cat([solution[..., 0], torch.ones_like(solution[:, :1, 0])], 1), dim=1
    )  # [tries, r]
    is_zero = _find_zeros(active_rows, directions, LOOSE_TOLERANCE)  # [tries, m]
    min_zeros = rank - 1 + len(active_rows) // 10
    promising = (is_zero.sum(1) > min_zeros).nonzero()[:MAX_NEW_CANDIDATES, 0]
    candidates = directions[promising]
    is_zero = is_zero[promising]
    # A few rows alone amplify rounding, so all rows that seem orthogonal determine q again.
    for _ in range(NUM_SHARPENINGS):
        if len(candidates):
            gram = torch.einsum("km,mi,mj->kij", is_zero.double(), active_rows, active_rows)
            candidates = torch.linalg.eigh(gram).eigenvectors[..., 0]
            is_zero = _find_zeros(active_rows, candidates, TIGHT_TOLERANCE)
    candidates = torch.cat([columns, candidates])
    counts = torch.cat([zero_counts, is_zero.sum(1).to(zero_counts)])
    order = counts.argsort(descending=True)
    candidates = candidates[order]
    counts = counts[order]
    similarity = (candidates @ candidates.T).abs()
    is_repeated = (similarity > 1 - 1e-6).triu(1).any(0)
    max_candidates = 8 * rank
    return candidates[~is_repeated][:max_candidates], counts[~is_repeated][:max_candidates]


def _find_zeros(left_factor: Tensor, columns: Tensor, relative_tolerance: float) -> Tensor:
    """Find where L q is 0 except for rounding.

    Args:
        left_factor: L [m, r].
        columns: q [k, r].
        relative_tolerance: Share of the largest entry of L q.

    Returns:
        bool [k, m].
    """
    products = (columns @ left_factor.T).abs()
    return products < relative_tolerance * products.amax(1, keepdim=True)


def _select_independent(columns: Tensor, rank: int) -> Tensor | None:
    """Select the first ``rank`` independent candidates [r, r] of ``columns`` [k, r], or None."""
    basis = columns[:0]
    for column in columns:
        extended_basis = torch.cat([basis, column[None]])
        if torch.linalg.svdvals(extended_basis)[-1] > 1e-3:
            basis = extended_basis
        if len(basis) == rank:
            return basis
    return None


def _solve_images(
    left_factor: Tensor, right_factor: Tensor, columns: Tensor, bias_gradient: Tensor
) -> Tensor:
    """Compute X = (Q diag c)^{-1} R; the scales c follow from dL/db = D 1 = L Q c.

    Args:
        left_factor: L [m, r].
        right_factor: R [r, d].
        columns: Columns of Q, as rows [r, r].
        bias_gradient: dL/db [m].

    Returns:
        Images [r, d].
    """
    scales = torch.linalg.lstsq(left_factor @ columns.T, bias_gradient[:, None]).solution[:, 0]
    return torch.linalg.solve(columns.T * scales, right_factor)


def _compute_relu_mismatch(output_gradients: Tensor, pre_activations: Tensor) -> float:
    """Compute the share of ReLUs whose gradient and state contradict each other.

    The gradient D [m, b] is not 0 although z [b, m] is negative, or the other way round.
    """
    identity = torch.eye(output_gradients.shape[1]).to(output_gradients)
    has_gradient = ~_find_zeros(output_gradients, identity, TIGHT_TOLERANCE)
    return float((has_gradient ^ (pre_activations > 0)).double().mean())
