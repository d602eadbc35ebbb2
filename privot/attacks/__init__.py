"""Attacks of the data owner on a release or on gradients: membership inference, shadow models, gradient inversion."""
