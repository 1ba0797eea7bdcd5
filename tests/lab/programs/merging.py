"""`clusterprof merge` whose reading processes run a function of `lab.reading`, the first word.

The second is after how many seconds without a report tasks of MPI are lost, the third after how
many without anything to read they end.
"""

import sys

from lab import reading

from clusterprof.cli.main import main
from clusterprof.ingest import engines, gathered
from clusterprof.launch import tasks

if __name__ == "__main__":
    gathered._attempt = getattr(reading, sys.argv[1])
    engines.ON_ITS_WAY_S = float(sys.argv[2]) - engines._PATIENCE_S
    tasks.IDLE_S = int(sys.argv[3])
    sys.exit(main(["merge", *sys.argv[4:]]))
