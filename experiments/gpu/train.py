#!/usr/bin/env python3
"""One training job under one allocator: what it held, what it took, and its losses to the bit.

    train.py --job llama-1b-varlen-recompute --allocator plugin:stitch --out stitch.json
    train.py --job llama-1b-varlen-recompute --record varlen.pickle.gz --out default.json
    train.py --job llama-1b-varlen-recompute --tiny --cpu      # no GPU: does it run?

Jobs, each in a process of its own, since PyTorch's allocator cannot be changed once it is in use:

    llama-1b-varlen-recompute   every batch has its own length, every layer recomputes
    llama-3b-lora-recompute     the same with LoRA on a frozen model of three billion parameters
    oom      a step too large for the limit fails; it is caught, and smaller steps train on
    streams  memory that another stream still reads is freed; a control shows what it would cost
    graph    a captured CUDA graph is replayed while other tensors come and go

Allocators: `default` and `expandable` are PyTorch's own; `plugin:SPEC` is fraglab's library with
SPEC as on the command line. Weights, tokens and lengths come from seeds and every operation is
deterministic, so that losses (as hex floats in the JSON) and the sum of the trained weights' bits
are the same under any allocator, unless some tensor did not hold what was written to it.

Needs torch, transformers, peft, and fraglab_torch.py (`fraglab python > fraglab_torch.py`).
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

JOBS = ["llama-1b-varlen-recompute", "llama-3b-lora-recompute", "oom", "streams", "graph"]
SHAPES = {
    "tiny": {"hidden": 256, "ffn": 688, "layers": 2, "heads": 4},
    "1b": {"hidden": 2048, "ffn": 5504, "layers": 24, "heads": 16},
    "3b": {"hidden": 3200, "ffn": 8640, "layers": 26, "heads": 32},
}
VOCABULARY = 32000
# Batches of this many tokens at most, of sequences of these lengths.
TOKENS = 16384
LENGTHS = (256, 4096)
UNTIMED_STEPS = 3
GIB = 2**30


def options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--allocator", default="default", help="default, expandable, plugin:SPEC")
    parser.add_argument("--out", default="/dev/stdout", help="where the result goes, as JSON")
    parser.add_argument("--record", help="keep PyTorch's history of the run in this file")
    parser.add_argument("--profile", help="a trace that is the profile of plugin:planned")
    parser.add_argument("--trace", help="let the plug-in record a native trace in this file")
    parser.add_argument("--limit", type=float, help="job oom: most GiB that may be held")
    parser.add_argument("--steps", type=int, default=UNTIMED_STEPS + 12)
    parser.add_argument("--seed", type=int, default=1, help="of lengths and tokens")
    parser.add_argument("--lock", help="wait for this file's lock before the GPU is touched")
    parser.add_argument("--tiny", action="store_true", help="two layers, short batches")
    parser.add_argument("--cpu", action="store_true", help="no GPU: only whether the job runs")
    chosen = parser.parse_args()
    if chosen.cpu and (chosen.job not in JOBS[:2] or chosen.allocator != "default"):
        parser.error("--cpu: the two training jobs under the default allocator only")
    if chosen.record and chosen.allocator.startswith("plugin:"):
        parser.error("--record keeps PyTorch's own history; with a plug-in use --trace")
    return chosen


# PyTorch reads these when it starts.
OPTIONS = options()
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
if OPTIONS.allocator == "expandable":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
else:
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    os.environ.pop("PYTORCH_ALLOC_CONF", None)

import torch  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402

import fraglab_torch  # noqa: E402

# Integers as wide as a weight: sums of those are exact.
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
DEVICE = torch.device("cpu" if OPTIONS.cpu else "cuda")


def say(text):
    print(f"{datetime.datetime.now():%H:%M:%S} {OPTIONS.allocator}: {text}", flush=True)


def synchronize():
    if not OPTIONS.cpu:
        torch.cuda.synchronize()


# ---------------------------------------------------------------- models and steps


def model_of(shape, recompute, lora):
    """A Llama of this shape in bf16 with seeded random weights, made where it will live."""
    config = transformers.LlamaConfig(
        hidden_size=SHAPES[shape]["hidden"],
        intermediate_size=SHAPES[shape]["ffn"],
        num_hidden_layers=SHAPES[shape]["layers"],
        num_attention_heads=SHAPES[shape]["heads"],
        num_key_value_heads=SHAPES[shape]["heads"],
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTHS[1],
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if lora:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        settings = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
        model = get_peft_model(model, settings)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def batches(steps, seed):
    """The shapes of these steps' batches: about as many tokens each, at a length of its own."""
    draw = random.Random(seed)
    tokens, (shortest, longest) = (512, (16, 128)) if OPTIONS.tiny else (TOKENS, LENGTHS)
    lengths = [draw.randint(shortest, longest) for _ in range(steps)]
    return [(max(1, tokens // length), length) for length in lengths]


def train_step(step, model, optimizer, shape, tokens):
    """One step on random tokens; gives the loss, still on the device."""
    batch = torch.randint(VOCABULARY, shape, generator=tokens).to(DEVICE)
    fraglab_torch.phase(f"step{step}.forward")
    loss = model(input_ids=batch, labels=batch).loss
    fraglab_torch.phase(f"step{step}.backward")
    loss.backward()
    fraglab_torch.phase(f"step{step}.optimizer")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(plugin):
    lora = "lora" in OPTIONS.job
    model = model_of("tiny" if OPTIONS.tiny else "3b" if lora else "1b", recompute=True, lora=lora)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters:,} parameters, {held(plugin)['allocated_bytes_peak'] / GIB:.2f} GiB")
    optimizer = optimizer_of(model)
    tokens = torch.Generator().manual_seed(OPTIONS.seed)
    shapes = batches(OPTIONS.steps, OPTIONS.seed)
    losses, seconds = [], []
    for step, shape in enumerate(shapes):
        synchronize()
        start = time.perf_counter()
        loss = train_step(step, model, optimizer, shape, tokens)
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        say(f"step {step}: {shape[0]} x {shape[1]}, loss {losses[-1]:.4f}, {seconds[-1]:.3f} s")
    fraglab_torch.phase("end")
    timed = seconds[UNTIMED_STEPS:] or seconds
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return {
        "parameters": parameters,
        "batches": shapes,
        "losses": [loss.hex() for loss in losses],
        "weights": sum(int(p.view(BITS[p.dtype]).sum(dtype=torch.int64)) for p in trained),
        "step_seconds": seconds,
        "step_seconds_median": statistics.median(timed),
        "steps_timed": len(timed),
        "status": "ok" if all(map(math.isfinite, losses)) else "loss is not finite",
    }


# ---------------------------------------------------------------- out of memory


def oom(plugin):
    """A batch too large for the limit, then smaller ones with the same model and optimizer."""
    model = model_of("tiny" if OPTIONS.tiny else "1b", recompute=False, lora=False)
    optimizer = optimizer_of(model)
    tokens = torch.Generator().manual_seed(OPTIONS.seed)
    small = (2, 128) if OPTIONS.tiny else (2, 1024)
    large = (256, 512) if OPTIONS.tiny else (64, 2048)
    losses = [train_step(0, model, optimizer, small, tokens).item()]
    caught, before = None, None
    try:
        train_step(1, model, optimizer, large, tokens)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        # Only texts are kept: the error holds the frames, and they the activations.
        caught = {
            "type": f"{type(error).__module__}.{type(error).__qualname__}",
            "is_out_of_memory_error": isinstance(error, torch.OutOfMemoryError),
            "message": str(error),
        }
        before = held(plugin)
    if caught is None:
        return {"status": f"a batch of {large} fits: nothing was refused"}
    say(f"{caught['type']}: {caught['message']}")
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    after = held(plugin)
    for step in range(2, 6):
        losses.append(train_step(step, model, optimizer, small, tokens).item())
    say(f"went on; losses {losses}")
    return {
        "refused_batch": large,
        "exception": caught,
        "held_at_exception": before,
        "held_after_freeing": after,
        "losses": [loss.hex() for loss in losses],
        "status": "ok" if all(map(math.isfinite, losses)) else "loss is not finite",
    }


# ---------------------------------------------------------------- streams and graphs


def read_late(rounds, words, recorded):
    """Tensors freed while another stream has yet to read them: how many words it found changed.

    With `recorded` the allocator is told so (record_stream), and none may be changed.
    """
    side = torch.cuda.Stream()
    sums = []
    for number in range(rounds):
        values = torch.full((words,), number, dtype=torch.int32, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which the main stream goes ahead
            copy = values.clone()
            sums.append((copy != number).sum())
        if recorded:
            values.record_stream(side)
        del values, copy
        if number % 8 == 5:
            torch.cuda.empty_cache()
        # Whoever gets that memory now writes to it before the other stream has read it.
        for _ in range(3):
            torch.full((words,), -1, dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()
    return sum(int(changed) for changed in sums)


def streams(plugin):
    changed = read_late(rounds=40, words=4 << 20, recorded=True)
    # The same without record_stream is the mistake that this guards against: it must show.
    control = read_late(rounds=8, words=4 << 20, recorded=False)
    torch.cuda.empty_cache()
    say(f"{changed} words changed; without record_stream {control}")
    good = changed == 0 and control > 0
    words = {"words_changed": changed, "words_changed_without_record_stream": control}
    return {**words, "status": "ok" if good else "failed"}


def graph(plugin):
    """A captured graph keeps its memory: replays are right, and hurt nobody else's tensors."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).to(DEVICE)
    given = torch.zeros(512, 1024, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            layers(given)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(captured):
        result = layers(given).relu()
    # Of the sizes that were freed inside the capture, so that they would get that memory.
    guards = [torch.full((512, 1024), float(n), device=DEVICE) for n in range(24)]
    wrong = 0
    for number in range(20):
        given.copy_(torch.randn(512, 1024, generator=torch.Generator().manual_seed(number)))
        captured.replay()
        with torch.no_grad():
            wrong += not torch.allclose(result, layers(given).relu(), rtol=1e-4, atol=1e-4)
    hurt = sum(not bool((guard == n).all()) for n, guard in enumerate(guards))
    say(f"{wrong} of 20 replays wrong, {hurt} of {len(guards)} other tensors overwritten")
    good = wrong == 0 and hurt == 0
    return {"replays_wrong": wrong, "guards_hurt": hurt, "status": "ok" if good else "failed"}


# ---------------------------------------------------------------- what was held


def held(plugin):
    """Peaks and current levels in bytes, from whoever serves the memory."""
    if OPTIONS.cpu:
        return dict.fromkeys(["allocated_bytes_peak", "reserved_bytes_peak"], 0)
    if plugin is not None:
        stats = plugin.stats(0)
        return {**stats["peaks"], **stats["current"]}
    stats = torch.cuda.memory_stats()
    levels = {}
    for name in ["requested", "allocated", "active", "reserved"]:
        levels[f"{name}_bytes_peak"] = stats.get(f"{name}_bytes.all.peak", 0)
        levels[f"{name}_bytes"] = stats.get(f"{name}_bytes.all.current", 0)
    return levels


def statistics_of(plugin):
    """All that the allocator says of itself, as it says it."""
    if OPTIONS.cpu:
        return {}
    return torch.cuda.memory_stats() if plugin is None else plugin.stats(0)


def driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def set_up():
    """Puts the allocator in place before CUDA starts; gives the plug-in, if it is one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # cuDNN's attention has no deterministic backward pass; the other implementations have.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Filling new tensors would cost time, and hide what an allocator did to them.
    torch.utils.deterministic.fill_uninitialized_memory = False
    kind, _, spec = OPTIONS.allocator.partition(":")
    if kind == "plugin":
        limit = None if OPTIONS.limit is None else f"{int(OPTIONS.limit * GIB)}"
        mode = "trace" if OPTIONS.trace else "alloc"
        return fraglab_torch.install(
            spec, mode=mode, trace=OPTIONS.trace, profile=OPTIONS.profile, limit=limit
        )
    if OPTIONS.limit is not None and not OPTIONS.cpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(OPTIONS.limit * GIB / total)
    return None


def result_of(plugin):
    job = {"oom": oom, "streams": streams, "graph": graph}.get(OPTIONS.job, train)
    recording = contextlib.nullcontext()
    if OPTIONS.record and not OPTIONS.cpu:
        recording = fraglab_torch.record(OPTIONS.record)
    result = {
        "job": OPTIONS.job,
        "allocator": OPTIONS.allocator,
        "seed": OPTIONS.seed,
        "command": " ".join(["train.py", *sys.argv[1:]]),
        "date": f"{datetime.date.today()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "recorded": bool(OPTIONS.record),
        "limit_bytes": None if OPTIONS.limit is None else int(OPTIONS.limit * GIB),
    }
    start = time.perf_counter()
    with recording:
        result |= job(plugin)
        result["held"] = held(plugin)
        result["statistics"] = statistics_of(plugin)
    result["seconds"] = time.perf_counter() - start
    peaks = result["held"]
    if peaks["reserved_bytes_peak"]:
        result["utilization"] = peaks["allocated_bytes_peak"] / peaks["reserved_bytes_peak"]
    if not OPTIONS.cpu:
        free, total = torch.cuda.mem_get_info()
        result |= {"gpu": torch.cuda.get_device_name(), "driver": driver()}
        result |= {"device_used_bytes": total - free, "device_total_bytes": total}
    return result


def main():
    if OPTIONS.lock:
        # Held until the process ends: the next one imports meanwhile, but has the GPU to itself.
        lock = open(OPTIONS.lock, "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(1)
    plugin = set_up()
    result = result_of(plugin)
    if plugin is not None:
        plugin.finish()
    pathlib.Path(OPTIONS.out).write_text(json.dumps(result, indent=1) + "\n")
    say(f"{result['status']}, {result['held']['reserved_bytes_peak'] / GIB:.2f} GiB reserved")
    return 0 if result["status"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
