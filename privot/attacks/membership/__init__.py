"""Membership attacks: functions to scores. A score is float64, and a higher one means more like a member."""
