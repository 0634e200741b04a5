"""The parts of ``lit-data benchmark``."""
