"""The parts of `DataWaitMonitor`: the clock of a step, the places it is read at, sums over steps, and the timeline."""
