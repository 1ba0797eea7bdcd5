"""Make the reduced tables of one report: what a rank's writer starts on its node.

`launch.profiling` has the command. It steps aside before it imports this module, and reports are
read by what takes most of the time to import. The last line on stderr says what went wrong; the
status is 1 then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from clusterprof.errors import ClusterprofError
from clusterprof.ingest.reports import keep


def main(words: Sequence[str]) -> int:
    """Reduce the report words[0] into the folder words[1]; the exit status."""
    report, folder = map(Path, words)
    try:
        keep(report, folder)
    except ClusterprofError as error:
        trouble = "; ".join([error.what, *error.details])
    except OSError as error:
        trouble = f"{folder} cannot be written: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the report is read later
        trouble = f"{report} cannot be read: {type(error).__name__}: {error}"
    else:
        return 0
    print(trouble, file=sys.stderr)
    return 1
