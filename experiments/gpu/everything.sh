#!/usr/bin/env bash
# Everything that fraglab claims about a real GPU, measured: one call a stage.
#
#   experiments/gpu/everything.sh kit [KIT]    at home: builds what a machine with a GPU needs
#   experiments/gpu/everything.sh STAGE [KIT]  there: smoke, calibrate, touch, crash, timing,
#                                              replay (touch, crash, timing), train, lora, oom
#   experiments/gpu/results.py RESULTS reports    then: the CSV files of all stages
#   experiments/gpu/report.py reports             and gpu.md
#
# KIT (target/gpu-kit) holds the program, libfraglab.so, fraglab_torch.py and recordings; wheels
# in it are installed where they are missing; profile.json, if it is there, is the cost profile.
# Results go to $OUT (target/gpu): STAGE.tar.gz, written anew after every part, so that a stage that
# is cut off leaves what it had. A part that fails is noted in parts.csv and the rest goes on.
# GPU_STAGE_SECONDS (510) is when a stage begins nothing more, GPU_TRACES which traces are replayed,
# GPU_REPEATS (3) how often for the times. Needs bash, python3 with torch, transformers and peft,
# and for one part compute-sanitizer.
set -uo pipefail
cd "$(dirname "$0")/../.."

stage=${1:?stage: kit, smoke, calibrate, touch, crash, timing, replay, train, lora, oom}
kit=$(realpath -m "${2:-target/gpu-kit}")
out=$(realpath -m "${OUT:-target/gpu}")
budget=${GPU_STAGE_SECONDS:-510}
work=$(mktemp -d)
results=$work/$stage
fraglab=$kit/fraglab
mkdir -p "$results"
trap 'rm -rf "$work"' EXIT

# Every registered allocator, with the published variants. STAlloc's way of planning needs three
# steps, and a run of several is refused whole: it gets a trace of its own.
online=native,caching,expandable,best-fit,first-fit,bfc
online+=,stitch,stitch+policy=shipped,stitch+policy=best
every=$online,planned
stalloc=planned+mode=stalloc
chunk=chunk,chunk+inner=stitch

# What there is so far becomes $out/STAGE.tar.gz.
pack() {
    local file=$work/pack-$BASHPID.tar.gz
    tar -czf "$file" -C "$work" "$stage" 2>/dev/null
    [[ -e $file ]] && mv "$file" "$out/$stage.tar.gz"
}

# A file name for the name of an allocator.
plain() { tr -c 'A-Za-z0-9.\n-' '-' <<<"$1"; }

# part NAME SECONDS COMMAND...: runs it with a limit; NAME.log is what it printed, and parts.csv has
# its exit status (124: out of time; "skipped": too late to begin) and its time. Never fails.
part() {
    local name=$1 limit=$2 start=$SECONDS status left=$((budget - SECONDS))
    shift 2
    if ((left < 5)); then
        status=skipped
    else
        timeout -k 5 $((limit < left ? limit : left)) "$@" >"$results/$name.log" 2>&1
        status=$?
    fi
    printf '%s,%s,%s\n' "$name" "$status" $((SECONDS - start)) >>"$results/parts.csv"
    printf '%(%H:%M:%S)T %4ss  %-34s %s, %ss\n' -1 "$SECONDS" "$name" "$status" $((SECONDS - start))
    local lines=4
    [[ $status == 0 ]] && lines=1
    [[ $status == skipped ]] || tail -n $lines "$results/$name.log" | cut -c -300
}

