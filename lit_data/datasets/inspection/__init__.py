"""Single inspection images with masks, in the layouts that people have."""
