"""Worth of verdicts: bounds on misses and false alarms, and the size of defects that are found."""
