"""Colours: the hue shows the replica, and so its direction; the shade shows forward or backward."""

from __future__ import annotations

import colorsys

from cubeloom.pipeline import Action, Kind

_HUES = (212, 28, 165, 325, 265, 52, 190, 0)  # replica 0 is blue, its opposite direction orange
_SHADES = {  # saturation, lightness
    Kind.FORWARD: (0.75, 0.80),
    Kind.BACKWARD: (0.65, 0.48),
    Kind.INPUT_GRAD: (0.65, 0.56),
    Kind.WEIGHT_GRAD: (0.50, 0.36),
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.REDUCE: "launch of a reduction",
    Kind.UPDATE: "update",
}


def colour(action: Action) -> str:
    """The colour as `#rrggbb`."""
    hue = _HUES[action.replica % len(_HUES)]
    saturation, lightness = _SHADES.get(action.kind, (0.0, 0.2))
    red, green, blue = colorsys.hls_to_rgb(hue / 360, lightness, saturation)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def ink(action: Action) -> str:
    """The colour of text on it."""
    return "#10233c" if action.kind is Kind.FORWARD else "#ffffff"


def line(worker: int, workers: int) -> str:
    """The colour of a worker's line in a chart, from blue to red along the pipeline."""
    hue = 0.62 * (1 - worker / max(1, workers - 1))
    red, green, blue = colorsys.hls_to_rgb(hue, 0.45, 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
