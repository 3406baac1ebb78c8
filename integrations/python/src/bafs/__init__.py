"""BAFS from Python: volumes, programs on volumes, workflows and throw-away clusters.

The module calls the program `bafs` with `--json`. docs/guide/python.md shows how to use it.
"""

from . import api
from .cluster import Cluster
from .errors import (
    AmbiguousVolume,
    BafsError,
    CommandFailed,
    EnvironmentFailed,
    Interrupted,
    ProgramNotFound,
    RunFailed,
    UsageError,
    VolumeNotFound,
)
from .processes import HomeServer, LocalCluster, ServerProcess
from .program import find_program
from .records import (
    FileStatus,
    HistoryEntry,
    JobLog,
    JobProgress,
    Progress,
    Receipt,
    Server,
    Volume,
)
from .runs import Run, RunJournal, WorkflowError, check
from .workflow import Job, Mount, Workflow

__all__ = [
    "AmbiguousVolume",
    "BafsError",
    "Cluster",
    "CommandFailed",
    "EnvironmentFailed",
    "FileStatus",
    "HistoryEntry",
    "HomeServer",
    "Interrupted",
    "Job",
    "JobLog",
    "JobProgress",
    "LocalCluster",
    "Mount",
    "ProgramNotFound",
    "Progress",
    "Receipt",
    "Run",
    "RunFailed",
    "RunJournal",
    "Server",
    "ServerProcess",
    "UsageError",
    "Volume",
    "VolumeNotFound",
    "Workflow",
    "WorkflowError",
    "api",
    "check",
    "find_program",
]
