"""Sweeps: several jobs of one command."""
