"""Rollouts: a recipe brought to many nodes batch by batch. What is here is pure: no clock, no I/O."""
