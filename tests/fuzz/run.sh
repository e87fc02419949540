#!/usr/bin/env bash
# Builds and runs fuzz targets, two at a time, and prints a table.
#
#   ./run.sh                 every target but parquet, ten minutes each
#   ./run.sh 60 text native  these two, a minute each
#   ./run.sh 600 parquet     needs polars: a long build
#
# A crash does not end a target: it is kept in artifacts/TARGET and the next job begins. Needs
# cargo-fuzz and a nightly toolchain. FUZZ_JOBS says how many run at once, FUZZ_TOOLCHAIN which
# toolchain builds.
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:-600}
shift || true
[[ $seconds =~ ^[0-9]+$ ]] || { echo "usage: run.sh [SECONDS] [TARGET...]" >&2; exit 2; }
if (($# == 0)); then
    set -- $(ls fuzz_targets | sed 's/\.rs$//' | grep -v '^parquet$')
fi
toolchain=${FUZZ_TOOLCHAIN:-nightly}
triple=$(rustc "+$toolchain" -vV | sed -n 's/^host: //p')

# Nearly all code is safe Rust, so an address sanitizer has little to find and halves the speed. What
# allocates too much is caught by the limit in src/lib.rs, what overflows by the profile's checks.
build=(cargo "+$toolchain" fuzz build --fuzz-dir . --strip-dead-code --dev -s none)
for target; do
    [[ -f fuzz_targets/$target.rs ]] || { echo "run.sh: no target $target" >&2; exit 2; }
    if [[ $target == parquet ]]; then build+=(--features analytics); fi
done
"${build[@]}"

# The longest input of a target: enough for what its format needs, short enough to be fast.
max_len() {
    case $1 in
        snapshot | snapshot_notes | kineto | json) echo 12288 ;;
        container | experiment | native | parquet) echo 8192 ;;
        memory_text | text | stalloc | job | reports) echo 4096 ;;
        program) echo 485 ;;
        specification | settings) echo 512 ;;
        *) echo 2048 ;;
    esac
}

fuzz() {
    local target=$1 log=artifacts/$1.log program=artifacts/$1.program
    mkdir -p "corpus/$target" "artifacts/$target"
    # Its own name for the program, so that a build meanwhile does not put another in its place.
    ln -f "target/$triple/debug/$target" "$program"
    local dictionary=()
    if [[ -f dictionaries/$target.dict ]]; then dictionary=("-dict=dictionaries/$target.dict"); fi
    # In fork mode a job that dies is counted, not the end.
    local TIMEFORMAT='cpu %U'
    { time nice -n 10 "$program" \
        -fork=1 -ignore_crashes=1 -ignore_timeouts=1 -ignore_ooms=1 \
        "-max_total_time=$seconds" "-max_len=$(max_len "$target")" -timeout=10 -rss_limit_mb=2048 \
        "-artifact_prefix=artifacts/$target/" "${dictionary[@]}" \
        "corpus/$target" "seeds/$target"; } >"$log" 2>&1 || true
    rm "$program"
}
export -f fuzz max_len
export triple seconds
printf '%s\n' "$@" | xargs -P "${FUZZ_JOBS:-2}" -I{} bash -c 'fuzz {}'

kept() { find "artifacts/$1" -name "$2-*" | wc -l; }

printf '\n| target | executions | exec/s | CPU s | edges | features | corpus | crash/timeout/memory |\n'
printf '|---|---:|---:|---:|---:|---:|---:|---|\n'
for target; do
    log=artifacts/$target.log
    # "#N: cov: C ft: F corp: P exec/s: E oom/timeout/crash: O/T/C time: Ts job: J ..."
    last=$(grep -a -E '^#[0-9]+: cov:' "$log" | tail -n 1 || true)
    cpu=$(sed -n 's/^cpu //p' "$log" | tail -n 1)
    # The fuzzer does not count every input that it keeps.
    found=$(kept "$target" crash)/$(kept "$target" timeout)/$(kept "$target" oom)
    awk -v target="$target" -v cpu="${cpu:-?}" -v seconds="$seconds" -v found="$found" '{
        runs = $1; gsub(/[#:]/, "", runs)
        for (i = 2; i < NF; i++) value[$i] = $(i + 1)
        printf "| %s | %d | %d | %d | %d | %d | %d | %s |\n", target, runs, runs / seconds, cpu,
            value["cov:"], value["ft:"], value["corp:"], found
    }' <<<"${last:-#0: none}"
done
