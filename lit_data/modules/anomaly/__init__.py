"""Anomaly detection from good parts alone: a frozen encoder, and a memory bank of its features."""

from lit_data.modules.anomaly.encoder import TextureEncoder
from lit_data.modules.anomaly.module import AnomalyModule

__all__ = ["AnomalyModule", "TextureEncoder"]
