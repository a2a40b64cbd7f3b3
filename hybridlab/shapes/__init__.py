"""What a model is: widths, heads, layers and nothing that computes. Presets, and Hugging Face's ``config.json``.

shape        `ModelShape`: the sizes and their rules; `parameters_of`: every parameter by name and shape
presets      `PRESETS`: published models, and small ones for a laptop
reader       typed look-ups whose failures name key, value and rule
huggingface  `shape_of_config`: from the ``config.json`` of eight families of models
load         `load_shape`: from a preset's name, a file, a folder or a dictionary

No torch here, only the standard library: the planner reads shapes too, also in a browser.
"""

from __future__ import annotations

from hybridlab.shapes.load import load_shape
from hybridlab.shapes.presets import PRESETS
from hybridlab.shapes.shape import TRAINABLE_FAMILIES, ModelShape, ParameterShape, RopeScaling, parameters_of

__all__ = [
    "PRESETS",
    "TRAINABLE_FAMILIES",
    "ModelShape",
    "ParameterShape",
    "RopeScaling",
    "load_shape",
    "parameters_of",
]
