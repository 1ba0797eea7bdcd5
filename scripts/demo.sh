#!/bin/bash
# The main job in one go: a real training of four ranks, one of them slow on purpose; clusterprof
# looks at all ranks, says who delays the others, captures that one with a peer, and says why. Runs
# without a GPU in about a minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=runs/demo-$(date -u +%Y%m%dT%H%M%SZ)
command=(clusterprof torchrun --run-dir "$run"
  --nproc-per-node 4 -- examples/train.py --slow-rank 2 --slow-ms 100 --dim 64 --steps 200)
printf '+ %s\n' "${command[*]}" >&2
"${command[@]}"
printf '\nopen %s\n' "$PWD/$run/report.html"
