"""Glowplug's console: the terminal app, the command line, SSH links and the fleet. Needs no torch."""

from remote_agent import __version__ as __version__
