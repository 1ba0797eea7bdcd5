#!/bin/bash
# A real Slurm cluster on one machine, for the tests: munged, slurmctld and a few slurmd, each
# slurmd in UTS and mount namespaces of its own, so that it has its own host name, /dev/shm and
# scratch folder. Everything lives in one state folder; nothing is written to /etc.
#
# Its partitions are `main` and `urgent`, whose jobs preempt those of `main`.
#
#   slurm.sh up      start (a cluster already up in the state folder is stopped first)
#   slurm.sh down    stop everything and remove the state folder
#   slurm.sh env     print the exports a shell needs: eval "$(slurm.sh env)"
#   slurm.sh check   say whether this machine can run it, and why not
#   slurm.sh cut n1  take a node off the network (where each has its own)
#   slurm.sh mend n1 and put it back
#
# Settings, by environment:
#   CLUSTERPROF_LAB_SLURM      the state folder     (${TMPDIR:-/tmp}/clusterprof-slurm)
#   CLUSTERPROF_LAB_NODES      how many nodes       (4: n1 to n4)
#   CLUSTERPROF_LAB_CPUS       processors per node  (8, whatever the machine has)
#   CLUSTERPROF_LAB_PROCTRACK  cgroup | linuxproc | pgid   (the first that works here)
#   CLUSTERPROF_LAB_NETWORK    own: each node in a network namespace, behind a bridge (loopback)
#   CLUSTERPROF_LAB_TIMEOUT    so many seconds after its last word a node is down (60)
set -euo pipefail

state=${CLUSTERPROF_LAB_SLURM:-${TMPDIR:-/tmp}/clusterprof-slurm}
nodes=${CLUSTERPROF_LAB_NODES:-4}
cpus=${CLUSTERPROF_LAB_CPUS:-8}
network=${CLUSTERPROF_LAB_NETWORK:-}
silence=${CLUSTERPROF_LAB_TIMEOUT:-60}
freezer=/sys/fs/cgroup/freezer
# Debian keeps the daemons in sbin, which is not on everybody's PATH.
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$state/slurm.conf

say() { echo "slurm lab: $*" >&2; }

# A daemon whose parent never reaps it stays a zombie, for which `kill -0` succeeds.
alive() {
  local status
  status=$(awk '/^State:/ { print $2 }' "/proc/$1/status" 2>/dev/null) || return 1
  [ -n "$status" ] && [ "$status" != Z ]
}

command_line() { tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline" || true; }

# Daemons of this state folder and no other: by pid file, and only while that pid still runs one.
daemons() {
  local file pid
  for file in "$state"/pid/*.pid; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    case $(command_line "$pid") in
      *slurmd* | *slurmctld* | *munged*) alive "$pid" && echo "$pid" ;;
    esac
  done
  return 0
}

# A number of this state folder's own, for what has names that all labs of a machine share.
number() { cksum <<<"$state" | cut -d" " -f1; }

# Of the nodes' network: the bridge's name (a node's end adds the node's), and addresses.
bridge() { printf 'cl%08x' "$(number)"; }
address() {
  if [ -z "$network" ]; then echo 127.0.0.1; else
    echo "10.$((128 + $(number) / 256 % 100)).$(($(number) % 256)).$1"
  fi
}

# A bridge, and for each node a namespace with one interface to it. No route leaves the bridge.
make_network() {
  local node name
  ip link add "$(bridge)" type bridge
  ip addr add "$(address 254)/24" dev "$(bridge)"
  ip link set "$(bridge)" up
  for node in $(seq "$nodes"); do
    name=$(bridge)n$node
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master "$(bridge)" up
    ip -n "$name" link set lo up # nsys cannot start without
    ip -n "$name" addr add "$(address "$node")/24" dev eth0
    ip -n "$name" link set eth0 up
  done
}

remove_network() {
  local name
  # Whatever the settings are now: it was made with those of its `up`.
  for name in /run/netns/"$(bridge)"n*; do
    [ ! -e "$name" ] || ip netns del "${name##*/}"
  done
  [ ! -e "/sys/class/net/$(bridge)" ] || ip link del "$(bridge)"
}

# Our part of the freezer hierarchy. Two labs whose jobs have the same number would otherwise
# share a cgroup, and a cancel in one would kill the tasks of the other.
cgroup() { echo "$freezer/clusterprof-lab-$(number)"; }

