"""Anomaly detection: what good images look like, and how far others are from that."""
