"""Membership inference: functions that give each candidate a float64 score.

A higher score means that the candidate is more likely a member. `runner.run_attack` runs a whole
attack on a release.
"""
