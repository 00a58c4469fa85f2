"""The nodes of which a program's graph is made."""

from lp_pipe.nodes.base import Node as Node
from lp_pipe.nodes.cacher_node import CacheInfo as CacheInfo
from lp_pipe.nodes.cacher_node import CacherNode as CacherNode
from lp_pipe.nodes.cacher_node import cache_info as cache_info
from lp_pipe.nodes.colocation import Colocation as Colocation
from lp_pipe.nodes.colocation import MultiProcessingColocation as MultiProcessingColocation
from lp_pipe.nodes.courier_node import CourierNode as CourierNode
from lp_pipe.nodes.multi_threading_colocation import MultiThreadingColocation as MultiThreadingColocation
from lp_pipe.nodes.py_node import PyClassNode as PyClassNode
from lp_pipe.nodes.py_node import PyNode as PyNode
from lp_pipe.nodes.run_node import is_caused_by_peer as is_caused_by_peer
from lp_pipe.nodes.run_node import is_only_caused_by_peer as is_only_caused_by_peer
from lp_pipe.nodes.run_node import run_to_end as run_to_end
