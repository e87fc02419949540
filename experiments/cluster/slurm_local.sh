#!/usr/bin/env bash
# Starts a whole Slurm on this machine alone, for slurm_test.sh and for trying the scripts here:
# munged, slurmctld and slurmd on the loopback interface, without systemd, with everything that they
# write in one folder.
#
#   sudo ./slurm_local.sh start DIR     # then: export SLURM_CONF=DIR/slurm.conf; sinfo
#   sudo ./slurm_local.sh stop DIR
#
# Needs root on Debian or Ubuntu. The packages slurm-wlm and munge are installed if they are missing;
# their own configuration in /etc is neither read nor changed. DIR is made, and left as it is by
# `stop`, with the logs.
set -euo pipefail

usage() {
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    exit 2
}

[[ $# -eq 2 && ($1 == start || $1 == stop) ]] || usage
action=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)

fail() {
    echo "$0: $*" >&2
    exit 2
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
    local seconds=$1 what=$2 end=$((SECONDS + $1))
    shift 2
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || fail "$what did not come up within $seconds s: see the logs in $dir"
        sleep 0.2
    done
}

install_packages() {
    local missing=()
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null || missing+=(slurm-wlm)
    command -v munged >/dev/null || missing+=(munge)
    [[ ${#missing[@]} -gt 0 ]] || return 0
    # A package that starts its daemon when it is installed would run a second one.
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# The key is made here and guards nothing but this folder's daemons.
start_munge() {
    mkdir -p "$dir/munge"
    dd if=/dev/urandom of="$dir/munge/key" bs=1024 count=1 status=none
    chmod 600 "$dir/munge/key"
    chmod 755 "$dir" "$dir/munge"
    munged --force --num-threads=2 --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
        --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
}

# A port that nothing listens on, from the one given on.
free_port() {
    local port=$1
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    echo "$port"
}

write_configuration() {
    local cores memory_mib controller node
    cores=$(nproc)
    memory_mib=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
    controller=$(free_port 16817)
    node=$(free_port $((controller + 1)))
    mkdir -p "$dir/state" "$dir/spool"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$controller
SlurmdPort=$node
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that was requeued starts again when its old credential has expired: by default after two
# minutes, here after some seconds.
AuthInfo=socket=$dir/munge/socket,cred_expire=8
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
# No control groups: they belong to whoever runs this machine, or this container.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5
# Jobs that are done can be asked about for so many seconds.
MinJobAge=300
KillWait=5
ReturnToService=2
JobRequeue=1
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory_mib State=UNKNOWN
PartitionName=local Nodes=localhost Default=YES MaxTime=INFINITE State=UP
CONF
}

is_idle() {
    [[ $(sinfo --noheader --format=%t) == idle ]]
}

start() {
    [[ $EUID -eq 0 ]] || fail "needs root: slurmd starts jobs for their users"
    [[ ! -e $dir/slurmctld.pid ]] || fail "$dir/slurmctld.pid is there: stop what runs there first"
    install_packages
    start_munge
    wait_for 10 munged munge --socket="$dir/munge/socket" --no-input
    write_configuration
    export SLURM_CONF=$dir/slurm.conf
    slurmctld -c -f "$SLURM_CONF"
    wait_for 20 slurmctld scontrol ping
    slurmd -N localhost -f "$SLURM_CONF"
    wait_for 30 slurmd is_idle
    echo "Slurm $(slurmctld -V | cut -d' ' -f2) runs: export SLURM_CONF=$SLURM_CONF"
}

# runs PID NAME: whether the process is there, is that program and has not ended.
runs() {
    [[ $1 =~ ^[0-9]+$ && $(cat "/proc/$1/comm" 2>/dev/null) == "$2" ]] \
        && ! grep -q '^State:[[:space:]]*Z' "/proc/$1/status"
}

# stop_daemon PIDFILE NAME: ends the process of a pid file, if it is still that program.
stop_daemon() {
    local pid
    [[ -e $1 ]] || return 0
    pid=$(<"$1")
    if runs "$pid" "$2"; then
        kill "$pid" 2>/dev/null || true
        for _ in {1..50}; do
            runs "$pid" "$2" || break
            sleep 0.1
        done
    fi
    rm -f "$1"
}

stop() {
    stop_daemon "$dir/slurmd.pid" slurmd
    stop_daemon "$dir/slurmctld.pid" slurmctld
    stop_daemon "$dir/munge/pid" munged
}

"$action"
