"""Rollouts: a recipe brought to many nodes batch by batch, by a pure machine and a controller that drives it."""
