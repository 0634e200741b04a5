"""The parts of ``python -m lit_data benchmark``."""
