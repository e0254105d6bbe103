"""Owns the rotary tables: cosines and sines per position, in Hugging Face's half-split order.

Computed in float32, step by step as the reference implementation does, because at position 8000 another order
of roundings would move the angles by 1e-4 and with them a near tie between two tokens.
"""

from __future__ import annotations

import math

import torch

from .config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each `[max_positions, head_dim / 2]` float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        inverse = _scaled(inverse, config.rope_scaling)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * inverse
    return angles.cos(), angles.sin()


def _scaled(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return inverse / scaling.factor
    low_wavelength = scaling.original_max_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_max_positions / scaling.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    stretched = torch.where(wavelength > low_wavelength, inverse / scaling.factor, blended)
    return torch.where(wavelength < high_wavelength, inverse, stretched)
