"""Bounds on errors of a model that hold for finite samples: pure functions of NumPy arrays."""
