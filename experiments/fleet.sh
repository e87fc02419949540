#!/usr/bin/env bash
# Makes reports/fleet.csv and reports/fleet.md: the traces of 10,000 ranks through `caching` and
# `expandable`, undisturbed in shards and killed five times on the way, with an identical result; and
# what follows for 10^10 events on a cluster.
#
#   experiments/fleet.sh
#
# FRAGLAB names the program, by default target/release/fraglab. FLEET_RANKS (10000), FLEET_KILLS (5)
# and FLEET_SHARDS (4) make it smaller. FLEET_DIR is where traces and results are made, by default the
# folder for temporary files; they are deleted at the end. Needs bash, python3 and 100 KB of disk a
# rank. Times are measured: run nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

FRAGLAB=$(realpath "${FRAGLAB:-target/release/fraglab}")
ranks=${FLEET_RANKS:-10000}
kills=${FLEET_KILLS:-5}
shards=${FLEET_SHARDS:-4}
mkdir -p "${FLEET_DIR:=${TMPDIR:-/tmp}}"
work=$(mktemp -d "$(realpath "$FLEET_DIR")/fleet.XXXXXX")
trap 'rm -rf "$work"' EXIT
traces=$work/ranks

free_kb=$(df --output=avail -k "$work" | tail -n 1)
need_kb=$((ranks * 100 + 500000))
if ((free_kb < need_kb)); then
    echo "$0: $FLEET_DIR has $((free_kb / 1000)) MB free, expected $((need_kb / 1000)): set FLEET_DIR to another folder" >&2
    exit 2
fi

# measure STEP COMMAND...: runs a command and notes time and memory of it.
measure() {
    local step=$1
    shift
    echo "$step" >&2
    python3 experiments/fleet.py measure "$work" "$step" "$@"
}

measure generate "$FRAGLAB" gen experiments/jobs/fleet.toml --ranks "$ranks" \
    -o "$traces/fleet.rank{rank}.json.zst"
cat >"$work/fleet.toml" <<TOML
name = "fleet"
traces = ["$traces/*.json.zst"]
allocators = ["caching", "expandable"]
[fleet]
TOML

for ((shard = 1; shard <= shards; shard++)); do
    measure "shard $shard" "$FRAGLAB" experiment "$work/fleet.toml" --shard "$shard/$shards" \
        -o "$work/shards" --cache "$work/cache-$shard"
done
measure merge "$FRAGLAB" experiment "$work/fleet.toml" --merge "$work/shards" -o "$work/merged"
echo "killed $kills times" >&2
python3 experiments/fleet.py kill "$work" "$kills" "$FRAGLAB" experiment "$work/fleet.toml" \
    -o "$work/resumed" --cache "$work/cache"

compared=0
for file in "$work"/merged/*; do
    cmp "$file" "$work/resumed/$(basename "$file")"
    compared=$((compared + 1))
done
((compared >= 2)) || { echo "$0: only $compared files were written" >&2; exit 1; }

python3 experiments/fleet.py results "$work" "$traces" "$shards" "$compared" reports
python3 experiments/fleet.py pages reports
