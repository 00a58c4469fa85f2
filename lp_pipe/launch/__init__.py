"""Where processes come from: plan, start, supervise, stop."""

from lp_pipe.launch.elastic import ElasticRun as ElasticRun
from lp_pipe.launch.elastic import launch_elastic as launch_elastic
from lp_pipe.launch.launcher import launch as launch
from lp_pipe.launch.launcher import new_run_dir as new_run_dir
from lp_pipe.launch.run import Run as Run
