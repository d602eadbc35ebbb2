"""Local differential privacy: every client adds noise to its record before the record leaves."""
