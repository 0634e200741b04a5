"""Sets that other libraries keep: Hugging Face, WebDataset, litData and FiftyOne, unpacked once into a folder."""

ROOTS = {"imported": f"{__name__}.folder.find_import"}
"""Dotted names of what opens roots that lie elsewhere, see `lit_data.images.roots`."""
