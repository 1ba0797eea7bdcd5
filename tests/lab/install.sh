#!/bin/bash
# Install the real parts that the tests use, from Debian's packages: Slurm, munge, an OpenSSH
# server, MPICH, libfaketime, Chromium, a C++ compiler, NVIDIA Nsight Systems. Installs only what is missing, starts
# no service and leaves the machine's package sources as they are.
#
#   install.sh            install what is missing; where that cannot be done, say so and exit 0:
#                         the tests name what they leave out
#   install.sh sources    print the extra package sources that it would use for nsys
#
# CLUSTERPROF_TESTS_INSTALL=no leaves the machine alone.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
etc=${CLUSTERPROF_LAB_APT:-/etc/apt}
export DEBIAN_FRONTEND=noninteractive
scratch=
guard=

say() { echo "parts: $*" >&2; }
have() { command -v "$1" >/dev/null; }

# Called by the trap only.
# shellcheck disable=SC2317,SC2329
cleanup() {
  [ -z "$scratch" ] || rm -rf "$scratch"
  [ -z "$guard" ] || rm -f "$guard"
}
trap cleanup EXIT

wanted() {
  have slurmctld || echo slurmctld
  have slurmd || echo slurmd
  have srun || echo slurm-client
  have munged || echo munge
  # The plugins for one machine's processors, and PMIx for MPI under srun.
  [ -n "$(find /usr/lib -path '*slurm-wlm/select_cons_tres.so' -print -quit 2>/dev/null)" ] ||
    echo slurm-wlm-basic-plugins
  have unshare || echo util-linux
  [ -x /sbin/ip ] || have ip || echo iproute2
  have sshd || echo openssh-server
  have ssh || echo openssh-client
  have mpirun.mpich || echo mpich
  [ -n "$(find /usr/lib -path '*/faketime/libfaketime.so.1' -print -quit 2>/dev/null)" ] ||
    echo libfaketime
  have c++ || echo g++
  have chromium || have chromium-browser || have google-chrome || echo chromium
  # A machine with NVIDIA's driver gets nsys from NVIDIA: Debian's would pull in its own driver
  # library beside it.
  have nsys || [ -e /proc/driver/nvidia/version ] || echo nsight-systems
}

# Debian's nsys is in `non-free`, and a library that it depends on in `contrib`: the machine's
# own Debian sources with these two components, whichever mirror they name.
extra_sources() {
  local file
  for file in "$etc"/sources.list.d/*.sources; do
    [ ! -e "$file" ] || awk -v RS= -v ORS='\n\n' '
      # Debian archives only: those have a component that is called main.
      tolower($0) !~ /(^|\n)enabled: *no/ && /(^|\n)Types:[^\n]*deb/ && /(^|\n)Components:[^\n]*main/ {
        gsub(/(^|\n)#[^\n]*/, ""); sub(/^\n/, "")
        sub(/Types:[^\n]*/, "Types: deb"); sub(/Components:[^\n]*/, "Components: contrib non-free")
        if ($0 ~ /Suites: *(bookworm|trixie|bullseye|sid|forky|stable|testing)/) print
      }' "$file"
  done
}
extra_lines() {
  local file
  for file in "$etc"/sources.list "$etc"/sources.list.d/*.list; do
    [ ! -e "$file" ] || awk '
      $1 == "deb" {
        at = 2
        if ($2 ~ /^\[/) while ($at !~ /\]$/ && at < NF) at++
        if ($2 ~ /^\[/) at++
        if ($(at + 1) !~ /^(bookworm|trixie|bullseye|sid|forky|stable|testing)/) next
        for (i = at + 2; i <= NF; i++) if ($i == "main") {
          line = $1
          for (j = 2; j <= at + 1; j++) line = line " " $j
          print line " contrib non-free"
          next
        }
      }' "$file"
  done
}

if [ "${1:-}" = sources ]; then
  extra_sources
  extra_lines
  exit 0
fi

mapfile -t packages < <(wanted)
if [ "${#packages[@]}" = 0 ]; then
  exit 0
fi
if [ "${CLUSTERPROF_TESTS_INSTALL:-yes}" = no ]; then
  say "missing: ${packages[*]}; CLUSTERPROF_TESTS_INSTALL=no: not installed"
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! have apt-get; then
  say "missing: ${packages[*]}; installing them takes root and apt-get: the tests that need them are left out"
  exit 0
fi

scratch=$(mktemp -d)
options=(-qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=120)
case " ${packages[*]} " in
  *" nsight-systems "*)
    # A folder of sources of our own, for these runs of apt-get and no others.
    mkdir "$scratch/sources"
    for file in "$etc"/sources.list.d/*.list "$etc"/sources.list.d/*.sources; do
      [ ! -e "$file" ] || cp "$file" "$scratch/sources/"
    done
    extra_sources >"$scratch/sources/clusterprof-tests.sources"
    extra_lines >"$scratch/sources/clusterprof-tests.list"
    chmod -R a+rX "$scratch"
    options+=(-o "Dir::Etc::sourceparts=$scratch/sources")
    ;;
esac

# Nothing that is installed here may start: the tests start what they need, themselves.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  guard=/usr/sbin/policy-rc.d
  printf '#!/bin/sh\nexit 101\n' >"$guard"
  chmod 755 "$guard"
fi
units=()
for unit in slurmctld slurmd munge ssh; do
  [ -e "/lib/systemd/system/$unit.service" ] || units+=("$unit.service")
done

say "installing ${packages[*]}"
begin=$SECONDS
status=0
if ! apt-get update "${options[@]}" >"$scratch/log" 2>&1; then
  # One unreachable source out of several need not matter.
  say "apt-get update: $(grep -m1 '^[EW]:' "$scratch/log" || tail -n 1 "$scratch/log")"
fi
if ! apt-get install -y --no-install-recommends "${options[@]}" "${packages[@]}" >"$scratch/log" 2>&1; then
  # One that cannot be had must not take the others along.
  for package in "${packages[@]}"; do
    apt-get install -y --no-install-recommends "${options[@]}" "$package" >"$scratch/log" 2>&1 || {
      say "cannot install $package: $(grep -m1 '^E:' "$scratch/log" || tail -n 1 "$scratch/log")"
      status=1
    }
  done
fi
if [ -d /run/systemd/system ]; then
  for unit in "${units[@]}"; do
    [ ! -e "/lib/systemd/system/$unit" ] || systemctl disable --quiet "$unit" || true
  done
fi
say "done in $((SECONDS - begin)) s"
[ "$status" = 0 ] || say "the tests that need what is missing are left out, and say so"
