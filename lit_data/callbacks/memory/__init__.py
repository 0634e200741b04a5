"""The parts of `MemoryMonitor`: host memory, the record of a run, its picture, and reports."""
