"""Images with one label each. Each command of lit_data imports this file: keep it short."""
