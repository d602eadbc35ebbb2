"""Attacks that a data owner runs on a release or on gradients before publishing.

`membership` infers membership of candidates from a release, `shadows` prepares shadow models for
it, and `inversion` reconstructs images from gradients.
"""