# Replays of a trace on the card by some allocators: NAME.json. Where there is no result of all of
# them, each has another go, alone: NAME-ALLOCATOR.json.
replay() {
    local name=$1 seconds=$2 trace=$3 specs=$4 spec
    shift 4
    [[ -e $kit/profile.json ]] && set -- --profile "$kit/profile.json" "$@"
    set -- "$fraglab" run --quiet --device cuda:0 --trace "$trace" "$@"
    part "$name" "$seconds" "$@" --alloc "$specs" --json "$results/$name.json"
    if [[ ! -e $results/$name.json && $specs == *,* ]]; then
        for spec in ${specs//,/ }; do
            part "$name-$(plain "$spec")" 40 "$@" --alloc "$spec" \
                --json "$results/$name-$(plain "$spec").json"
        done
    fi
    pack
}

# One training run: NAME.json. The last --job given counts. In the background, the runs go two at a
# time: one imports its libraries while the other has the GPU, which they hand on by a lock.
trainer=(python3 experiments/gpu/train.py --job llama-1b-varlen-recompute)
train() {
    local name=$1 seconds=$2 allocator=$3
    shift 3
    part "$name" "$seconds" "${trainer[@]}" --allocator "$allocator" \
        --out "$results/$name.json" "$@"
    pack
}
train_overlapped() {
    while (($(jobs -rp | wc -l) >= 2)); do wait -n; done
    pack
    train "$@" --lock "$work/lock" &
}

versions() {
    {
        date -u +%Y-%m-%d
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
        "$fraglab" --version
        python3 -c 'import torch, transformers; print(torch.__version__, transformers.__version__)'
        compute-sanitizer --version | tail -n 1
    } >"$results/versions.txt" 2>&1
    cat "$results/versions.txt"
}

python_setup() {
    export PYTHONPATH=$kit:$work/site${PYTHONPATH:+:$PYTHONPATH}
    export FRAGLAB=$fraglab FRAGLAB_LIB=$kit/libfraglab.so TOKENIZERS_PARALLELISM=false
    local wheels=("$kit"/*.whl)
    local there='import importlib.util, sys; sys.exit(importlib.util.find_spec("peft") is None)'
    if [[ -e ${wheels[0]} ]] && ! python3 -c "$there"; then
        python3 -m pip install -q --no-index --no-deps --target "$work/site" "${wheels[@]}"
    fi
}

kit() {
    set -e
    cargo build --release
    cargo rustc --release --lib --no-default-features --features plugin --crate-type cdylib \
        --target-dir target/plugin
    mkdir -p "$kit/recordings"
    cp target/release/fraglab target/plugin/release/libfraglab.so "$kit"
    strip "$kit/fraglab" "$kit/libfraglab.so"
    "$fraglab" python -o "$kit/fraglab_torch.py"
    local name
    for name in tiny gpt2-small streams-offload deepspeed-opt-1-3b-LR.rank0; do
        cp "../shared/recordings/$name".{pickle.gz,truth.json} "$kit/recordings"
    done
    ls -l "$kit"
}

smoke() {
    local name allocator
    for name in hand-best-fit hand-rounding hand-deferred-free hand-stitch-scattered; do
        replay "touch-$name" 60 "traces/cases/$name.txt" "$online" --touch full
    done
    replay touch-tiny 60 "$kit/recordings/tiny.pickle.gz" "$online,planned" --touch full
    for allocator in default plugin:caching plugin:stitch; do
        train "train-$(plain "$allocator")" 90 "$allocator" --tiny
    done
    for allocator in default plugin:caching; do
        train "oom-$(plain "$allocator")" 90 "$allocator" --job oom --tiny --limit 2
    done
    train record 90 default --tiny --record "$results/recorded-tiny.pickle.gz"
    part verify 60 "$fraglab" verify "$results/recorded-tiny.pickle.gz"
}

calibrate() {
    part calibrate 300 "$fraglab" calibrate --device cuda:0 --csv "$results/calibrate.csv" \
        -o "$results/profile.json"
    part calibrated 30 "$fraglab" calibrate --show "$results/profile.json"
}

# The traces that every allocator replays: those that ship, and two with deferred frees; else GPU_TRACES.
replayed() {
    ls ${GPU_TRACES:-traces/*.json.zst "$kit"/recordings/streams-offload.pickle.gz \
        "$kit"/recordings/deepspeed-opt-1-3b-LR.rank0.pickle.gz}
}

stem() { basename "$1" | sed -E 's/\.(json|pickle|txt)(\.zst|\.gz)?$//'; }

touch_all() {
    local trace
    for trace in $(replayed); do
        replay "touch-$(stem "$trace")" 150 "$trace" "$every" --touch full
    done
    replay touch-stalloc-llama-1b-varlen 60 traces/llama-1b-varlen.json.zst "$stalloc" --touch full
    chunks
    replay touch-llama-1b-chunks 60 "$work/llama-1b-chunks.json" "$chunk" --touch full
}

timing() {
    local trace repeat
    for ((repeat = 1; repeat <= ${GPU_REPEATS:-3}; repeat++)); do
        for trace in $(replayed); do
            replay "timing-$repeat-$(stem "$trace")" 100 "$trace" "$every"
        done
        replay "timing-$repeat-stalloc-llama-1b-varlen" 60 traces/llama-1b-varlen.json.zst "$stalloc"
        chunks
        replay "timing-$repeat-llama-1b-chunks" 60 "$work/llama-1b-chunks.json" "$chunk"
    done
}

chunks() {
    local trace=$work/llama-1b-chunks.json
    [[ -e $trace ]] && return
    part generate 30 "$fraglab" gen experiments/jobs/llama-1b-chunks.toml -o "$trace"
}

# What is left on the card after a process that holds tens of GiB was stopped or killed.
crash() {
    local signal trace=traces/llama-7b-lora.json.zst
    for signal in INT KILL; do
        part "crash-run-$signal" 60 python3 experiments/gpu/crash.py --signal "$signal" \
            --out "$results/crash-run-$signal.json" -- "$fraglab" run --device cuda:0 --quiet \
            --pace recorded --trace "$trace" --alloc stitch,expandable,caching
        part "crash-plugin-$signal" 90 python3 experiments/gpu/crash.py --signal "$signal" \
            --out "$results/crash-plugin-$signal.json" -- "${trainer[@]}" \
            --allocator plugin:stitch --steps 200
    done
    local tiny=$kit/recordings/tiny.pickle.gz
    part sanitizer 150 compute-sanitizer --tool memcheck --leak-check full --error-exitcode 99 \
        "$fraglab" run --quiet --device cuda:0 --trace "$tiny" --touch full \
        --alloc caching,expandable,best-fit,stitch,planned --json "$results/sanitizer.json"
    pack
}

replay_all() {
    touch_all
    crash
    timing
}

# A job under PyTorch's own allocator and ours. First the recording, which is also the profile of
# `planned`; at the end what the simulator makes of that recording, for each.
job() {
    local job=$1 seconds=$2 recorded=$results/recorded.$3 profile=$results/profile.json.zst
    local allocator simulated=caching,expandable,stitch,stitch+policy=best,best-fit
    train train-recording "$seconds" default --job "$job" --record "$recorded"
    part verify 60 "$fraglab" verify "$recorded"
    part convert 60 "$fraglab" convert "$recorded" "$profile"
    pack
    for allocator in default plugin:caching expandable plugin:expandable plugin:stitch \
        plugin:stitch+policy=best plugin:best-fit; do
        train_overlapped "train-$(plain "$allocator")" "$seconds" "$allocator" --job "$job"
    done
    local planned=(plugin:planned --job "$job" --profile "$profile")
    train_overlapped train-plugin-planned "$seconds" "${planned[@]}"
    # The same profile under other lengths: what a plan is worth when the batches differ.
    train_overlapped train-plugin-planned-other "$seconds" "${planned[@]}" --seed 2
    part predict 120 "$fraglab" run --quiet --trace "$profile" --json "$results/predict.json" \
        --alloc "$simulated,planned+trace=$profile"
    wait
    pack
}

oom() {
    local allocator
    for allocator in default plugin:caching plugin:stitch plugin:expandable; do
        train_overlapped "oom-$(plain "$allocator")" 90 "$allocator" --job oom --limit 24
    done
    for allocator in default plugin:caching plugin:stitch plugin:expandable; do
        train_overlapped "streams-$(plain "$allocator")" 60 "$allocator" --job streams
        train_overlapped "graph-$(plain "$allocator")" 60 "$allocator" --job graph
    done
    wait
    train_overlapped trace 90 plugin:caching --job llama-1b-varlen-recompute --tiny \
        --trace "$results/recorded.json.zst"
    wait
    part trace-run 60 "$fraglab" run --quiet --trace "$results/recorded.json.zst" --alloc caching \
        --json "$results/trace-run.json"
}

case $stage in
    kit) kit ;;
    smoke | calibrate | touch | crash | timing | replay | train | lora | oom)
        [[ -x $fraglab ]] || { echo "$0: no $fraglab: make it with '$0 kit'" >&2; exit 2; }
        mkdir -p "$out"
        trap 'pack; rm -rf "$work"' EXIT
        python_setup
        versions
        case $stage in
            touch) touch_all ;;
            replay) replay_all ;;
            train) job llama-1b-varlen-recompute 120 pickle.gz ;;
            lora) job llama-3b-lora-recompute 120 json.zst ;;
            *) "$stage" ;;
        esac
        ;;
    *) echo "$0: no stage $stage" >&2; exit 2 ;;
esac
