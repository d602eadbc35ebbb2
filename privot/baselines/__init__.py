"""Methods without a privacy mechanism, for comparison.

Each method has one file, and its releases carry `NoGuarantee`.
"""