missing() {
  local name
  [ "$(id -u)" = 0 ] || { echo "not root"; return; }
  for name in munged slurmctld slurmd srun scontrol unshare mount; do
    command -v "$name" >/dev/null || { echo "$name is not installed"; return; }
  done
  unshare --uts --mount true 2>/dev/null || {
    echo "no permission to make UTS and mount namespaces"
    return
  }
  [ -z "$network" ] || missing_network
}

missing_network() {
  for name in ip nsenter; do
    command -v "$name" >/dev/null || { echo "$name is not installed"; return; }
  done
  # In a network of its own, where a bridge is in nobody's way.
  unshare --net sh -c "ip link add cl0 type bridge && ip link add cl1 type veth peer name cl2" \
    2>/dev/null || echo "no permission to make bridges, or no such thing in this kernel"
}

proctrack() {
  local plugins probe
  if [ -n "${CLUSTERPROF_LAB_PROCTRACK:-}" ]; then
    echo "$CLUSTERPROF_LAB_PROCTRACK"
    return
  fi
  probe=$(cgroup)
  if [ -e "$freezer/tasks" ] && mkdir -p "$probe" 2>/dev/null; then
    rmdir "$probe"
    echo cgroup
    return
  fi
  plugins=$(dirname "$(find /usr/lib /usr/lib64 -name proctrack_pgid.so -print -quit 2>/dev/null)")
  if [ -e "$plugins/proctrack_linuxproc.so" ]; then echo linuxproc; else echo pgid; fi
}

# A base below the ephemeral range with nodes + 1 ports free after it.
free_ports() {
  python3 - "$nodes" <<'PY'
import random, socket, sys

count = int(sys.argv[1]) + 1
for _ in range(200):
    base = random.randrange(12000, 31000, 16)
    held = []
    try:
        for port in range(base, base + count):
            held.append(socket.socket())
            held[-1].bind(("0.0.0.0", port))
    except OSError:
        continue
    finally:
        for each in held:
            each.close()
    print(base)
    break
else:
    sys.exit("no free ports")
PY
}

write_configuration() {
  local base=$1 track=$2 node
  {
    cat <<CONF
ClusterName=clusterprof
SlurmctldHost=$(hostname)($(address 254))
SlurmctldPort=$base
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/$track
TaskPlugin=task/none
TaskProlog=$state/taskprolog.sh
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
FirstJobId=$((1 + $(number) % 9000))
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=100
UnkillableStepTimeout=30
SlurmdTimeout=$silence
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation=$state/state
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/pid/slurmctld.pid
SlurmdPidFile=$state/pid/slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
CONF
    for node in $(seq "$nodes"); do
      echo "NodeName=n$node NodeHostname=n$node NodeAddr=$(address "$node") Port=$((base + node))" \
        "CPUs=$cpus RealMemory=8000 State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP"
    # Takes nodes from jobs in `main`, which start over.
    echo "PartitionName=urgent Nodes=ALL PriorityTier=10 DefaultTime=60 State=UP"
  } >"$state/slurm.conf"
  cat >"$state/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=$state/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
CONF
  # nsys keeps its registry of sessions in TMPDIR and /dev/shm: both must be the node's own.
  printf '#!/bin/sh\necho "export TMPDIR=%s"\n' "$state/scratch" >"$state/taskprolog.sh"
  chmod 755 "$state/taskprolog.sh"
  # All nodes share /tmp, where Slurm's PMIx plugin would put folders of one name.
  echo "PMIxCliTmpDirBase=$state/scratch" >"$state/mpi.conf"
  {
    [ -z "$network" ] || echo "$(address 254) $(hostname)"
    cat /etc/hosts
    for node in $(seq "$nodes"); do echo "$(address "$node") n$node"; done
  } >"$state/hosts"
}

start_node() {
  local node=n$1 track=$2 inside=()
  mkdir -p "$state/local/$node"
  chmod 1777 "$state/local/$node"
  # Not `ip netns exec`, which mounts a /sys of its own and hides the cgroups.
  [ -z "$network" ] || inside=(nsenter --net="/run/netns/$(bridge)$node")
  # Its mounts end with the namespace; the machine's own mount table never sees them.
  # shellcheck disable=SC2016 # the inner shell expands these
  "${inside[@]}" unshare --uts --mount bash -euc '
    state=$1 node=$2 cgroup=$3
    hostname "$node"
    mount --bind "$state/hosts" /etc/hosts
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$state/local/$node" "$state/scratch"
    [ -z "$cgroup" ] || mount --bind "$cgroup" "$state/cgroup/freezer"
    exec slurmd -N "$node"
  ' node "$state" "$node" "$([ "$track" != cgroup ] || cgroup)"
}

