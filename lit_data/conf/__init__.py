"""Hydra configuration, reached as ``pkg://lit_data.conf``."""
