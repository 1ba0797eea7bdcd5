#!/bin/bash
# The main job in one go: a real training of four ranks, one of them slow on purpose; clusterprof
# captures ranks 0 and 2 for ten steps and says who is late. Runs without a GPU in about a minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=runs/demo-$(date -u +%Y%m%dT%H%M%SZ)
command=(clusterprof torchrun --ranks "0,2" --steps 10:20 --run-dir "$run"
  --nproc-per-node 4 -- examples/train.py --slow-rank 2)
printf '+ %s\n' "${command[*]}" >&2
"${command[@]}"
printf '\nopen %s\n' "$PWD/$run/report.html"
