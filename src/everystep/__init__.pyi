# Every public name, once: type checkers read this file, and so does `everystep.__getattr__`.
from everystep import errors as errors
from everystep import inspect as inspect
from everystep import universal as universal
from everystep import view as view
from everystep.checkpointer import Checkpointer as Checkpointer
from everystep.checkpointer import Keep as Keep
from everystep.checkpointer import PendingSave as PendingSave
from everystep.checkpointer import stable as stable
from everystep.errors import CheckpointExists as CheckpointExists
from everystep.errors import CheckpointNotFound as CheckpointNotFound
from everystep.errors import CorruptCheckpoint as CorruptCheckpoint
from everystep.errors import EverystepError as EverystepError
from everystep.errors import RankFailed as RankFailed
from everystep.errors import SaveFailed as SaveFailed
from everystep.errors import StateMismatch as StateMismatch
from everystep.errors import UnsupportedState as UnsupportedState
from everystep.shelf import Shelf as Shelf
from everystep.shelf import ShelfWarning as ShelfWarning
from everystep.state.marks import per_rank as per_rank
from everystep.state.marks import rank_zero as rank_zero
from everystep.state.rng import rng as rng
from everystep.store import Checkpoint as Checkpoint
from everystep.store import CheckpointInfo as CheckpointInfo
from everystep.store import LeafInfo as LeafInfo
from everystep.store import Options as Options
from everystep.store import VerifyProblem as VerifyProblem
from everystep.store import VerifyReport as VerifyReport
from everystep.store import load as load
from everystep.store import open as open
from everystep.store import save as save
from everystep.store import verify as verify

__version__: str
