"""fraglab for PyTorch: record what a job asks of its GPU memory, or run it on another allocator.

One file that needs only the standard library and torch (2.1 or later, Python 3.8 or later).
`fraglab python > fraglab_torch.py` writes it.

Record a run with PyTorch's own allocator, then ask what another would have done:

    import fraglab_torch as fraglab

    with fraglab.record("llama.json.zst"):  # before the first tensor is on the GPU
        model = Llama().cuda()
        fraglab.watch_modules(model)  # optional: which layer asks for what
        for n, batch in enumerate(batches):
            fraglab.phase(f"step{n}.forward")
            loss = model(batch)
            fraglab.phase(f"step{n}.backward")
            loss.backward()

    $ fraglab verify llama.json.zst     # is the recording complete?
    $ fraglab compare --trace llama.json.zst

Run on one of fraglab's allocators (needs libfraglab.so, see the README):

    gpu_memory = fraglab.install("stitch")  # before CUDA is used
    ...
    print(gpu_memory.stats()["peaks"])

What record() notes beside PyTorch's own history: phases and modules, empty_cache, memory limits,
settings strings, resets of statistics. Each note carries PyTorch's own counts of allocations,
frees, completions, refusals and bytes, which name one place in the history whatever threads run.
It notes what passes through `torch._C`; empty_cache called by C++ code itself is found as before,
by what it releases.

What recording costs: an entry of PyTorch's history (well below a microsecond) a call without
stacks, about 2 microseconds with; one read of the statistics, tens of microseconds, for each phase,
module border or empty_cache. At the end the history becomes Python objects: about half a gigabyte
of host memory and 10 seconds for a million entries.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gzip
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch

__version__ = "0.1.0"
__all__ = [
    "Allocator",
    "FraglabError",
    "FraglabWarning",
    "ModuleWatch",
    "Recorder",
    "install",
    "phase",
    "record",
    "step",
    "watch_modules",
]

PathLike = Union[str, "os.PathLike[str]"]

# The version of the C interface of libfraglab.so that this file speaks.
_INTERFACE = 1
# The version of the notes in a truth file.
_NOTES_VERSION = 1
_TRACE_ENDS = (".json", ".json.gz", ".json.zst", ".parquet")
_PICKLE_ENDS = (".pickle", ".pickle.gz")

_log = logging.getLogger("fraglab")
_lock = threading.RLock()
_recorder: Optional["Recorder"] = None
_allocator: Optional["Allocator"] = None
_phase_now: Optional[str] = None
_step_now: Optional[str] = None


# What does not work where a torch lacks one of these hooks.
_WITHOUT_HOOKS = (
    (("record_stream",), "record_stream does nothing, so use one stream only"),
    (
        ("pool_begin", "pool_end", "pool_release"),
        "what a CUDA graph captured may be given to others between its replays, so use none",
    ),
    (("reset",), "empty_cache does nothing"),
    (("memory_fraction",), "set_per_process_memory_fraction does nothing"),
)


class FraglabError(RuntimeError):
    """What was asked for cannot be done; the message says what to do."""


class FraglabWarning(UserWarning):
    """It goes on, but not as one may think."""


def _warn(text: str) -> None:
    warnings.warn(text, FraglabWarning, stacklevel=3)


# --- Phases and modules ---------------------------------------------------------------------------


class _Phase:
    """A phase that has begun. As a context manager it gives way to the phase before it."""

    def __init__(self, before: Optional[str]) -> None:
        self._before = before

    def __enter__(self) -> "_Phase":
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _mark(self._before)


def phase(name: str) -> _Phase:
    """Says that a phase of the job begins: `step3.backward`, `validation`.

    Works under record() and install(), and does nothing without either. A name that begins with a
    dot follows the current step: after step(3), `.backward` is `step3.backward`. In a `with`, the
    phase that ran before goes on at the end.
    """
    if name.startswith("."):
        name = (_step_now or "step0") + name
    before = _phase_now
    _mark(name)
    return _Phase(before)


def step(n: int) -> _Phase:
    """Says that training step n begins: the phase `step3`. Profiles of `planned` are cut there."""
    global _step_now
    _step_now = f"step{int(n)}"
    return phase(_step_now)


def _mark(name: str) -> None:
    global _phase_now
    # Half a character, as a damaged text may hold, is valid in no file and would cost the whole
    # recording.
    name = name.encode("utf-8", "replace").decode("utf-8")
    _phase_now = name
    if _recorder is not None:
        _recorder._mark(name)
    if _allocator is not None:
        _allocator._mark(name)


def _module_border(kind: str, name: str) -> None:
    if _recorder is not None:
        _recorder._note(kind, name)
    if _allocator is not None:
        _allocator._module(kind, name)


class ModuleWatch:
    """Hooks on a module tree; remove() takes them off."""

    def __init__(self, backward: bool) -> None:
        self._backward = backward
        self._handles: List[Any] = []
        # Modules entered and not left, by pass: forward on any thread nests, so does backward.
        self._open: Dict[str, List[Tuple[str, str]]] = {"F": [], "B": []}
        self._names: Dict[str, str] = {}

    def remove(self) -> None:
        """Takes the hooks off. What is still entered is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for kind in self._open:
            self._close_until(kind, 0)

    def __enter__(self) -> "ModuleWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _close_until(self, kind: str, depth: int) -> None:
        stack = self._open[kind]
        while len(stack) > depth:
            _module_border("leave", stack.pop()[1])

    def _enter_forward(self, path: str) -> None:
        self._push("F", path)

    def _enter_backward(self, path: str) -> None:
        stack = self._open["B"]
        if not stack:
            _at_end_of_backward(lambda: self._close_until("B", 0))
        # A module whose inputs need no gradient never reports the end of its backward pass: it has
        # ended when another one begins that does not lie inside it.
        depth = len(stack)
        while depth and not _lies_in(path, stack[depth - 1][0]):
            depth -= 1
        self._close_until("B", depth)
        # The output of a module is often that of its last child, whose hook comes first.
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            if part in self._names and all(part != opened for opened, _ in stack):
                self._push("B", part)

    def _push(self, kind: str, path: str) -> None:
        name = f"{self._names[path]} : {kind}"
        self._open[kind].append((path, name))
        _module_border("enter", name)

    def _leave(self, kind: str, path: str) -> None:
        stack = self._open[kind]
        for depth in range(len(stack) - 1, -1, -1):
            if stack[depth][0] == path:
                self._close_until(kind, depth)
                return

    def _watch(self, module: Any, path: str) -> None:
        self._names[path] = f"{path}->{type(module).__name__}"

        def before(_module: Any, args: Any, kwargs: Any = None) -> None:
            self._enter_forward(path)
            if self._backward:
                self._hook_end(path, (args, kwargs))

        def after(_module: Any, _args: Any, output: Any) -> None:
            self._leave("F", path)
            if self._backward:
                self._hook_begin(path, output)

        try:
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
        except TypeError:
            handle = module.register_forward_pre_hook(before)
        self._handles.append(handle)
        try:
            # Called even if forward raises, as it does when memory is out.
            handle = module.register_forward_hook(after, always_call=True)
        except TypeError:
            handle = module.register_forward_hook(after)
        self._handles.append(handle)

    def _hook_begin(self, path: str, output: Any) -> None:
        """The backward pass of a module begins when the first gradient of its output is there."""
        begun: List[bool] = []

        def begin(_grad: Any) -> None:
            if self._handles and not begun:
                begun.append(True)
                self._enter_backward(path)

        for tensor in _tensors_with_grad(output):
            tensor.register_hook(begin)

    def _hook_end(self, path: str, inputs: Any) -> None:
        """It ends when the last gradient of its inputs is there."""
        tensors = list(_tensors_with_grad(inputs))
        left = [len(tensors)]

        def end(_grad: Any) -> None:
            left[0] -= 1
            if self._handles and left[0] <= 0:
                self._leave("B", path)

        for tensor in tensors:
            tensor.register_hook(end)


