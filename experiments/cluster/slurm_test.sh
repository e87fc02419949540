#!/usr/bin/env bash
# Runs slurm.sbatch, slurm_merge.sbatch and submit.sh in a real Slurm, which slurm_local.sh starts on
# this machine, and hurts them on the way: one task's fraglab is killed with SIGKILL, another task is
# requeued while it works. The merged files must be those of a run without Slurm, byte for byte, and
# no cell may be done twice. Writes what happened when into reports/cluster.md.
#
#   sudo experiments/cluster/slurm_test.sh [DIR]
#
# DIR is a folder for everything, by default a temporary one that goes away if all is well. FRAGLAB
# names the program, by default target/release/fraglab. Needs root, and bash, awk, diff.
set -euo pipefail
cd "$(dirname "$0")/../.."

here=experiments/cluster
FRAGLAB=$(realpath "${FRAGLAB:-target/release/fraglab}")
export FRAGLAB
if [[ $# -gt 0 ]]; then
    mkdir -p "$1"
    dir=$(realpath "$1")
    is_temporary=
else
    dir=$(mktemp -d)
    is_temporary=1
fi
out=$dir/out
shards=4
events=$dir/events

finish() {
    local code=$?
    "$here/slurm_local.sh" stop "$dir/slurm"
    if [[ $code -eq 0 && $is_temporary ]]; then
        rm -r "$dir"
    elif [[ $code -ne 0 ]]; then
        echo "$0: failed; everything is in $dir" >&2
    fi
}
trap finish EXIT

fail() {
    echo "$0: $*" >&2
    exit 1
}

# note TEXT: a line of the report, with the time.
note() {
    printf '| %s | %s |\n' "$(date +%H:%M:%S)" "$*" | tee -a "$events"
}

# Cells that a shard has finished, as lines of its kept results; a torn line is none.
kept() {
    grep -hs '^{.*}$' "$out/cache-of-$shards/$1"/*.jsonl || true
}

# fraglab_of SHARD: the process of the shard's task; nothing if none runs.
fraglab_of() {
    local process
    for process in /proc/[0-9]*; do
        [[ $(cat "$process/comm" 2>/dev/null) == fraglab ]] || continue
        if tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -qx "SLURM_ARRAY_TASK_ID=$1"; then
            echo "${process#/proc/}"
        fi
    done
}

# in_the_middle SHARD: waits until the shard has finished some cells and works on others.
in_the_middle() {
    local deadline=$((SECONDS + 180))
    until [[ $(kept "$1" | wc -l) -ge 2 && -n $(fraglab_of "$1") ]]; do
        ((SECONDS < deadline)) || fail "shard $1 was never in the middle of its work"
        sleep 0.05
    done
}

# state JOB: as Slurm has it.
state() {
    scontrol show job "$1" 2>/dev/null | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1
}

description() {
    cat >"$dir/job.toml" <<'TOML'
name = "slurm-test"
[model]
type = "llama"
layers = 4
hidden = 512
[train]
sequence = 2048
steps = 60
[lengths]
min = 64
TOML
    "$FRAGLAB" gen "$dir/job.toml" --ranks 24 -o "$dir/ranks/r{rank}.json.zst" >/dev/null
    # A search for the smallest device makes a cell many replays, so that tasks last some seconds.
    cat >"$dir/slurm-test.toml" <<'TOML'
name = "slurm-test"
title = "A test of the scripts for Slurm"
traces = ["ranks/*.json.zst"]
allocators = ["caching", "expandable", "stitch"]
smallest_capacity = true
[[figure]]
name = "reserved"
title = "Reserved peak"
kind = "bars"
x = "trace"
y = "reserved_bytes_peak"
group = "allocator"
TOML
}

# The first attempt at each task is hurt as soon as it is in the middle of its work.
hurt() {
    local array=$1 pid
    in_the_middle 2
    pid=$(fraglab_of 2)
    kill -9 "$pid"
    kept 2 >"$dir/kept-2"
    note "\`kill -9\` of the fraglab of task 2, which had finished $(wc -l <"$dir/kept-2") of 18 cells"
    in_the_middle 3
    scontrol requeue "${array}_3"
    while [[ -n $(fraglab_of 3) ]]; do sleep 0.05; done
    kept 3 >"$dir/kept-3"
    note "\`scontrol requeue\` of task 3, which had finished $(wc -l <"$dir/kept-3") of 18 cells"
}

# went_on SHARD JOB: whether the task ran twice, went on from what it had, and did no cell twice.
went_on() {
    local log=$dir/fraglab-$2-$1.log lines again
    lines=$(wc -l <"$dir/kept-$1")
    grep -q "shard $1 of $shards on .*, restart 1$" "$log" || fail "task $1 was not requeued: $log"
    kept "$1" | head -n "$lines" | cmp -s - "$dir/kept-$1" || fail "task $1 lost finished cells"
    [[ $(kept "$1" | wc -l) -eq 18 ]] || fail "task $1 finished a cell twice"
    again=$(sed -n 's/.* \([0-9]*\) of them kept from before.*/\1/p' "$log" | tail -n 1)
    [[ $again -eq $lines ]] || fail "task $1 took up $again cells, not $lines"
    note "task $1 had a second run, which took up $again cells and did the other $((18 - again))"
}

report() {
    local version
    version=$(slurmctld -V | cut -d' ' -f2)
    cat <<MD
# The scripts for Slurm, in a real Slurm

Made by \`experiments/cluster/slurm_test.sh\` on $(date +%Y-%m-%d) with Slurm $version on one node of $(nproc) cores: slurmctld, slurmd and
munged of Debian on the loopback interface, as \`experiments/cluster/slurm_local.sh\` starts them. 24 generated traces through 3 allocators, 72 cells, in 4 shards:
\`experiments/cluster/submit.sh 4 OUT slurm-test.toml\`.

| time | what happened |
|---|---|
$(cat "$events")

What was checked: both tasks were requeued and ran a second time; the second run took up what the first had finished, of which nothing was lost; no cell was done twice;
the merge began when all shards were there; its files are those of \`fraglab experiment slurm-test.toml\` without Slurm, byte for byte.

What this is not: one node, so no storage over a network, no node that fails and no preemption by other jobs. Slurm treats these as the requeue that was tested here.
MD
}

rm -rf "$out" "$events"
"$here/slurm_local.sh" start "$dir/slurm"
export SLURM_CONF=$dir/slurm/slurm.conf
description
# Small tasks, as many at a time as the node has cores; their logs lie in the folder.
export SBATCH_MEM_PER_NODE=512M
submitted=$(cd "$dir" && "$OLDPWD/$here/submit.sh" "$shards" "$out" slurm-test.toml)
note "submitted: $submitted"
array=${submitted#array }
array=${array%%,*}
merge=${submitted##* }
hurt "$array"
deadline=$((SECONDS + 600))
while [[ -n $(squeue --noheader --jobs="$array,$merge" 2>/dev/null) ]]; do
    ((SECONDS < deadline)) || fail "not done after ten minutes: $(squeue)"
    sleep 0.5
done
[[ $(state "$merge") == COMPLETED ]] || fail "the merge is $(state "$merge"): $dir/fraglab-merge-$merge.log"
went_on 2 "$array"
went_on 3 "$array"
# With the same name of the description, which the report quotes.
(cd "$dir" && "$FRAGLAB" experiment slurm-test.toml -o alone --fresh --quiet)
compared=()
for file in "$dir"/alone/*; do
    cmp "$file" "$out/$(basename "$file")" || fail "$(basename "$file") is not what one run gives"
    compared+=("$(basename "$file")")
done
[[ ${#compared[@]} -ge 3 ]] || fail "only ${#compared[@]} files were written"
note "merged; the same as of one run without Slurm, byte for byte: ${compared[*]}"
report >reports/cluster.md
echo "wrote reports/cluster.md"
