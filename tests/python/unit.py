"""Unit tests of fraglab_torch.py on the stand-in for torch. $STUB_LIBRARY is plugged.c, compiled."""

import ctypes
import gzip
import importlib
import json
import os
import pickle
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import fraglab_torch as fraglab
import torch

MIB = 1 << 20


def entry(action, size=MIB, addr=0x1000):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1}


HISTORY = [
    entry("segment_alloc", 2 * MIB),
    entry("alloc"),
    entry("free_requested"),
    entry("free_completed"),
    entry("segment_free", 2 * MIB),
]


class Case(unittest.TestCase):
    def setUp(self):
        global fraglab
        torch.script.__init__()
        torch.play({"segments": [], "device_traces": [list(HISTORY)], "allocator_settings": {}})
        for module in (torch._C, torch.cuda.memory, torch.cuda):
            importlib.reload(module)
        fraglab = importlib.reload(fraglab)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        for name in ("RANK", "WORLD_SIZE", "FRAGLAB", "FRAGLAB_LIB", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ.pop(name, None)
        os.environ["PATH"] = str(self.folder)
        warnings.simplefilter("error")

    def truth(self, name="job"):
        return json.loads((self.folder / f"{name}.truth.json").read_text())

    def files(self):
        return sorted(path.name for path in self.folder.iterdir())


class Record(Case):
    def test_a_snapshot_and_its_truth(self):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:128"
        with fraglab.record(self.folder / "job.pickle.gz") as recorder:
            torch.cuda.set_per_process_memory_fraction(0.5)
            fraglab.step(3)
            torch.advance_to(2)
            fraglab.phase(".backward")
            torch.advance_to(4)
            torch.cuda.empty_cache()
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self.assertEqual(recorder.path, self.folder / "job.pickle.gz")
        self.assertEqual(self.files(), ["job.pickle.gz", "job.truth.json"])
        with gzip.open(recorder.path) as file:
            self.assertEqual(pickle.load(file)["device_traces"], [HISTORY])
        truth = self.truth()
        self.assertEqual(truth["conf"], "max_split_size_mb:128")
        self.assertEqual(truth["outcome"], "ok")
        self.assertEqual(truth["events"], 5)
        self.assertEqual(truth["total_memory"], 80 << 30)
        self.assertEqual(truth["sums_at_end"], [1, 1, 1, 0, 2 * MIB, 2 * MIB])
        notes = [[kind, what, *places] for kind, what, _, *places in truth["notes"]]
        nothing = {"0": [0, 0, 0, 0, 0, 0]}
        freed = {"0": [1, 1, 1, 0, 2 * MIB, 0]}
        emptied = {"0": [1, 1, 1, 0, 2 * MIB, 2 * MIB]}
        self.assertEqual(
            notes,
            [
                ["limit", [0, 0.5], nothing],
                ["mark", "step3", nothing],
                ["mark", "step3.backward", {"0": [1, 0, 0, 0, 2 * MIB, 0]}],
                ["empty_cache", None, freed, emptied],
                ["settings", "expandable_segments:True", emptied],
            ],
        )
        self.assertEqual(torch.script.metadata, "step3.backward")
        self.assertFalse(torch.script.recording)

    def test_what_listens_is_taken_off(self):
        before = dict(vars(torch._C))
        with fraglab.record(self.folder / "job.pickle"):
            self.assertIsNot(torch._C._cuda_emptyCache, before["_cuda_emptyCache"])
        self.assertEqual(
            {k: v for k, v in vars(torch._C).items() if k.startswith("_cuda")},
            {k: v for k, v in before.items() if k.startswith("_cuda")},
        )
        fraglab.phase("nobody.listens")

    def test_an_error_in_the_job_is_passed_on(self):
        with self.assertRaises(torch.OutOfMemoryError):
            with fraglab.record(self.folder / "job.pickle"):
                raise torch.OutOfMemoryError("CUDA out of memory.")
        self.assertEqual(self.truth()["outcome"], "oom")
        with self.assertRaises(ValueError):
            with fraglab.record(self.folder / "job.pickle"):
                raise ValueError("bad batch\nand more")
        self.assertEqual(self.truth()["outcome"], "ValueError: bad batch")
        with self.assertRaises(SystemExit):
            with fraglab.record(self.folder / "job.pickle"):
                sys.exit(0)
        self.assertEqual(self.truth()["outcome"], "ok")

    def test_resets_do_not_shorten_the_statistics(self):
        torch.script.end_stats = {"active_bytes.all.peak": 3 * MIB}
        with fraglab.record(self.folder / "job.pickle"):
            torch.advance_to(5)
            torch.cuda.reset_accumulated_memory_stats()
            torch.cuda.reset_peak_memory_stats()
            fraglab.phase("end")
        truth = self.truth()
        self.assertEqual(truth["stats"]["active_bytes.all.peak"], 3 * MIB)
        self.assertEqual(truth["stats"]["allocation.all.allocated"], 1)
        self.assertEqual(truth["stats"]["reserved_bytes.all.current"], 0)
        self.assertFalse(truth["peak_stats_reset"])
        self.assertEqual(truth["notes"][-1][3], {"0": truth["sums_at_end"]})

    def test_memory_that_is_in_use_is_told(self):
        torch.script.initialized = True
        torch.advance_to(2)
        recorder = fraglab.record(self.folder / "job.pickle")
        with self.assertWarnsRegex(fraglab.FraglabWarning, "GPU 0 holds 2,097,152 bytes"):
            recorder.start()
        torch.advance_to(4)
        fraglab.phase("late")
        recorder.stop()
        # Counted from where the history begins.
        self.assertEqual(self.truth()["notes"][0][3], {"0": [0, 1, 1, 0, 0, 0]})

    def test_without_the_program_a_snapshot_is_written(self):
        recorder = fraglab.record(self.folder / "job.json.zst")
        with self.assertWarnsRegex(fraglab.FraglabWarning, "job.pickle.gz and its truth file"):
            recorder.start()
        self.assertEqual(recorder.stop(), self.folder / "job.pickle.gz")

    def test_a_program_that_fails_leaves_a_snapshot(self):
        program = self.folder / "fraglab"
        program.write_text("#!/bin/sh\necho 'fraglab: no room' >&2\nexit 2\n")
        program.chmod(0o755)
        recorder = fraglab.record(self.folder / "job.json.zst").start()
        with self.assertWarnsRegex(fraglab.FraglabWarning, "fraglab: no room; wrote .*pickle.gz"):
            recorder.stop()
        self.assertEqual(self.files(), ["fraglab", "job.pickle.gz", "job.truth.json"])

    def test_every_rank_has_its_file(self):
        os.environ.update(RANK="3", WORLD_SIZE="8")
        for given, expected in [
            ("job.pickle.gz", "job.rank3.pickle.gz"),
            ("job.pickle", "job.rank3.pickle"),
            ("r%r.pickle", "r3.pickle"),
        ]:
            recorder = fraglab.record(self.folder / given).start()
            self.assertEqual(recorder.stop().name, expected)

    def test_what_cannot_be_recorded_is_refused(self):
        def refused(pattern, path=self.folder / "job.pickle", **options):
            with self.assertRaisesRegex(fraglab.FraglabError, pattern):
                fraglab.record(path, **options).start()

        refused(r"expected a name that ends in one of \.pickle", self.folder / "job.txt")
        refused("there is no folder", self.folder / "no" / "job.pickle")
        refused("nothing-here: expected the program", fraglab="nothing-here")
        torch.script.backend = "cudaMallocAsync"
        refused("'cudaMallocAsync', which keeps no history")
        torch.script.available = False
        refused("there is no CUDA device")

    def test_one_recording_at_a_time(self):
        with fraglab.record(self.folder / "job.pickle"):
            with self.assertRaisesRegex(fraglab.FraglabError, "is being recorded"):
                fraglab.record(self.folder / "other.pickle").start()


class Phases(Case):
    def test_a_phase_gives_way_to_the_one_before(self):
        marks = []
        fraglab._allocator = type("Ear", (), {"_mark": lambda self, name: marks.append(name)})()
        with fraglab.phase("train"):
            with fraglab.phase("validation"):
                pass
        fraglab.phase(".forward")
        self.assertEqual(marks, ["train", "validation", "train", "step0.forward"])


class Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook
        hooks.append(hook)

    def remove(self):
        self.hooks.remove(self.hook)


class Module:
    def __init__(self, **children):
        self.children, self.before, self.after = children, [], []

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def register_forward_pre_hook(self, hook):
        return Handle(self.before, hook)

    def register_forward_hook(self, hook):
        return Handle(self.after, hook)

    def __call__(self, value):
        for hook in list(self.before):
            hook(self, (value,))
        for child in self.children.values():
            child(value)
        for hook in list(self.after):
            hook(self, (value,), value)


class Modules(Case):
    def test_modules_are_entered_and_left(self):
        borders = []
        fraglab._module_border = lambda kind, name: borders.append(f"{kind} {name}")
        model = Module(layer=Module(mlp=Module()), head=Module())
        with fraglab.watch_modules(model, depth=1):
            model(0)
        model(0)
        self.assertEqual(
            borders,
            [
                "enter layer->Module : F",
                "leave layer->Module : F",
                "enter head->Module : F",
                "leave head->Module : F",
            ],
        )
        borders.clear()
        watch = fraglab.watch_modules(model, only=lambda path, module: path != "head")
        model.children["layer"](0)
        watch.remove()
        self.assertEqual(borders[1], "enter layer.mlp->Module : F")
        self.assertEqual(len(borders), 4)


class Install(Case):
    def setUp(self):
        super().setUp()
        self.library = os.environ.get("STUB_LIBRARY")
        if not self.library:
            self.skipTest("no C compiler")
        self.stub = ctypes.CDLL(self.library)
        self.stub.stub_told.restype = ctypes.c_char_p
        for name in ("STUB_INTERFACE", "STUB_FULL"):
            self.setenv(name, None)
        self.setenv("STUB_VERSION", fraglab.__version__)
        self.told_before = self.stub.stub_told()

    def setenv(self, name, value):
        # putenv, which the library sees.
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def told(self):
        return self.stub.stub_told()[len(self.told_before) :].decode()

    def test_it_is_configured_hooked_and_asked(self):
        gpu = fraglab.install("stitch+policy=best", limit="60GiB", lib=self.library)
        settings = json.loads(self.told().splitlines()[0].split(" ", 1)[1])
        # What is not given is left to the environment.
        self.assertEqual(settings, {"alloc": "stitch+policy=best", "limit": "60GiB"})
        plugged = torch.script.calls[-1]
        hooks = plugged.allocator().hooks
        pools = ["pool_begin", "pool_end", "pool_release"]
        others = ["base_alloc", "init", "memory_fraction", "record_stream", "reset"]
        self.assertEqual(sorted(hooks), sorted(pools + others))
        self.assertTrue(all(hooks.values()))
        fraglab.phase("step0.forward")
        fraglab._module_border("leave", "mlp")
        gpu.reset_peaks()
        self.assertIn("mark step0.forward\nleave mlp\nreset_peaks 0\n", self.told())
        self.assertEqual(gpu.max_memory_reserved(), 11)
        self.assertEqual(gpu.memory_allocated(), 5)
        self.assertEqual(gpu.stats_of_all(), [{"mode": "alloc"}])
        gpu.finish()
        self.setenv("STUB_FULL", "1")
        with self.assertRaisesRegex(fraglab.FraglabError, "disk full"):
            gpu.finish()
        self.assertEqual(self.stub.stub_texts(), 0, "every text is given back")
        with self.assertRaisesRegex(fraglab.FraglabError, "installed already"):
            fraglab.install("caching", lib=self.library)
        with self.assertRaisesRegex(fraglab.FraglabError, 'mode="trace"'):
            fraglab.record(self.folder / "job.pickle").start()

    def test_what_an_older_torch_lacks_is_told_once(self):
        inner = torch.cuda.memory._Inner
        lacking = ("set_begin_allocate_to_pool", "set_reset_fn", "set_memory_fraction_fn")
        kept = {setter: inner.__dict__[setter] for setter in lacking}
        for setter in lacking:
            delattr(inner, setter)
        try:
            with self.assertWarns(fraglab.FraglabWarning) as caught:
                fraglab.install("caching", lib=self.library)
        finally:
            for setter, function in kept.items():
                setattr(inner, setter, function)
        self.assertEqual(
            str(caught.warning),
            "this torch does not pass everything on: what a CUDA graph captured may be given to "
            "others between its replays, so use none; empty_cache does nothing; "
            "set_per_process_memory_fraction does nothing",
        )
        self.assertEqual(len(caught.warnings), 1)

    def test_torch_statistics_can_be_answered(self):
        with self.assertRaises(RuntimeError):
            torch.cuda.memory_reserved()
        fraglab.install("caching", lib=self.library, patch_torch_stats=True)
        self.assertEqual(torch.cuda.memory_reserved(), 7)
        self.assertEqual(torch.cuda.memory.max_memory_allocated(0), 9)
        torch.cuda.reset_peak_memory_stats()
        self.assertIn("reset_peaks 0", self.told())

    def test_a_plan_belongs_to_planned(self):
        fraglab.install("planned", plan=Path("dev_0.txt"), lib=self.library)
        self.assertIn("planned+mode=stalloc+plan=dev_0.txt", self.told())

    def test_what_cannot_be_installed_is_refused(self):
        def refused(pattern, alloc="caching", lib=self.library, **options):
            with self.assertRaisesRegex(fraglab.FraglabError, pattern):
                fraglab.install(alloc, lib=lib, **options)

        refused("alloc=nonsense: expected one of", "nonsense")
        refused("does not plan", plan="dev_0.txt")
        refused('expected "alloc" or "trace"', mode="record")
        refused("there is no such library", lib=self.folder / "libfraglab.so")
        refused("libfraglab.so is not found in .*: give lib=PATH", lib=None)
        (self.folder / "no.so").write_text("no library")
        refused("expected libfraglab.so, for this machine", lib=self.folder / "no.so")
        self.setenv("STUB_INTERFACE", "1")
        refused("version 99 of the interface")
        torch.script.initialized = True
        refused("CUDA is in use already")

    def test_another_version_is_told(self):
        self.setenv("STUB_VERSION", "0.0.9")
        with self.assertWarnsRegex(fraglab.FraglabWarning, "is fraglab 0.0.9, this file is"):
            fraglab.install("caching", lib=self.library)


if __name__ == "__main__":
    unittest.main()
