#!/bin/bash
# Starts ranks, as a launcher does, and nothing else: ranks.sh COUNT PROGRAM...
#
# It tells each its RANK, waits for all, prints how each ended, and ends with the highest status, as
# srun does. What goes on when it is killed ends with it.
export RANK LOCAL_RANK WORLD_SIZE=$1
shift
for ((RANK = 0; RANK < WORLD_SIZE; RANK++)); do
  LOCAL_RANK=$RANK
  setpriv --pdeathsig KILL -- "$@" &
  pids[RANK]=$!
done
highest=0
for rank in "${!pids[@]}"; do
  wait "${pids[rank]}"
  status=$?
  echo "rank $rank ended with $status"
  ((status <= highest)) || highest=$status
done
exit "$highest"
