#!/usr/bin/env bash
# Makes reports/stitching*.csv, reports/stitching.md and reports/gmlake.md.
#
#   experiments/stitching.sh [RECORDINGS_DIR]
#
# RECORDINGS_DIR holds the recordings, by default ../shared/recordings beside the repository; every
# one whose name lacks `expandable` is read. FRAGLAB names the program, by default
# target/release/fraglab. Needs bash and python3. Takes a minute on two cores; the same files come
# out each time, byte for byte.
set -euo pipefail
cd "$(dirname "$0")/.."

recordings=${1:-../shared/recordings}
fraglab=${FRAGLAB:-target/release/fraglab}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# Joins arguments with commas.
list() { local IFS=,; echo "$*"; }

# compare NAME ALLOCATORS TRACE...: scratch/NAME.csv and scratch/NAME.json
compare() {
    local name=$1 allocators=$2
    shift 2
    "$fraglab" compare --quiet --trace "$@" --alloc "$allocators" --capacity auto --sort given \
        -o "$scratch/$name.csv" --json "$scratch/$name.json"
}

all=() jobs=() strategies=()
shopt -s nullglob
for path in "$recordings"/*.pickle.gz; do
    name=$(basename "$path" .pickle.gz)
    [[ $name != *expandable* ]] || continue
    all+=("$path")
    # A job: PyTorch's default settings, no limit, the whole history, one rank.
    [[ ${name%.rank0} == *.* ]] || jobs+=("$path")
    [[ $name != deepspeed-opt-1-3b-* ]] || strategies+=("$path")
done
if [[ ${#strategies[@]} -eq 0 ]]; then
    echo "$0: no recordings in $recordings" >&2
    exit 2
fi

policies=(stitch+policy=paper stitch+policy=shipped stitch+policy=best)
compare stitching "$(list native caching expandable best-fit "${policies[@]}")" "${all[@]}"

few=(caching stitch+policy=paper+frag_limit=32MiB
    stitch+policy=shipped+frag_limit=32MiB{,+re_alloc=true}
    stitch+policy=shipped+frag_limit=128MiB+re_alloc=true)
compare stitching_limits "$(list "${few[@]}")" "${jobs[@]}"

many=(caching expandable best-fit stitch+policy=best
    stitch+policy=paper+frag_limit={2,32,128,512}MiB
    stitch+policy=shipped+frag_limit={2,32,128,256,512}MiB+re_alloc={false,true})
compare stitching_strategies "$(list "${many[@]}")" "${strategies[@]}"

python3 experiments/stitching.py "$scratch" reports
