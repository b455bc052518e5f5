"""Glowplug's history: every event, run and stage in one SQLite file. Imports nothing else of Glowplug."""
