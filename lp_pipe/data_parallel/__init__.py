"""Data parallelism: a training loop of your own on any number of workers, with the same bits. Loads torch."""

from lp_pipe.collectives.compression import Fp16 as Fp16
from lp_pipe.collectives.compression import OneBit as OneBit
from lp_pipe.collectives.compression import TopK as TopK
from lp_pipe.data_parallel.add import ReplicasClient as ReplicasClient
from lp_pipe.data_parallel.add import ReplicasHandle as ReplicasHandle
from lp_pipe.data_parallel.add import add_replicas as add_replicas
from lp_pipe.data_parallel.batch_norm import BatchNorm as BatchNorm
from lp_pipe.data_parallel.optimizer import ReplicaOptimizer as ReplicaOptimizer
from lp_pipe.data_parallel.replica import Replica as Replica
from lp_pipe.data_parallel.replicator import InputContext as InputContext
from lp_pipe.data_parallel.replicator import add_replicator as add_replicator
from lp_pipe.data_parallel.servers import Servers as Servers
from lp_pipe.data_parallel.shards import Shard as Shard
from lp_pipe.errors import CollectiveMismatch as CollectiveMismatch
from lp_pipe.errors import DataParallelError as DataParallelError
from lp_pipe.errors import NotSupported as NotSupported
