"""Tasks: drawing and prediction of each kind of data, see `Task`."""

from lit_data.tasks.base import Task, find_task, find_task_of, register
from lit_data.tasks.boxes import BoxTask
from lit_data.tasks.generate import GenerateTask
from lit_data.tasks.journal import Entry
from lit_data.tasks.labels import LabelTask
from lit_data.tasks.options import Predicted, PredictOptions, PredictRun
from lit_data.tasks.pixels import InspectionTask
from lit_data.tasks.stripes import PatchTask, StripeTask
from lit_data.tasks.volumes import VolumeTask
from lit_data.tasks.watermarks import MarkTask
from lit_data.tasks.writer import PredictionWriter, Written

__all__ = [
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
    "BoxTask",
    "GenerateTask",
    "InspectionTask",
    "LabelTask",
    "MarkTask",
    "PatchTask",
    "StripeTask",
    "VolumeTask",
]
