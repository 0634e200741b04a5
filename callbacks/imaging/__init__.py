"""The parts of `SampleImages` and `ImageMetrics`: asking a module for images, pictures of them, their features."""
