"""Store of decoded images, memory-mapped and shared by all workers."""
