"""Glowplug's console: the terminal app, the command line, SSH links and the fleet. Needs no torch."""

__version__ = "0.1.0"
