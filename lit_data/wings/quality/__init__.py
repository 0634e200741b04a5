"""Quality of verdicts: bounds on misses and false alarms, and the size of detectable defects."""

COMMANDS = {
    "calibrate": "bound the misses and false alarms of verdicts: calibrate RUN miss=0.02",
    "pod": "measure the smallest defect that a model finds, with a bound: pod RUN",
}
ON_RUNS = dict.fromkeys(COMMANDS, "")
MODULES = {name: f"{__name__}.{name}" for name in COMMANDS}
