"""Local differential privacy: each record is noised by its owner before it leaves."""
