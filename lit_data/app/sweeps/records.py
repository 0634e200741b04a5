"""Records of the jobs of a sweep: job.json in the folder of each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lit_data.app.result import Outcome, Status
from lit_data.app.untrusted import as_dict, read_text
from lit_data.core.checks import check_types
from lit_data.core.errors import ConfigError, DataError, WorkerDiedError
from lit_data.core.files import write_json
from lit_data.core.plain import parse_json


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job of a sweep, as job.json in its folder keeps it.

    Args:
        number: from 0, in the order of the sweep.
        command: the word on the command line.
        overrides: of the job, those that all jobs share included.
        status: ``running`` until it ends.
        exit_code: as the command line gives it; None while it runs.
        reason: one line that says why it did not end well.
        seconds: from its start to its end.
        ckpt: the checkpoint that it went on from.
    """

    number: int
    command: str
    overrides: Sequence[str]
    status: Status = "running"
    exit_code: int | None = None
    reason: str = ""
    seconds: float = 0.0
    ckpt: str | None = None

    def end(self, outcome: Outcome, seconds: float) -> "JobRecord":
        """Return the record of a job that has ended; its reason is cut to one line."""
        return replace(
            self,
            status=outcome.status,
            exit_code=outcome.exit_code,
            reason=outcome.reason.strip().partition("\n")[0].strip(),
            seconds=round(seconds, 3),
        )


def write_record(folder: Path, record: JobRecord) -> None:
    """Write `folder`/job.json, whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    write_json(folder / "job.json", asdict(record))


def read_record(folder: Path) -> JobRecord | None:
    """Return the record of a job's folder; None where there is none or it is damaged."""
    try:
        plain = as_dict(parse_json(read_text(folder, folder / "job.json")))
        check_types(JobRecord, plain)
        return JobRecord(**plain)
    except (OSError, DataError, ConfigError, TypeError):
        return None


def read_records(folder: Path) -> list[tuple[Path, JobRecord]]:
    """Return folder and record of each job of a sweep, by their numbers."""
    records = []
    for path in folder.rglob("job.json"):
        record = read_record(path.parent)
        if record is not None:
            records.append((path.parent, record))
    return sorted(records, key=lambda entry: entry[1].number)


def settle(record: JobRecord) -> JobRecord:
    """Return the record of a job whose sweep has ended: what seems to run was lost with it."""
    if record.status != "running":
        return record
    code = WorkerDiedError.exit_code
    return replace(
        record, status="interrupted", exit_code=code, reason="it ended without a message"
    )
