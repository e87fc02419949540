#!/usr/bin/env bash
# Counts the instructions of benches/workloads.rs and compares them with benches/instructions.csv.
#
#   experiments/callgrind.sh            exit 1 if a workload takes more than it may
#   experiments/callgrind.sh --update   writes benches/instructions.csv anew
#
# A clock says something else in every run; a count is the same within a thousandth or so, on any
# machine whose processor has the same extensions. It hangs on the compiler: under another release of
# rustc than that in the file the comparison is told, and nothing fails. Fewer instructions never
# fail; they are told, so that somebody updates the file. Needs valgrind; without it, says so and
# exits 0. WORKLOADS names the built bench, which is built otherwise. A minute or two on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

committed=benches/instructions.csv
# Percent above the committed count that a workload may take.
tolerance=5
case ${1:-} in
    '' | --update) ;;
    *) echo "$0: expected --update or nothing, not $1" >&2 && exit 2 ;;
esac
if ! command -v valgrind >/dev/null; then
    echo "$0: no valgrind here (apt-get install valgrind): instructions are not compared" >&2
    exit 0
fi

# The bench's program: the last line of cargo's messages that names one.
built() {
    cargo bench --no-default-features --features cli --bench workloads --no-run \
        --message-format json | sed -n 's/.*"executable":"\([^"]*workloads[^"]*\)".*/\1/p' | tail -n 1
}

workloads=${WORKLOADS:-$(built)}
rustc=$(rustc --version | cut -d ' ' -f 2)
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# count NAME: a line NAME,INSTRUCTIONS in a file of its own.
count() {
    local out="$scratch/${1//\//.}"
    valgrind --tool=callgrind --collect-atstart=no '--toggle-collect=workloads::measured*' \
        --callgrind-out-file="$out.callgrind" "$workloads" "$1" >"$out.log" 2>&1 ||
        { cat "$out.log" >&2 && return 1; }
    printf '%s,%s\n' "$1" "$(sed -n 's/^\(totals\|summary\): //p' "$out.callgrind" | tail -n 1)" \
        >"$out.csv"
}

# One thread each, two at a time: counts do not hang on the clock.
export -f count
export scratch workloads
"$workloads" >"$scratch/names"
xargs -P "$(nproc)" -I '{}' bash -euc 'count "$1"' - '{}' <"$scratch/names"

{
    echo "workload,instructions,rustc"
    while read -r name; do
        echo "$(<"$scratch/${name//\//.}.csv"),$rustc"
    done <"$scratch/names"
} >"$scratch/counted"

if [[ ${1:-} == --update ]]; then
    cp "$scratch/counted" "$committed"
    cat "$committed"
    exit
fi

awk -F , -v tolerance=$tolerance '
    FNR == 1 { next }
    NR == FNR { before[$1] = $2; compiler = $3; next }
    !($1 in before) {
        printf "%-36s %12d  not in the file: run with --update\n", $1, $2
        worse = 1
        next
    }
    {
        change = 100 * ($2 / before[$1] - 1)
        word = ""
        if (change > tolerance) { word = "MORE than " tolerance " %"; worse = 1 }
        if (change < -tolerance) word = "fewer: run with --update"
        printf "%-36s %12d %+7.2f %%  %s\n", $1, $2, change, word
        same_compiler = compiler == $3
        now = $3
        seen[$1] = 1
    }
    END {
        for (name in before) if (!(name in seen)) {
            print name " is in the file and no workload"
            worse = 1
        }
        if (!same_compiler) {
            print "counted with rustc " compiler ", here it is " now ": nothing is decided"
            exit 0
        }
        exit worse
    }' "$committed" "$scratch/counted"
