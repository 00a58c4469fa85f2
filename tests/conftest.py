"""Give every test process one compute thread and no hypothesis deadline."""

import os

# Read when torch or numpy is first imported, so it is set here, before any test module. Child processes inherit it:
# two xdist workers that each start several nodes would otherwise ask for cores × nodes threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Two test processes share two cores: the time one example takes says nothing.
settings.register_profile("lp_pipe", deadline=None)
settings.load_profile("lp_pipe")
