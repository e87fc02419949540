#!/usr/bin/env bash
# Makes reports/chunk_options.csv, chunk_options.md and chunk_options.svg: PatrickStar's options, each
# alone and all together, for two models on one GPU and eight.
#
#   experiments/chunk_options.sh
#
# FRAGLAB names the program, by default target/release/fraglab. Needs bash and python3. The same
# files come out each time, byte for byte.
set -euo pipefail
cd "$(dirname "$0")/.."

fraglab=${FRAGLAB:-target/release/fraglab}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# No option but the chunk size: what every run begins from.
cat >"$scratch/job.toml" <<'TOML'
name = "chunk-options"
[model]
type = "bert"
preset = "GPT3_8B"
[train]
batch = 2
sequence = 1024
steps = 3
dtype = "fp16"
clip = false
[hardware]
gpu = "a100-40g"
host_memory = "1TiB"
gpus_per_host = 8
[options]
chunk_size = "288Mi"
use_hybrid_adam = false
with_async_mem_monitor = false
TOML

# What an option is set to; those that change what the program does come first.
options=(
    use_ckp=true
    with_activation_offload=true
    use_cpu_embedding=true
    with_tiling_linear=true
    with_mem_saving_com=true
    with_mem_cache=true
    use_hybrid_adam=true
    with_async_mem_monitor=true
    with_static_partition=true
    release_after_init=true
    warmup_gpu_chunk_mem_ratio=0.4
    overall_gpu_mem_ratio=0.95
    overall_cpu_mem_ratio=0.95
    margin_use_ratio=1.0
    use_fake_dist=true
    with_async_move=true
)
# Those that PatrickStar's scripts switch on together; the others are alternatives, or for debugging.
together=(
    use_ckp=true with_activation_offload=true use_cpu_embedding=true with_tiling_linear=true
    with_mem_saving_com=true with_mem_cache=true use_hybrid_adam=true
    with_async_mem_monitor=true release_after_init=true
)

# cell MODEL GPUS NAME KEY=VALUE...: a result file and a line in cells.tsv. Code 1, out of memory,
# is an answer.
cells=0
cell() {
    local model=$1 gpus=$2 name=$3 code=0 sets=()
    shift 3
    for option in "$@"; do sets+=(--set "options.$option"); done
    cells=$((cells + 1))
    "$fraglab" gen "$scratch/job.toml" --set "model.preset=$model" \
        --set "parallel.data=$gpus" "${sets[@]}" -o "$scratch/trace.json" >/dev/null 2>"$scratch/gen.errors" \
        || { cat "$scratch/gen.errors" >&2; return 2; }
    "$fraglab" run --quiet --trace "$scratch/trace.json" --alloc chunk \
        --json "$scratch/$cells.json" || code=$?
    [[ $code -le 1 ]] || return $code
    printf '%s\t%s\t%s\t%s\n' "$cells.json" "$model" "$gpus" "$name" >>"$scratch/cells.tsv"
}

for model in GPT3_8B GPT_DS_20B; do
    for gpus in 1 8; do
        cell $model $gpus none
        for option in "${options[@]}"; do
            name=${option%%=*}
            with=("$option")
            # Checkpoints are what is offloaded; moves overlap on one GPU only.
            [[ $name != with_activation_offload ]] || with+=(use_ckp=true)
            [[ $name != with_async_move || $gpus -eq 1 ]] || continue
            cell $model $gpus "$option" "${with[@]}"
        done
        cell $model $gpus together "${together[@]}"
        for option in "${together[@]}"; do
            without=()
            for other in "${together[@]}"; do
                [[ $other == "$option" ]] || without+=("$other")
            done
            [[ $option != use_ckp=true ]] || without=("${without[@]/with_activation_offload=true/}")
            cell $model $gpus "together without ${option%%=*}" ${without[*]}
        done
    done
done
python3 experiments/chunk_options.py results "$scratch" reports
python3 experiments/chunk_options.py pages reports
