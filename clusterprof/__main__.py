"""The command `clusterprof`, and `python -m clusterprof`: Ctrl-C never prints a traceback.

Importing the command line takes a tenth of a second, in which nothing could catch an exception.
"""

import os
import signal
import sys

#: as in `clusterprof/__init__.py`: what is imported here is imported unprotected
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> int:
    """Run the command line; returns the exit status, or ends with 130 when interrupted."""
    # Where who started us ignores the signal (a shell's background job), it stays ignored.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _interrupted)
    from clusterprof.cli import main as command_line

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command_line.main()
    except KeyboardInterrupt:
        _interrupted()
    finally:  # Python's own shutdown: it may join threads, and prints a traceback as well
        if heeded:
            signal.signal(signal.SIGINT, _interrupted)


def _interrupted(*_: object) -> "NoReturn":
    """End at once: there is nothing to clean up."""
    os.write(2, b"clusterprof: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
