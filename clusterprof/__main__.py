"""`python -m clusterprof`."""

import sys

from clusterprof.cli.main import main

sys.exit(main())