def _lies_in(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")


def _at_end_of_backward(call: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        torch.autograd.Variable._execution_engine.queue_callback(call)


def _tensors_with_grad(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif depth < 8 and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_with_grad(item, depth + 1)
    elif depth < 8 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_with_grad(item, depth + 1)


def watch_modules(
    model: Any,
    *,
    backward: bool = True,
    depth: Optional[int] = None,
    only: Optional[Callable[[str, Any], bool]] = None,
) -> ModuleWatch:
    """Notes when a module is entered and left, forward and backward: `layers.3.mlp->MLP : F`.

    `planned` and `chunk` use it. `depth` limits how deep (1: the children of the model), `only`
    chooses modules by path and module. Hooks cost microseconds a module; those for the backward
    pass are tensor hooks, so what is modified in place stays allowed. Compiled modules break their
    graph at a hook: watch the outermost ones only.
    """
    watch = ModuleWatch(backward)
    for path, module in model.named_modules():
        if path == "" or (depth is not None and path.count(".") >= depth):
            continue
        if only is None or only(path, module):
            watch._watch(module, path)
    return watch


# --- Recording ------------------------------------------------------------------------------------


def record(
    path: PathLike,
    *,
    stacks: bool = False,
    device: Optional[int] = None,
    max_entries: int = sys.maxsize,
    fraglab: Optional[PathLike] = None,
) -> "Recorder":
    """Records the history of PyTorch's own allocator. A context manager; or start() and stop().

    Begin before the first tensor is on the GPU. `.pickle` and `.pickle.gz` are PyTorch's snapshot
    with NAME.truth.json beside it; `.json`, `.json.gz`, `.json.zst` and `.parquet` are fraglab's
    trace, for which the program `fraglab` is needed (argument, $FRAGLAB, or on the PATH). `%p` in
    the path is the process, `%r` the rank; with several ranks and no `%r`, `.rankN` is put in.

    `stacks` keeps the Python stack of every allocation; `device` says which GPU, by default the one
    with the longest history; `max_entries` bounds the history, whose oldest entries are lost then.
    """
    return Recorder(path, stacks=stacks, device=device, max_entries=max_entries, fraglab=fraglab)


class Recorder:
    """A recording: see record(). `path` is the file that was written, once it is."""

    def __init__(
        self,
        path: PathLike,
        *,
        stacks: bool = False,
        device: Optional[int] = None,
        max_entries: int = sys.maxsize,
        fraglab: Optional[PathLike] = None,
    ) -> None:
        self.path: Optional[Path] = None
        self._wanted = _path_of_rank(path)
        if not self._wanted.name.endswith(_TRACE_ENDS + _PICKLE_ENDS):
            ends = ", ".join(_PICKLE_ENDS + _TRACE_ENDS)
            raise FraglabError(f"{self._wanted}: expected a name that ends in one of {ends}")
        self._stacks = stacks
        self._device = device
        self._max_entries = max_entries
        self._program = _program(fraglab)
        self._running = False
        self._process = os.getpid()
        self._notes: List[List[Any]] = []
        self._at_start: Dict[int, List[int]] = {}
        self._devices: List[int] = []
        # What resets of statistics took away, by device.
        self._sums_lost: Dict[int, Dict[str, int]] = {}
        self._peaks_lost: Dict[int, Dict[str, int]] = {}
        self._originals: Dict[str, Any] = {}
        self._peaks_unknown = False
        self._settings = ""
        self._fraction: Optional[float] = None
        self._in_note = False
        self._start_ns = 0

    def __enter__(self) -> "Recorder":
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, _traceback: Any) -> None:
        try:
            self.stop(_outcome(error))
        except Exception as failure:
            if error is None:
                raise
            # The job's own error matters more.
            _warn(f"{self._wanted}: the recording is lost: {failure}")

    def start(self) -> "Recorder":
        """Begins to record."""
        global _recorder
        with _lock:
            if self._running:
                return self
            self._check()
            torch.cuda.init()
            self._look_around()
            self._listen()
            try:
                self._history_on()
            except BaseException:
                self._unlisten()
                raise
            self._running = True
            self._start_ns = time.time_ns()
            _recorder = self
            atexit.register(self._at_exit)
        return self

    def stop(self, outcome: str = "ok") -> Optional[Path]:
        """Ends the recording and writes it. Returns the file that was written."""
        global _recorder
        with _lock:
            if not self._running:
                return self.path
            self._running = False
            self._unlisten()
            if _recorder is self:
                _recorder = None
            atexit.unregister(self._at_exit)
            snapshot = torch.cuda.memory._snapshot()
            device = self._choose_device(snapshot)
            truth = self._truth(snapshot, device, outcome)
            self._history_off()
        self.path = self._write(snapshot, truth, device)
        _log.info("wrote %s (%d entries)", self.path, truth["events"])
        return self.path

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            self.stop(_outcome(getattr(sys, "last_value", None)))
        except Exception as failure:
            print(f"fraglab: {self._wanted}: the recording is lost: {failure}", file=sys.stderr)

    # What must hold before it begins.

    def _check(self) -> None:
        if _recorder is not None:
            raise FraglabError(f"{_recorder._wanted} is being recorded: stop that first")
        if _allocator is not None:
            raise FraglabError(
                "record() follows PyTorch's own allocator, but install() has put another in its "
                'place: use install(..., mode="trace", trace=PATH)'
            )
        if not torch.cuda.is_available():
            raise FraglabError(
                "there is no CUDA device: record() follows PyTorch's allocator of GPU memory"
            )
        backend = _backend()
        if backend != "native":
            raise FraglabError(
                f"PyTorch's allocator is {backend!r}, which keeps no history: expected native "
                "(PYTORCH_CUDA_ALLOC_CONF without backend:)"
            )
        folder = self._wanted.parent
        if not folder.is_dir():
            raise FraglabError(f"{self._wanted}: there is no folder {folder}: make it first")
        try:
            # Trying is surer than asking: what a file system grants shows when it is written to.
            tempfile.TemporaryFile(dir=str(folder)).close()
        except OSError as error:
            raise FraglabError(
                f"{self._wanted}: the folder {folder} cannot be written to: {error.strerror}"
            ) from None
        if self._wants_trace() and self._program is None:
            _warn(
                "the program fraglab is not found (argument fraglab, $FRAGLAB, PATH): "
                f"{_as_pickle(self._wanted).name} and its truth file will be written instead"
            )

    def _look_around(self) -> None:
        """What is there before the first entry."""
        with contextlib.suppress(Exception):
            settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
            self._settings = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if not self._settings:
            names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
            self._settings = next((os.environ[n] for n in names if n in os.environ), "")
        busy = []
        for device in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(device)
            if not stats.get("reserved_bytes.all.allocated", 0):
                continue
            self._at_start[device] = _counts(device)
            self._peaks_unknown = True
            if stats.get("reserved_bytes.all.current", 0):
                busy.append(f"GPU {device} holds {stats['reserved_bytes.all.current']:,} bytes")
        if busy:
            _warn(
                f"CUDA memory is in use already ({', '.join(busy)}): what was there is known only "
                "as far as the end shows it; call record() before the first tensor is on the GPU"
            )
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if read is not None:
            with contextlib.suppress(Exception):
                device = torch.cuda.current_device() if self._device is None else self._device
                self._fraction = float(read(device))

    def _history_on(self) -> None:
        begin = torch.cuda.memory._record_memory_history
        options: Dict[str, Any] = {"max_entries": self._max_entries, "stacks": "python"}
        context = "alloc" if self._stacks else None
        try:
            begin("all", context=context, clear_history=True, **options)
        except TypeError:
            # Releases before 2.8 or so cannot clear: nothing is recorded yet.
            begin("all", context=context, **options)

    def _history_off(self) -> None:
        with contextlib.suppress(Exception):
            torch.cuda.memory._record_memory_history(None)

    # Notes.

    def _listen(self) -> None:
        """Puts ears on the functions that change what the allocator does."""
        ears: Dict[str, Callable[..., Any]] = {
            "_cuda_emptyCache": self._hear_empty_cache,
            "_cuda_setMemoryFraction": self._hear_limit,
            "_accelerator_setAllocatorSettings": self._hear_settings,
            "_cuda_cudaCachingAllocator_set_allocator_settings": self._hear_settings,
            "_cuda_resetPeakMemoryStats": self._hear_reset_peaks,
            "_cuda_resetAccumulatedMemoryStats": self._hear_reset_sums,
        }
        pools = {
            "pool_begin": (
                "_cuda_beginAllocateToPool",
                "_cuda_beginAllocateCurrentThreadToPool",
                "_cuda_beginAllocateCurrentStreamToPool",
            ),
            "pool_end": ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"),
            "pool_release": ("_cuda_releasePool",),
        }
        for kind, names in pools.items():
            for name in names:
                ears[name] = functools.partial(self._hear_pool, kind)
        for name, ear in ears.items():
            original = getattr(torch._C, name, None)
            if original is not None:
                self._originals[name] = original
                heard = functools.wraps(original)(functools.partial(ear, original))
                setattr(torch._C, name, heard)

    def _unlisten(self) -> None:
        for name, original in self._originals.items():
            setattr(torch._C, name, original)
        self._originals.clear()

    def _hear_empty_cache(self, original: Callable[..., Any], *args: Any) -> Any:
        with _lock:
            before = self._place()
            try:
                return original(*args)
            finally:
                self._append("empty_cache", None, before, self._place())

    def _hear_limit(self, original: Callable[..., Any], fraction: float, device: int) -> Any:
        with _lock:
            result = original(fraction, device)
            self._append("limit", [int(device), float(fraction)], self._place())
        return result

    def _hear_settings(self, original: Callable[..., Any], settings: str) -> Any:
        with _lock:
            place = self._place()
            result = original(settings)
            self._append("settings", settings, place)
        return result

    def _hear_pool(self, kind: str, original: Callable[..., Any], *args: Any) -> Any:
        with _lock:
            place = self._place()
            result = original(*args)
            pool = [int(part) for part in args[1]] if len(args) > 1 else None
            self._append(kind, pool, place)
        return result

    def _hear_reset_peaks(self, original: Callable[..., Any], device: int) -> Any:
        with _lock:
            lost = self._peaks_lost.setdefault(int(device), {})
            for name, value in torch.cuda.memory_stats(device).items():
                if name.endswith(".peak"):
                    lost[name] = max(lost.get(name, 0), value)
            result = original(device)
            self._append("reset_peaks", int(device), self._place())
        return result

    def _hear_reset_sums(self, original: Callable[..., Any], device: int) -> Any:
        with _lock:
            before = torch.cuda.memory_stats(device)
            result = original(device)
            after = torch.cuda.memory_stats(device)
            lost = self._sums_lost.setdefault(int(device), {})
            for name, value in before.items():
                if isinstance(value, int) and not name.endswith((".current", ".peak")):
                    lost[name] = lost.get(name, 0) + value - after.get(name, 0)
            self._append("reset_sums", int(device), self._place())
        return result

    def _mark(self, name: str) -> None:
        self._note("mark", name)
        # It shows in PyTorch's own viewers too.
        tell = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        if tell is not None and self._running:
            with contextlib.suppress(Exception):
                tell(name)

    def _note(self, kind: str, what: Any) -> None:
        with _lock:
            # An alloc inside a note would note itself.
            if self._running and not self._in_note:
                self._in_note = True
                try:
                    self._append(kind, what, self._place())
                finally:
                    self._in_note = False

    def _append(self, kind: str, what: Any, *places: Dict[str, List[int]]) -> None:
        self._notes.append([kind, what, time.time_ns() // 1000, *places])

    def _place(self) -> Dict[str, List[int]]:
        """Where the history of every GPU in use stands."""
        device = self._device
        if device is None and torch.cuda.is_initialized():
            device = torch.cuda.current_device()
        if device is not None and device not in self._devices:
            self._devices.append(device)
        return {str(device): self._counts_since_start(device) for device in self._devices}

    def _counts_since_start(self, device: int) -> List[int]:
        lost = self._sums_lost.get(device, {})
        start = self._at_start.get(device)
        counts = [n + lost.get(name, 0) for n, name in zip(_counts(device), _COUNTED)]
        return [n - s for n, s in zip(counts, start)] if start else counts

    # The end.

    def _choose_device(self, snapshot: Dict[str, Any]) -> int:
        if self._device is not None:
            return self._device
        lengths = [len(entries) for entries in snapshot.get("device_traces", [])]
        others = sum(1 for length in lengths if length > 0)
        chosen = max(range(len(lengths)), key=lengths.__getitem__) if lengths else 0
        if others > 1:
            _warn(
                f"{others} GPUs have a history: the recording is of GPU {chosen}; "
                "record(..., device=N) chooses another"
            )
        return chosen

    def _truth(self, snapshot: Dict[str, Any], device: int, outcome: str) -> Dict[str, Any]:
        traces = snapshot.get("device_traces", [])
        entries = traces[device] if device < len(traces) else []
        events = sum(1 for entry in entries if entry.get("action") != "snapshot")
        if len(entries) >= self._max_entries:
            _warn(
                f"the history is full ({self._max_entries:,} entries): its beginning is lost; "
                "record() with a larger max_entries"
            )
        properties = torch.cuda.get_device_properties(device)
        total = int(properties.total_memory)
        fraction = 1.0 if self._fraction is None else self._fraction
        truth: Dict[str, Any] = {
            "recorder": f"fraglab_torch {__version__}",
            "outcome": outcome,
            "seconds": (time.time_ns() - self._start_ns) / 1e9,
            "torch": str(torch.__version__),
            "gpu": str(properties.name),
            "device": device,
            "total_memory": total,
            "conf": self._settings,
            "cap_gib": fraction * total / (1 << 30) if fraction < 1.0 else 0,
            "memory_fraction": fraction,
            "rank": int(os.environ.get("RANK", "0") or 0),
            "world": int(os.environ.get("WORLD_SIZE", "1") or 1),
            "events": events,
            "peak_stats_reset": self._peaks_unknown,
            "stats": self._stats(device),
            "sums_at_end": self._counts_since_start(device),
            "notes_version": _NOTES_VERSION,
            "notes": self._notes,
        }
        return truth

    def _stats(self, device: int) -> Dict[str, int]:
        """Statistics of the whole run, whatever resets there were."""
        stats = {k: v for k, v in torch.cuda.memory_stats(device).items() if isinstance(v, int)}
        for name, lost in self._sums_lost.get(device, {}).items():
            stats[name] = stats.get(name, 0) + lost
        for name, peak in self._peaks_lost.get(device, {}).items():
            stats[name] = max(stats.get(name, 0), peak)
        return stats

    def _wants_trace(self) -> bool:
        return self._wanted.name.endswith(_TRACE_ENDS)

    def _write(self, snapshot: Dict[str, Any], truth: Dict[str, Any], device: int) -> Path:
        if not self._wants_trace():
            return _write_pickle(self._wanted, snapshot, truth)
        if self._program is None:
            return _write_pickle(_as_pickle(self._wanted), snapshot, truth)
        failure = self._convert(snapshot, truth, device)
        if failure is None:
            return self._wanted
        instead = _write_pickle(_as_pickle(self._wanted), snapshot, truth)
        _warn(f"{self._wanted}: {failure}; wrote {instead} instead")
        return instead

    def _convert(
        self, snapshot: Dict[str, Any], truth: Dict[str, Any], device: int
    ) -> Optional[str]:
        """Lets fraglab make the trace. Returns what went wrong."""
        folder = tempfile.mkdtemp(prefix=".fraglab-", dir=str(self._wanted.parent))
        try:
            name = _as_pickle(self._wanted).name[: -len(".gz")]
            written = _write_pickle(Path(folder) / name, snapshot, truth)
            command = [str(self._program), "convert", str(written), str(self._wanted)]
            done = subprocess.run(
                command + ["--gpu", str(device)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            said = done.stderr.decode("utf-8", "replace").strip()
            if done.returncode != 0:
                return said.splitlines()[-1] if said else f"fraglab ended with {done.returncode}"
            for line in said.splitlines():
                if "warning: " in line:
                    _log.warning("%s", line.replace(f"{written}: ", ""))
            return None
        except OSError as error:
            return f"{self._program} cannot be run: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# PyTorch's counts that name a place in its history: each entry raises one of them, no two the same.
_COUNTED = (
    "allocation.all.allocated",
    "allocation.all.freed",
    "active.all.freed",
    "num_ooms",
    "reserved_bytes.all.allocated",
    "reserved_bytes.all.freed",
)


def _counts(device: int) -> List[int]:
    read = getattr(torch._C, "_cuda_memoryStats", None)
    stats = read(device) if read else torch.cuda.memory.memory_stats_as_nested_dict(device)
    if not stats:
        return [0] * len(_COUNTED)
    blocks, reserved = stats["allocation"]["all"], stats["reserved_bytes"]["all"]
    return [
        blocks["allocated"],
        blocks["freed"],
        stats["active"]["all"]["freed"],
        stats["num_ooms"],
        reserved["allocated"],
        reserved["freed"],
    ]


def _backend() -> str:
    try:
        return str(torch.cuda.memory.get_allocator_backend())
    except Exception:
        return "native"


def _outcome(error: Optional[BaseException]) -> str:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "ok"
    if isinstance(error, getattr(torch.cuda, "OutOfMemoryError", ())):
        return "oom"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _path_of_rank(path: PathLike) -> Path:
    text = os.fspath(path)
    rank = os.environ.get("RANK", "")
    many = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
    asks = "%r" in text
    found = Path(text.replace("%p", str(os.getpid())).replace("%r", rank or "0"))
    end = next((end for end in _TRACE_ENDS + _PICKLE_ENDS if found.name.endswith(end)), "")
    end = ".pickle.gz" if found.name.endswith(".pickle.gz") else end
    if many and rank and not asks and end:
        found = found.with_name(f"{found.name[: -len(end)]}.rank{rank}{end}")
    return found


def _program(given: Optional[PathLike]) -> Optional[str]:
    """The program fraglab."""
    named = given or os.environ.get("FRAGLAB")
    if named:
        found = shutil.which(os.fspath(named))
        if found is None:
            raise FraglabError(f"{os.fspath(named)}: expected the program fraglab")
        return found
    return shutil.which("fraglab")


def _as_pickle(path: Path) -> Path:
    end = next(end for end in sorted(_TRACE_ENDS, key=len)[::-1] if path.name.endswith(end))
    return path.with_name(path.name[: -len(end)] + ".pickle.gz")


def _write_pickle(path: Path, snapshot: Dict[str, Any], truth: Dict[str, Any]) -> Path:
    """A snapshot and its truth file; each appears whole or not at all, the truth first."""
    stem = path.name[: -len(".gz")] if path.name.endswith(".gz") else path.name
    beside = path.with_name(stem[: -len(".pickle")] + ".truth.json")
    with _whole(beside) as file:
        file.write(json.dumps(truth, indent=1).encode("utf-8"))
    with _whole(path) as file:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5, mtime=0) as packed:
                pickle.dump(snapshot, packed, protocol=4)
        else:
            pickle.dump(snapshot, file, protocol=4)
    return path


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Any]:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=str(path.parent))
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        # mkstemp keeps others out; a recording is a file like any other.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, str(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# --- fraglab's allocators in PyTorch --------------------------------------------------------------


def install(
    alloc: Optional[str] = None,
    *,
    mode: Optional[str] = None,
    profile: Optional[PathLike] = None,
    plan: Optional[PathLike] = None,
    limit: Union[int, str, None] = None,
    trace: Optional[PathLike] = None,
    conf: Optional[str] = None,
    log: Optional[PathLike] = None,
    lib: Optional[PathLike] = None,
    device: Optional[str] = None,
    patch_torch_stats: bool = False,
) -> "Allocator":
    """Makes one of fraglab's allocators PyTorch's. Call it before CUDA is used.

    What is not given comes from the environment ($FRAGLAB_ALLOC and so on), else `caching`.

    `alloc` is written as on the command line: `stitch`, `caching+expandable_segments=true`,
    `planned`. `mode="trace"`, or a name for it in `trace`, records a trace at the same time.
    `profile` is the trace that `planned` plans from, `plan` a plan of STAlloc's, `limit` the most
    it may hold (`60GiB`, or bytes), `conf` settings as in PYTORCH_CUDA_ALLOC_CONF, `log` where
    statistics go at the end (`stderr` or a file), `lib` the library libfraglab.so (else
    $FRAGLAB_LIB, beside this file, beside the program fraglab, which is $FRAGLAB or on the PATH),
    `device` a simulated device as in `sim:8GiB`, for trials.

    PyTorch's own statistics raise under another allocator. With `patch_torch_stats`,
    torch.cuda.memory_allocated, memory_reserved, their max_ and reset_peak_memory_stats answer with
    fraglab's, so that programs that log them run.
    """
    global _allocator
    with _lock:
        if _allocator is not None:
            raise FraglabError("an allocator of fraglab is installed already")
        if _recorder is not None:
            raise FraglabError("record() is under way, which follows PyTorch's own allocator")
        if mode not in (None, "alloc", "trace"):
            raise FraglabError(f'mode is {mode!r}: expected "alloc" or "trace"')
        if torch.cuda.is_initialized():
            raise FraglabError(
                "CUDA is in use already, and PyTorch cannot change its allocator then: call "
                "install() first thing, before any tensor is on the GPU"
            )
        name = alloc or os.environ.get("FRAGLAB_ALLOC") or "caching"
        if plan is not None:
            if not name.startswith("planned"):
                raise FraglabError(f"plan is given, but {name} does not plan: expected planned")
            stalloc = "" if "+mode=" in name else "+mode=stalloc"
            name = alloc = f"{name}{stalloc}+plan={os.fspath(plan)}"
        wanted = {
            "alloc": alloc,
            "mode": mode,
            "trace": trace,
            "profile": profile,
            "limit": limit,
            "conf": conf,
            "log": log,
            "device": device,
        }
        settings = {key: _text(value) for key, value in wanted.items() if value is not None}
        path = _library(lib)
        allocator = Allocator(path, name)
        allocator._configure(settings)
        allocator._plug_in()
        if patch_torch_stats:
            allocator._patch_torch_stats()
        _allocator = allocator
        if _phase_now is not None:
            allocator._mark(_phase_now)
    return allocator


class Allocator:
    """An allocator of fraglab that serves PyTorch."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.library = path
        try:
            self._lib = ctypes.CDLL(str(path))
            interface = int(self._lib.fraglab_torch_interface())
        except OSError as error:
            raise FraglabError(
                f"{path}: {error}; expected libfraglab.so, for this machine"
            ) from None
        except AttributeError:
            raise FraglabError(
                f"{path} is no library for PyTorch: build it with --features plugin"
            ) from None
        if interface != _INTERFACE:
            raise FraglabError(
                f"{path} has version {interface} of the interface, this file speaks {_INTERFACE}: "
                "write it anew with the fraglab that the library comes from (fraglab python)"
            )
        self._declare()
        version = self._lib.fraglab_torch_version().decode("utf-8", "replace")
        if version != __version__:
            _warn(f"{path} is fraglab {version}, this file is {__version__}: take both from one")

    def _declare(self) -> None:
        lib = self._lib
        lib.fraglab_torch_version.restype = ctypes.c_char_p
        # Texts that we own: as pointers, or ctypes would copy and lose them.
        for name in ("configure", "stats", "finish"):
            getattr(lib, "fraglab_torch_" + name).restype = ctypes.c_void_p
        lib.fraglab_torch_configure.argtypes = [ctypes.c_char_p]
        lib.fraglab_torch_stats.argtypes = [ctypes.c_int]
        lib.fraglab_torch_finish.argtypes = []
        lib.fraglab_torch_reset_peaks.argtypes = [ctypes.c_int]
        lib.fraglab_torch_reset_peaks.restype = None
        lib.fraglab_torch_release_text.argtypes = [ctypes.c_void_p]
        lib.fraglab_torch_release_text.restype = None
        for name in ("mark", "module_enter", "module_leave"):
            function = getattr(lib, "fraglab_torch_" + name)
            function.argtypes = [ctypes.c_char_p]
            function.restype = None

    def _text(self, pointer: Optional[int]) -> Optional[str]:
        if not pointer:
            return None
        try:
            return ctypes.string_at(pointer).decode("utf-8", "replace")
        finally:
            self._lib.fraglab_torch_release_text(pointer)

    def _configure(self, settings: Dict[str, str]) -> None:
        wrong = self._text(self._lib.fraglab_torch_configure(json.dumps(settings).encode("utf-8")))
        if wrong is not None:
            raise FraglabError(wrong)

    def _plug_in(self) -> None:
        memory = torch.cuda.memory
        pluggable = memory.CUDAPluggableAllocator(
            str(self.library), "fraglab_torch_alloc", "fraglab_torch_free"
        )
        inner = pluggable.allocator()
        hooks = {
            "set_init_fn": "init",
            "set_reset_fn": "reset",
            "set_memory_fraction_fn": "memory_fraction",
            "set_base_alloc_fn": "base_alloc",
            "set_record_stream_fn": "record_stream",
            "set_begin_allocate_to_pool": "pool_begin",
            "set_end_allocate_to_pool_fn": "pool_end",
            "set_release_pool": "pool_release",
        }
        missing = set()
        for setter, name in hooks.items():
            function = getattr(self._lib, "fraglab_torch_" + name, None)
            if function is None or not hasattr(inner, setter):
                missing.add(name)
                continue
            getattr(inner, setter)(ctypes.cast(function, ctypes.c_void_p).value)
        idle = [text for names, text in _WITHOUT_HOOKS if not missing.isdisjoint(names)]
        if idle:
            _warn("this torch does not pass everything on: " + "; ".join(idle))
        try:
            memory.change_current_allocator(pluggable)
        except RuntimeError as error:
            raise FraglabError(
                f"PyTorch does not change its allocator any more ({error}): call install() before "
                "CUDA is used"
            ) from None
        self._pluggable = pluggable

    def _mark(self, name: str) -> None:
        self._lib.fraglab_torch_mark(_c_text(name))

    def _module(self, kind: str, name: str) -> None:
        call = self._lib.fraglab_torch_module_enter
        if kind == "leave":
            call = self._lib.fraglab_torch_module_leave
        call(_c_text(name))

    def stats(self, device: Optional[int] = None) -> Dict[str, Any]:
        """Statistics of a GPU, by default the current one: `peaks`, `current`, `calls`, ...

        An error as long as nothing was asked of that GPU.
        """
        found = self._stats(device)
        if "error" in found:
            raise FraglabError(f"{found['error']}: no memory was asked of it yet")
        return found

    def _stats(self, device: Optional[int]) -> Dict[str, Any]:
        text = self._text(self._lib.fraglab_torch_stats(_device_index(device)))
        return dict(json.loads(text)) if text else {}

    def stats_of_all(self) -> List[Dict[str, Any]]:
        """Statistics of every GPU in use."""
        text = self._text(self._lib.fraglab_torch_stats(-1))
        return list(json.loads(text)) if text else []

    def reset_peaks(self, device: Optional[int] = None) -> None:
        """Peaks begin anew at what is held now."""
        self._lib.fraglab_torch_reset_peaks(_device_index(device))

    def finish(self) -> None:
        """Writes traces and statistics now, as the end of the process does."""
        wrong = self._text(self._lib.fraglab_torch_finish())
        if wrong is not None:
            raise FraglabError(wrong)

    def _level(self, group: str, name: str, device: Any) -> int:
        return int(self._stats(device).get(group, {}).get(name, 0))

    def memory_allocated(self, device: Any = None) -> int:
        """As torch.cuda.memory_allocated: bytes of live blocks."""
        return self._level("current", "allocated_bytes", device)

    def max_memory_allocated(self, device: Any = None) -> int:
        """As torch.cuda.max_memory_allocated."""
        return self._level("peaks", "allocated_bytes_peak", device)

    def memory_reserved(self, device: Any = None) -> int:
        """As torch.cuda.memory_reserved: bytes of device memory that are held."""
        return self._level("current", "reserved_bytes", device)

    def max_memory_reserved(self, device: Any = None) -> int:
        """As torch.cuda.max_memory_reserved."""
        return self._level("peaks", "reserved_bytes_peak", device)

    def _patch_torch_stats(self) -> None:
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
        ):
            _replace(name, getattr(self, name))
        _replace("reset_peak_memory_stats", self.reset_peaks)


def _replace(name: str, function: Callable[..., Any]) -> None:
    for module in (torch.cuda, torch.cuda.memory):
        if hasattr(module, name):
            setattr(module, name, function)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(os.fspath(value) if _is_path(value) else value)


def _is_path(value: Any) -> bool:
    return hasattr(value, "__fspath__")


def _c_text(text: str) -> bytes:
    return text.replace("\0", " ").encode("utf-8", "replace")


def _device_index(device: Any) -> int:
    if device is None:
        return int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
    if isinstance(device, int):
        if device < 0:
            raise FraglabError(f"device {device}: expected the number of a GPU, 0 or more")
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)


def _library(given: Optional[PathLike]) -> Path:
    """libfraglab.so: what is named, else beside this file, else beside the program."""
    named = given or os.environ.get("FRAGLAB_LIB")
    if named:
        path = Path(os.fspath(named))
        if path.is_dir():
            path = path / "libfraglab.so"
        if not path.is_file():
            raise FraglabError(f"{path}: there is no such library")
        return path.resolve()
    places = [Path(__file__).resolve().parent]
    program = os.environ.get("FRAGLAB") or shutil.which("fraglab")
    if program:
        places.append(Path(program).resolve().parent)
    for place in places:
        if (place / "libfraglab.so").is_file():
            return place / "libfraglab.so"
    looked = ", ".join(str(place) for place in places)
    raise FraglabError(
        f"libfraglab.so is not found in {looked}: give lib=PATH or $FRAGLAB_LIB; it is built with "
        "cargo rustc --release --lib --no-default-features --features plugin --crate-type cdylib"
    )
