#!/bin/bash
# The main job in one go: a real training of four ranks, one of them slow on purpose; clusterprof
# looks at all ranks, says who delays the others, captures that one with a peer, and says why. Runs
# without a GPU in about a minute. SCENARIO is what makes the rank slow: host, loader, compute, gc or
# checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scenario=${SCENARIO:-host}
case $scenario in
  host | loader | compute | gc | checkpoint) ;;
  *)
    echo "SCENARIO=$scenario: choose host, loader, compute, gc or checkpoint" >&2
    exit 2
    ;;
esac
run=runs/demo-$scenario-$(date -u +%Y%m%dT%H%M%SZ)
command=(clusterprof torchrun --run-dir "$run" --nproc-per-node 4 -- examples/train.py
  --slow-rank 2 --slow-kind "$scenario" --slow-ms 100 --dim 64 --steps 300)
printf '+ %s\n' "${command[*]}" >&2
"${command[@]}"
# The verdict again, and what interrupted the run, below all that was printed.
printf '\n%s: what was planted on rank 2. What was found:\n\n' "$scenario"
clusterprof report "$run" >"$run/report.txt"
sed -n 1p "$run/report.txt"
if [[ $scenario == checkpoint ]]; then sed -n '/^pauses/,/^$/p' "$run/report.txt"; fi
printf '\nopen %s\n' "$PWD/$run/report.html"
