"""Families of memory components, and the colour of each, the same in text and in HTML."""

from __future__ import annotations

COMPONENT_COLOURS = {
    "states": "#4e79a7",
    "activations": "#59a14f",
    "loss": "#e15759",
    "gathered weights": "#76b7b2",
    "gradients in flight": "#f28e2b",
    "teacher": "#b07aa1",
    "hidden states and buffers": "#edc948",
    "other": "#9c9c9c",
}

_FAMILIES = (
    ("states", ("master weights", "Adam", "sharded gradients")),
    (
        "teacher",
        (
            "teacher weights",
            "teacher head",
            "teacher activations",
            "teacher layers",
            "teacher embedding",
            "teacher residual",
        ),
    ),
    ("hidden states and buffers", ("ring", "send buffers", "teacher hidden", "rows of all ranks")),
    (
        "activations",
        ("saved activations", "one layer", "final norm", "supervised rows", "router", "cache of", "probabilities"),
    ),
    ("loss", ("full logits", "fused-loss", "dH", "dW")),
    ("gathered weights", ("root unit", "last all-gather", "layer weights", "gathered copy")),
    ("gradients in flight", ("root reduction", "head gradient", "layer reduction", "embedding and head")),
)


def family(component: str) -> str:
    """The family that a component belongs to."""
    for name, prefixes in _FAMILIES:
        if component.startswith(prefixes):
            return name
    return "other"
