#!/usr/bin/env bash
# Measures speed and memory: reports/performance.csv and reports/performance.md.
#
#   experiments/performance.sh [PART]
#
# PART is replay, import, length, threads, cases, or all, which is the default; the rows of other parts
# stay as they are, and `page` makes the page alone. FRAGLAB names the program, by default
# target/release/fraglab; the benches `workloads` and `import` are built. RECORDINGS holds snapshots,
# by default ../shared/recordings; without it the rows that need them are left out. Needs python3.
# Takes about ten minutes on two cores that have nothing else to do; every clock differs from run to run.
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:-all}
fraglab=${FRAGLAB:-target/release/fraglab}
recordings=${RECORDINGS:-../shared/recordings}
if [[ ! -x $fraglab ]]; then
    echo "$0: no program at $fraglab: cargo build --release" >&2
    exit 2
fi

# bench NAME: its program, built.
bench() {
    cargo bench --no-default-features --features cli --bench "$1" --no-run --message-format json |
        sed -n '/"kind":\["bench"\]/s/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

workloads=- import=-
case $part in
    import | all) workloads=$(bench workloads) import=$(bench import) ;;
esac
python3 experiments/performance.py "$part" "$fraglab" "$workloads" "$import" "$recordings" reports
