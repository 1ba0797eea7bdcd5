"""The part of a rank that NCCL's watchdog is: a named pipe, and a dump for what is written to it.

`python nccl_watchdog.py DUMP...`: of each request the next of the DUMPs (packed by gzip), then the
last one again. Names are those of torch's variables, as on two H100s with PyTorch 2.11: the pipe is
made anew (0666 and the umask) and is read without waiting, the dump is written in place. Ends with
its standard input.
"""

from __future__ import annotations

import gzip
import os
import select
import sys
from pathlib import Path


def main(dumps: list[str]) -> None:
    """Answer requests until standard input ends."""
    rank = os.environ["RANK"]
    pipe = Path(f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe")
    target = Path(f"{os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}{rank}")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o666)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    kept = os.open(pipe, os.O_WRONLY)  # else a pipe without a writer is always at its end
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([reader, sys.stdin], [], [])
        if sys.stdin in ready:
            break
        if os.read(reader, 128) and dumps:
            target.write_bytes(gzip.decompress(Path(dumps[0]).read_bytes()))
            dumps = dumps[1:] or dumps
    os.close(kept)


main(sys.argv[1:])
