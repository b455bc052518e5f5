"""The type of options that are a number of seconds."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """From 0 to ``most_s``; what is no number is within every other range, and refused here."""

    def __init__(self, most_s: float) -> None:
        super().__init__(min=0, max=most_s)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds
