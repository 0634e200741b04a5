"""Anomaly detection: learn what good images look like, and score how far other images are from them."""