all_idle() {
  [ "$(timeout 3 sinfo -h -t idle -o %D 2>/dev/null | awk '{ n += $1 } END { print n + 0 }')" = "$nodes" ]
}

try_up() {
  local track base node turn
  track=$(proctrack)
  base=$(free_ports)
  # munged wants a path to its socket that everybody may walk along.
  mkdir -p "$state"
  chmod 755 "$state"
  (umask 022 && mkdir -p "$state"/{state,log,spool,pid,scratch,local,cgroup/freezer})
  chmod 1777 "$state/scratch"
  [ "$track" != cgroup ] || mkdir -p "$(cgroup)"
  [ -z "$network" ] || make_network
  write_configuration "$base" "$track"
  (umask 077 && head -c 128 /dev/urandom >"$state/munge.key")
  munged --key-file="$state/munge.key" --socket="$state/munge.socket" --num-threads=2 \
    --pid-file="$state/pid/munged.pid" --log-file="$state/log/munged.log" \
    --seed-file="$state/munge.seed"
  slurmctld
  for node in $(seq "$nodes"); do start_node "$node" "$track"; done
  for turn in $(seq 600); do
    if all_idle; then
      say "up: $nodes nodes of $cpus processors, proctrack/$track, ports from $base, SLURM_CONF=$SLURM_CONF"
      return 0
    fi
    sleep 0.1
  done
  return 1
}

up() {
  local why attempt
  why=$(missing)
  [ -z "$why" ] || { say "cannot run here: $why"; exit 2; }
  [ ! -d "$state" ] || down
  # Another program may take a port between our look and slurmctld's bind: try again.
  for attempt in 1 2 3; do
    if try_up; then return; fi
    say "attempt $attempt failed; the ends of its logs:"
    tail -n 4 "$state"/log/*.log >&2 || true
    down
  done
  exit 1
}

# Wait until none of the given processes lives; false after about $1 tenths of a second.
gone() {
  local tenths=$1 pid left
  shift
  while [ "$tenths" -gt 0 ]; do
    left=
    for pid in "$@"; do if alive "$pid"; then left=1; fi; done
    [ -n "$left" ] || return 0
    sleep 0.1
    tenths=$((tenths - 1))
  done
  return 1
}

signal() {
  local name=$1 pid
  shift
  for pid in "$@"; do kill "-$name" "$pid" 2>/dev/null || true; done
}

# Whatever a job left in our cgroups: nothing else can be in there.
tasks() { find "$(cgroup)" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u || true; }

down() {
  local running left turn
  [ -d "$state" ] || return 0
  running=$(daemons)
  if [ -n "$running" ] && [ -s "$state/slurm.conf" ]; then
    timeout 3 scancel -u root 2>/dev/null || true
    for turn in $(seq 20); do
      [ -n "$(timeout 2 squeue -h 2>/dev/null)" ] || break
      [ "$turn" != 10 ] || timeout 3 scancel -u root -s KILL --full 2>/dev/null || true
      sleep 0.1
    done
  fi
  # shellcheck disable=SC2086 # a list of pids
  {
    signal TERM $running
    gone 50 $running || signal KILL $running
    left=$(tasks)
    signal KILL $left
    gone 20 $left || say "still running: $left"
  }
  # A cgroup stays busy for a moment after its last task.
  for turn in $(seq 30); do
    [ -d "$(cgroup)" ] || break
    find "$(cgroup)" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
  done
  [ ! -d "$(cgroup)" ] || say "cannot remove $(cgroup)"
  remove_network
  rm -rf "$state"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  env) echo "export CLUSTERPROF_LAB_SLURM='$state' SLURM_CONF='$state/slurm.conf'" ;;
  cut) ip link set "$(bridge)$2" down ;;
  mend) ip link set "$(bridge)$2" up ;;
  check)
    why=$(missing)
    [ -z "$why" ] || { echo "$why"; exit 1; }
    ;;
  *)
    sed -n '2,/^set -/ s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
