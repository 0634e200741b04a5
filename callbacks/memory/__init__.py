"""The parts of `MemoryMonitor`: what the host holds, advice, the timeline, and a report when memory runs out."""
