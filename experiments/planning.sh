#!/usr/bin/env bash
# Makes reports/planning*.csv, reports/planned*.csv, reports/planning.md and reports/planned.md.
#
#   experiments/planning.sh [PART] [SHARED_DIR]
#
# PART is packing (planning*), allocators (planned*), or all, which is the default. SHARED_DIR holds
# recordings/ and data/minimalloc/, by default ../shared beside the repository. FRAGLAB names the
# program, by default target/release/fraglab. Needs bash and python3. Takes five CPU minutes
# on one thread; the same files come out each time, byte for byte, but for planning_times.csv and
# planned_times.csv, and what the pages take from them.
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:-all}
shared=${2:-../shared}
fraglab=${FRAGLAB:-target/release/fraglab}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
shopt -s nullglob
recordings=("$shared"/recordings/*.pickle.gz)
buffers=("$shared"/data/minimalloc/challenging/*.csv)
if [[ ${#recordings[@]} -eq 0 || ${#buffers[@]} -eq 0 ]]; then
    echo "$0: no recordings/ or no data/minimalloc/ in $shared" >&2
    exit 2
fi

# Joins arguments with commas.
list() { local IFS=,; echo "$*"; }

# timed COMMAND...: runs it; cpu_seconds is then what it took, user and system apart.
timed() {
    local TIMEFORMAT='%U %S' code=0
    { time "$@" 2>&3; } 3>&2 2>"$scratch/cpu" || code=$?
    cpu_seconds=$(<"$scratch/cpu")
    return $code
}

# The MiniMalloc files in bytes of this; D and J have a lower bound below it.
capacity=1048576

# pack SET STREAMS WORK RUNS ARGUMENT...: packs on one thread; a result file, and a line in
# packing.tsv. With RUNS above 1 the arguments name one file so often, and times are means.
results=0
pack() {
    local set=$1 streams=$2 work=$3 runs=$4
    shift 4
    results=$((results + 1))
    timed "$fraglab" plan --quiet --threads 1 --streams "$streams" --work "$work" \
        --json "$scratch/$results.json" "$@"
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' \
        "$results.json" "$set" "$streams" "$work" "$runs" "$cpu_seconds" >>"$scratch/packing.tsv"
}

# Work that no quick problem uses up; a minute of it takes about as much as 60 CPU seconds here.
ample=4500000000

packing() {
    local file shape size seed
    for file in "${buffers[@]}"; do
        local copies=()
        for _ in {1..20}; do copies+=("$file"); done
        pack minimalloc together $ample 20 --capacity $capacity "${copies[@]}"
        # Without being told the capacity D takes seconds and J a minute: one run.
        case $(basename "$file") in
            [DJ].*) pack minimalloc together $ample 1 "$file" ;;
            *) pack minimalloc together $ample 20 "${copies[@]}" ;;
        esac
    done
    # As much work as the targets allow: 0.5 CPU seconds at 1e5, 3 at 1e6, 60 at 1e7.
    for shape in dense moe thin; do
        for seed in 7 1 2; do
            for size in 1e4/40000000 1e5/40000000 1e6/250000000; do
                pack synthetic together "${size#*/}" 1 --synthetic "$shape:${size%/*},seed=$seed"
            done
        done
    done
    pack synthetic together 4000000000 1 --synthetic dense:1e7,seed=7
    # Ten times as much where a bound was not reached.
    pack synthetic together 400000000 1 --synthetic moe:1e5,seed=7
    for streams in together apart; do
        pack recording $streams 100000000 1 "${recordings[@]}"
    done
    pack recording together 100000000 1 --planner greedy-by-size "${recordings[@]}"
    python3 experiments/planning.py packing "$scratch" reports
}

# The device of the recorded jobs.
h200=150109880320

# compare NAME ALLOCATORS TRACE...: scratch/NAME.csv and scratch/NAME.json. STAlloc refuses some
# profiles: then the code is 2, that row is missing, and all others are there.
compare() {
    local name=$1 allocators=$2 code=0
    shift 2
    timed "$fraglab" compare --quiet --trace "$@" --alloc "$allocators" --capacity $h200 \
        --sort given -o "$scratch/$name.csv" --json "$scratch/$name.json" \
        2>"$scratch/$name.errors" || code=$?
    if [[ $code -ne 0 && ( $code -ne 2 || $allocators != *mode=stalloc* ) ]]; then
        cat "$scratch/$name.errors" >&2
        return $code
    fi
    printf '%s\t%s\n' "$name" "$cpu_seconds" >>"$scratch/compared.tsv"
}

# other NAME PROFILE: the recording NAME, planned from the whole recording PROFILE.
other() {
    local profile=$shared/recordings/$2.pickle.gz name="other.$1.$2"
    compare "$name" "$(list caching planned "planned+trace=$profile")" \
        "$shared/recordings/$1.pickle.gz"
}

allocators() {
    local jobs=() path
    for path in "${recordings[@]}"; do
        case $(basename "$path") in
            # No H200; no step, or not even one; a history in which no step begins.
            random.* | *oom40* | *overflow*) ;;
            *) jobs+=("$path") ;;
        esac
    done
    compare planned "$(list caching expandable best-fit stitch stitch+policy=best planned)" \
        "${jobs[@]}"
    compare stalloc "$(list caching planned+mode=stalloc{,+faithful=false})" "${jobs[@]}"
    other llama-1b-plain llama-1b-plain.expandable
    other llama-1b-plain.expandable llama-1b-plain
    other llama-1b-varlen llama-1b-plain
    other mixtral-moe mixtral-moe.expandable
    other mixtral-moe.expandable mixtral-moe
    other llama-1b-plain gpt2-small
    # What planning costs: the same replays with and without.
    for allocator in caching planned planned+mode=stalloc planned+mode=stalloc+faithful=false; do
        compare "time.$allocator" "$allocator" "${jobs[@]}"
    done
    python3 experiments/planning.py allocators "$scratch" reports
}

case $part in
    packing) packing ;;
    allocators) allocators ;;
    all)
        packing
        allocators
        ;;
    *) echo "$0: $part is no part: expected packing, allocators or all" >&2 && exit 2 ;;
esac
python3 experiments/planning.py pages reports
