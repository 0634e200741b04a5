"""Datasets of other libraries: Hugging Face, WebDataset, litData and FiftyOne, unpacked once into a folder."""

ROOTS = {"imported": f"{__name__}.folder.find_import"}
"""Dotted names of the functions that open such roots, see `lit_data.images.roots`."""
