"""`python -m lp_pipe` is the command `lp_pipe`."""

import sys

from lp_pipe.cli.main import main

sys.exit(main())
