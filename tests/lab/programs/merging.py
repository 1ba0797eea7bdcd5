"""`clusterprof merge` whose reading processes run a function of `lab.reading`, the first word.

The second is after how many seconds a silent task of MPI is lost.
"""

import sys

from lab import reading

from clusterprof.cli.main import main
from clusterprof.ingest import engines, gathered

if __name__ == "__main__":
    gathered._attempt = getattr(reading, sys.argv[1])
    engines.SILENCE_S = float(sys.argv[2])
    sys.exit(main(["merge", *sys.argv[3:]]))
