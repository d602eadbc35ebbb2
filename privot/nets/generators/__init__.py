"""Generators of images and of table rows."""
