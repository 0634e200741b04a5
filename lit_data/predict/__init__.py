"""Drawing and prediction of samples, for each kind of data; see `Task`."""

from lit_data.predict.defects import find_defects
from lit_data.predict.journal import Entry
from lit_data.predict.labels import LabelTask
from lit_data.predict.options import Predicted, PredictOptions, PredictRun
from lit_data.predict.pixels import InspectionTask
from lit_data.predict.predictor import TiledPredictor
from lit_data.predict.reach import measure_reach_px
from lit_data.predict.stripes import PatchTask, StripeTask
from lit_data.predict.task import Task, find_task, find_task_of, register
from lit_data.predict.writer import PredictionWriter, Written
from lit_inspect.regions import Defect

__all__ = [
    "TiledPredictor",
    "find_defects",
    "measure_reach_px",
    "Defect",
    "Task",
    "find_task",
    "find_task_of",
    "register",
    "PredictionWriter",
    "Written",
    "Entry",
    "PredictOptions",
    "PredictRun",
    "Predicted",
    "InspectionTask",
    "LabelTask",
    "PatchTask",
    "StripeTask",
]
