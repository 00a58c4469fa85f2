"""Consistent, verified checkpoints of a whole program: stages, trainer, and any node that has a state.

A checkpoint is a folder such as `step-00000100` with a manifest, which has every file's size and checksum. Needs no
torch.
"""

from lp_pipe.checkpoint.checkpoints import Checkpoints as Checkpoints
from lp_pipe.checkpoint.folder import Checkpoint as Checkpoint
from lp_pipe.checkpoint.folder import checkpoints_in as checkpoints_in
from lp_pipe.checkpoint.folder import open_checkpoint as open_checkpoint
from lp_pipe.checkpoint.part_files import PartFile as PartFile
from lp_pipe.checkpoint.part_files import PartFiles as PartFiles
from lp_pipe.errors import PoisonBatchError as PoisonBatchError
