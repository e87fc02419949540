#!/usr/bin/env bash
# Makes reports/calibration.csv and calibration.md: generated traces of recorded jobs beside their
# recordings, both through PyTorch's caching allocator.
#
#   experiments/calibration.sh [RECORDINGS_DIR]
#
# RECORDINGS_DIR is by default ../shared/recordings beside the repository. FRAGLAB names the program,
# by default target/release/fraglab. Needs bash and python3. The same files come out each time, byte
# for byte.
set -euo pipefail
cd "$(dirname "$0")/.."

recordings=${1:-../shared/recordings}
fraglab=${FRAGLAB:-target/release/fraglab}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
shopt -s nullglob

found=0
for description in traces/models/*.toml; do
    job=$(basename "$description" .toml)
    recording=$recordings/$job.pickle.gz
    # The other descriptions are of jobs that nobody recorded.
    [[ -e $recording ]] || continue
    found=$((found + 1))
    "$fraglab" gen "$description" -o "$scratch/$job.json" >/dev/null 2>"$scratch/errors" \
        || { cat "$scratch/errors" >&2; exit 2; }
    for kind in generated recorded; do
        trace=$scratch/$job.json
        [[ $kind == generated ]] || trace=$recording
        "$fraglab" run --quiet --trace "$trace" --alloc caching --json "$scratch/$job.$kind.run" \
            --timeline "$scratch/$job.$kind.csv"
        "$fraglab" info --json "$trace" >"$scratch/$job.$kind.info"
    done
done
if [[ $found -eq 0 ]]; then
    echo "$0: no recordings of the jobs in traces/models in $recordings" >&2
    exit 2
fi
python3 experiments/calibration.py results "$scratch" reports
python3 experiments/calibration.py pages reports
