"""Glowplug's Textual themes and stylesheets. Imports nothing else of Glowplug."""
