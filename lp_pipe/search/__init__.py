"""Search over trials that survive failures: an experiment is an ordinary program of a searcher and slots."""

from lp_pipe.search.determined import from_yaml as from_yaml
from lp_pipe.search.experiment import experiment as experiment
from lp_pipe.search.experiment import fork as fork
from lp_pipe.search.experiment import open as open
from lp_pipe.search.experiment import preview as preview
from lp_pipe.search.searcher_node import AllTrialsFailed as AllTrialsFailed
from lp_pipe.search.searcher_node import Keep as Keep
from lp_pipe.search.searchers import Grid as Grid
from lp_pipe.search.searchers import Halving as Halving
from lp_pipe.search.searchers import Random as Random
from lp_pipe.search.searchers import Single as Single
from lp_pipe.search.space import choice as choice
from lp_pipe.search.space import constant as constant
from lp_pipe.search.space import integer as integer
from lp_pipe.search.space import log as log
from lp_pipe.search.space import uniform as uniform
from lp_pipe.search.store import StaleAttempt as StaleAttempt
from lp_pipe.search.trial import InvalidParams as InvalidParams
from lp_pipe.search.trial import Trial as Trial
from lp_pipe.search.trial import program as program
