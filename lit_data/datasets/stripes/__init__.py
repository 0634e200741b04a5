"""Layouts of inspection images with references, defects that workers draw, pixels on the device."""
