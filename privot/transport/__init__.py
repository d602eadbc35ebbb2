"""Optimal transport as pure mathematics: no data, no privacy, nothing else of ours."""
