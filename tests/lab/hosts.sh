#!/bin/bash
# Hosts to reach over SSH, on one machine: one sshd per host on a loopback port, each in UTS and
# mount namespaces of its own, so that it has its own host name, /dev/shm and temporary folder.
# Everything lives in one state folder; nothing is written to /etc.
#
#   hosts.sh up      start (hosts already up in the state folder are stopped first)
#   hosts.sh down    stop everything that runs on the hosts and remove the state folder
#   hosts.sh env     print the exports a shell needs: eval "$(hosts.sh env)"
#   hosts.sh check   say whether this machine can run it, and why not
#
# `ssh -F STATE/config h1` reaches the first. STATE/local/h1 is the first's temporary folder.
#
# Settings, by environment:
#   CLUSTERPROF_LAB_HOSTS    the state folder  (${TMPDIR:-/tmp}/clusterprof-hosts)
#   CLUSTERPROF_LAB_COUNT    how many hosts    (3: h1 to h3)
set -euo pipefail

state=${CLUSTERPROF_LAB_HOSTS:-${TMPDIR:-/tmp}/clusterprof-hosts}
count=${CLUSTERPROF_LAB_COUNT:-3}
# Debian keeps the daemon in sbin, which is not on everybody's PATH.
PATH=$PATH:/usr/sbin:/sbin

say() { echo "hosts lab: $*" >&2; }

alive() {
  local status
  status=$(awk '/^State:/ { print $2 }' "/proc/$1/status" 2>/dev/null) || return 1
  [ -n "$status" ] && [ "$status" != Z ]
}

# Daemons of this state folder and no other: by pid file, and only while that pid still runs one.
daemons() {
  local file pid
  for file in "$state"/*.pid; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    case $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" || true) in
      *sshd*) alive "$pid" && echo "$pid" ;;
    esac
  done
  return 0
}

# What was started by logging in: it carries the state folder in its environment.
guests() {
  grep -lzxF "CLUSTERPROF_LAB_HOSTS_GUEST=$state" /proc/[0-9]*/environ 2>/dev/null |
    cut -d/ -f3 || true
}

missing() {
  local name
  [ "$(id -u)" = 0 ] || { echo "not root"; return; }
  for name in sshd ssh-keygen unshare mount; do
    command -v "$name" >/dev/null || { echo "$name is not installed"; return; }
  done
  unshare --uts --mount true 2>/dev/null || echo "no permission to make UTS and mount namespaces"
}

# As many ports below the ephemeral range as there are hosts.
free_ports() {
  python3 - "$count" <<'PY'
import random, socket, sys

held = []
while len(held) < int(sys.argv[1]):
    probe = socket.socket()
    try:
        probe.bind(("127.0.0.1", random.randrange(12000, 31000)))
    except OSError:
        continue
    held.append(probe)
print(*(probe.getsockname()[1] for probe in held))
PY
}

start_host() {
  local host=$1 port=$2
  mkdir -p "$state/local/$host"
  chmod 1777 "$state/local/$host"
  ssh-keygen -q -t ed25519 -N '' -C "$host" -f "$state/$host.key"
  cat >"$state/$host.conf" <<CONF
Port $port
ListenAddress 127.0.0.1
HostKey $state/$host.key
PidFile $state/$host.pid
AuthorizedKeysFile $state/id.pub
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PrintMotd no
UseDNS no
MaxStartups 100
SetEnv HOME=$state/home TMPDIR=$state/scratch CLUSTERPROF_LAB_HOSTS_GUEST=$state CLUSTERPROF_TESTS_SESSION=${CLUSTERPROF_TESTS_SESSION:-}
Subsystem sftp internal-sftp
CONF
  cat >>"$state/config" <<CONF
Host $host
  HostName 127.0.0.1
  Port $port
  User root
  IdentityFile $state/id
  IdentitiesOnly yes
  UserKnownHostsFile $state/known_hosts
  GlobalKnownHostsFile none
CONF
  echo "[127.0.0.1]:$port $(cut -d' ' -f1,2 "$state/$host.key.pub")" >>"$state/known_hosts"
  # Its mounts end with the namespace; the machine's own mount table never sees them.
  # shellcheck disable=SC2016 # the inner shell expands these
  unshare --uts --mount bash -euc '
    state=$1 host=$2
    hostname "$host"
    mount --bind "$state/hosts" /etc/hosts
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$state/local/$host" "$state/scratch"
    exec "$(command -v sshd)" -f "$state/$host.conf" -E "$state/$host.log"
  ' host "$state" "$host"
}

up() {
  local why ports number
  why=$(missing)
  [ -z "$why" ] || { say "cannot run here: $why"; exit 2; }
  [ ! -d "$state" ] || down
  # Its logins read no ~/.bashrc, which may take longer than what they are for.
  mkdir -p "$state/local" "$state/scratch" "$state/home" /run/sshd
  chmod 1777 "$state/scratch"
  ssh-keygen -q -t ed25519 -N '' -C lab -f "$state/id"
  {
    cat /etc/hosts
    for number in $(seq "$count"); do echo "127.0.0.1 h$number"; done
  } >"$state/hosts"
  read -r -a ports <<<"$(free_ports)"
  for number in $(seq "$count"); do start_host "h$number" "${ports[number - 1]}"; done
  for _ in $(seq 100); do
    if [ "$(daemons | wc -l)" = "$count" ]; then
      say "up: $count hosts, ssh -F $state/config h1"
      return
    fi
    sleep 0.05
  done
  tail -n 4 "$state"/*.log >&2 || true
  exit 1
}

down() {
  local pid
  [ -d "$state" ] || return 0
  for pid in $(daemons); do kill "$pid" 2>/dev/null || true; done
  for _ in $(seq 20); do
    [ -n "$(daemons)$(guests)" ] || break
    sleep 0.1
  done
  for pid in $(daemons) $(guests); do kill -KILL "$pid" 2>/dev/null || true; done
  rm -rf "$state"
}

case ${1:-} in
  up) up ;;
  down) down ;;
  env) echo "export CLUSTERPROF_LAB_HOSTS='$state'" ;;
  check)
    why=$(missing)
    [ -z "$why" ] || { echo "$why"; exit 1; }
    ;;
  *)
    sed -n '2,/^set -/ s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
