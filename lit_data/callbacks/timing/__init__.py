"""The parts of `DataWaitMonitor`: the clocks of a step, sums over steps, and the picture."""
