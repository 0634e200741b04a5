"""Anomaly detection from good parts alone: a frozen encoder, and a memory bank of its features."""
