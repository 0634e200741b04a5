"""Generated images and objects."""
