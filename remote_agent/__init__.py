"""Glowplug's agent: warms models on a GPU host and reports every stage.

Runs on Python 3.10 or newer with the standard library alone; torch and the
NVIDIA bindings are imported only inside zygotes, workers and the sampler.
"""

__version__ = "0.1.0"
