"""torchrun by a script, where it is not what is tested: the real one loads torch, which takes long.

Arguments: some of torchrun's options, then the program. It starts the ranks of its own node, and
looks for no other node.
"""

import os
import signal
import subprocess
import sys


def parted(words):
    """The options by their names, and the program."""
    options = {}
    while words[0].startswith("--"):
        name, given, value = words[0][2:].partition("=")
        takes_word = not given and name != "no-python"
        options[name] = words[1] if takes_word else value
        words = words[2:] if takes_word else words[1:]
    return options, words


def environment(options, local):
    """That of one rank of this node."""
    here, node = int(options.get("nproc-per-node", 1)), int(options.get("node-rank", 0))
    nodes = int(options.get("nnodes", "1").partition(":")[0])
    variables = {
        "RANK": here * node + local, "WORLD_SIZE": here * nodes,
        "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here, "GROUP_RANK": node,
        "MASTER_ADDR": options.get("master-addr", "127.0.0.1"),
        "MASTER_PORT": options.get("master-port", 29500),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def main():
    """Run the ranks; 1 where one of them fails or this is told to end, which ends the others."""
    options, program = parted(sys.argv[1:])
    line = program if "no-python" in options else [sys.executable, "-u", *program]
    ranks = []

    def end(*_):
        for each in ranks:
            each.terminate()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    ranks.extend(
        subprocess.Popen(line, env=environment(options, local))
        for local in range(int(options.get("nproc-per-node", 1)))
    )
    failed = False
    for _ in ranks:
        ended, status = os.wait()
        if status:
            print(f"process {ended} ended with status {status}", file=sys.stderr, flush=True)
            failed = True
            end()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
