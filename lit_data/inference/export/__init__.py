"""Nets in other forms: ONNX, fewer bits."""
