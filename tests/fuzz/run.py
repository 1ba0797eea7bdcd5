"""`python -m fuzz.run SECONDS [TARGET...]`: fuzz for so long; 1 where anything was found.

What broke a target is made as small as it gets and written into tests/fuzz/found/, to be mended and
moved into tests/fuzz/corpus/, where every test run replays it.
"""

from __future__ import annotations

import faulthandler
import itertools
import resource
import sys
import time
import traceback
from pathlib import Path

from fuzz.strategies import falsify
from fuzz.targets import TARGETS, kept, replay

HERE = Path(__file__).parent
#: bytes: what an input may take beyond what a good one does
MEMORY = 4 << 30
ROUND = 40
#: s: what has not come to an end by then waits for ever, and ends with the stacks of its threads
HANGS_S = 900


def main(seconds: float, names: list[str]) -> int:
    """Replay the corpus, then give each target its turns until the time is over."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    until = time.monotonic() + seconds
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    for path in sorted((HERE / "corpus").glob("*.json")):
        replay(path)
    counts, found = dict.fromkeys(names, 0), set()
    for turn in itertools.count(int(time.time())):
        for name in names:
            if time.monotonic() > until:
                print(", ".join(f"{name} {count}" for name, count in counts.items()))
                print(f"{len(found)} found in {sum(counts.values())} inputs")
                return 1 if found else 0
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            broken = falsify(name, turn, ROUND)
            counts[name] += ROUND
            if broken is None:
                continue
            changes, error = broken
            where = "".join(traceback.format_exception(error)[-2:])
            if where not in found:
                found.add(where)
                print(f"{kept(HERE / 'found', name, changes)}: {changes}")
                traceback.print_exception(error)
                sys.stdout.flush()
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:] or list(TARGETS)))
