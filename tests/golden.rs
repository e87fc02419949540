//! Hand-worked runs of PyTorch's caching allocator with every log entry, the final layout and the
//! statistics: `tests/golden/pytorch_2_11.txt`, most of them checked on the released PyTorch
//! binary.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fraglab::alloc::{Action, ActionKind, Allocator, BlockState, Request};
use fraglab::units::{BlockId, MIB, StreamId};

use crate::model::device::{Bases, TestDevice};
use crate::model::driver::Driver;
use crate::model::{Model, Settings};

const VECTORS: &str = include_str!("golden/pytorch_2_11.txt");

/// Vectors about expandable segments and private pools, which the model does not have.
const EXPANDABLE_OR_POOLS: [&str; 5] = ["V12", "V14", "V15", "V18", "V20"];

/// One vector as it stands in the file.
pub(crate) struct Vector {
    name: &'static str,
    /// The `PYTORCH_CUDA_ALLOC_CONF` string.
    pub(crate) config: &'static str,
    pub(crate) device_bytes: u64,
    bases: Bases,
    /// The other lines: operations with what they must log, final segments, statistics.
    lines: Vec<&'static str>,
}

fn vectors() -> Vec<Vector> {
    let mut vectors: Vec<Vector> = Vec::new();
    for line in VECTORS.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with(['V', 'H']) {
            vectors.push(Vector {
                name: line.split(' ').next().expect("a name"),
                config: "",
                device_bytes: 1 << 40,
                bases: Bases::Ascending,
                lines: Vec::new(),
            });
            continue;
        }
        let vector = vectors.last_mut().expect("a title comes first");
        match line.split_once(' ') {
            Some(("config", text)) => vector.config = text,
            Some(("device", text)) => vector.device_bytes = number(text),
            Some(("bases", "descending")) => vector.bases = Bases::Descending,
            _ => vector.lines.push(line),
        }
    }
    vectors
}

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

/// The settings that the model needs for the options that occur in the vectors.
fn settings(vector: &Vector) -> Settings {
    let mut settings = Settings::default();
    for option in vector.config.split(',').filter(|option| !option.is_empty()) {
        let (key, value) = option.split_once(':').expect("key:value");
        match key {
            "garbage_collection_threshold" => {
                settings.gc_threshold = value.parse().expect("a fraction");
            }
            "per_process_memory_fraction" => {
                let fraction: f64 = value.parse().expect("a fraction");
                settings.limit = Some((fraction * vector.device_bytes as f64) as u64);
            }
            "max_split_size_mb" => settings.max_split_size = number(value) * MIB,
            "roundup_power2_divisions" => settings.roundup = [number(value); 16],
            _ => panic!("{}: unknown option {key:?}", vector.name),
        }
    }
    settings
}

/// Raw handles of the streams of all vectors.
pub(crate) const STREAM_HANDLES: [u64; 3] = [0, 0x7100, 0x8100];

fn stream(text: &str) -> StreamId {
    let handle = number(text);
    let at = STREAM_HANDLES.iter().position(|&known| known == handle);
    StreamId(at.expect("a known stream") as u32)
}

/// A run of one vector: names of blocks, and what streams still have to do.
struct Run<A> {
    driver: Driver<A>,
    names: BTreeMap<&'static str, BlockId>,
    recorded: BTreeMap<BlockId, BTreeSet<StreamId>>,
    /// Per stream the blocks whose event stands in its queue.
    queues: BTreeMap<StreamId, VecDeque<BlockId>>,
    blocks_made: u32,
}

impl<A: Allocator> Run<A> {
    fn operation(&mut self, text: &'static str) {
        let words: Vec<&'static str> = text.split_whitespace().collect();
        match words[..] {
            ["alloc", name, size] => self.malloc(name, number(size), StreamId(0)),
            ["alloc", name, size, "stream", on] => self.malloc(name, number(size), stream(on)),
            ["free", name] => self.free(self.names[name]),
            ["record_stream", name, "stream", on] => {
                self.recorded.entry(self.names[name]).or_default().insert(stream(on));
            }
            ["events", "complete", "on", "stream", on, "(oldest", count] => {
                for _ in 0..number(count.trim_end_matches(')')) {
                    self.event_completes(stream(on));
                }
            }
            ["empty_cache"] => self.driver.empty_cache(),
            _ => panic!("unknown operation {text:?}"),
        }
    }

    fn malloc(&mut self, name: &'static str, size_bytes: u64, stream: StreamId) {
        let block = BlockId(self.blocks_made);
        self.blocks_made += 1;
        if self.driver.malloc(Request { block, size_bytes, stream }).is_ok() {
            self.names.insert(name, block);
        }
    }

    fn free(&mut self, block: BlockId) {
        match self.recorded.get(&block) {
            None => self.driver.free(block),
            Some(streams) => {
                for &stream in streams {
                    self.queues.entry(stream).or_default().push_back(block);
                }
                self.driver.defer(block);
            }
        }
    }

    /// The block is done when its last event is.
    fn event_completes(&mut self, stream: StreamId) {
        let queue = self.queues.get_mut(&stream).expect("an event is queued");
        let block = queue.pop_front().expect("an event is queued");
        if !self.queues.values().any(|queue| queue.contains(&block)) {
            self.driver.done(block);
        }
    }

    fn log(&mut self) -> String {
        let log = self.driver.take_log();
        if log.is_empty() {
            return "-".to_owned();
        }
        let refused = log.iter().any(|action| action.kind == ActionKind::Oom);
        let entries: Vec<String> = log.iter().map(|action| self.entry(action)).collect();
        format!("{}{}", if refused { "OOM  " } else { "" }, entries.join("; "))
    }

    fn entry(&self, action: &Action) -> String {
        let kind = match action.kind {
            ActionKind::Alloc => "alloc",
            ActionKind::FreeRequested => "freq",
            ActionKind::FreeCompleted => "fdone",
            ActionKind::SegmentAlloc => "seg_alloc",
            ActionKind::SegmentFree => "seg_free",
            ActionKind::Oom => return format!("oom {}", action.size_bytes),
            other => panic!("{other:?} has no place in these vectors"),
        };
        let base = self.driver.device().given[action.segment as usize];
        assert_eq!(action.address, base + action.offset_bytes, "{action:?}");
        let stream = match STREAM_HANDLES[action.stream.index()] {
            0 => String::new(),
            handle => format!(" s{handle:x}"),
        };
        format!("{kind} S{}+{} {}{stream}", action.segment, action.offset_bytes, action.size_bytes)
    }

    /// The `final` lines.
    fn layout(&self) -> Vec<String> {
        let mut lines: Vec<(u32, u64, String)> = Vec::new();
        for block in self.driver.layout() {
            if lines.last().is_none_or(|&(segment, ..)| segment != block.segment) {
                lines.push((block.segment, 0, String::new()));
            }
            let state = match block.state {
                BlockState::Allocated => 'A',
                BlockState::Deferred => 'P',
                BlockState::Free => 'f',
            };
            let (_, size, text) = lines.last_mut().expect("just pushed");
            assert_eq!(block.address, block.segment_address + *size, "no gaps");
            *size += block.size_bytes;
            *text += &format!(" {}{state}", block.size_bytes);
        }
        let lines = lines.into_iter();
        lines.map(|(n, size, text)| format!("final S{n}+0 size {size}:{text}")).collect()
    }

    /// The `stats` line.
    fn statistics(&self) -> String {
        let stats = self.driver.stats();
        let shown = [
            ("allocated", "allocated_bytes.all.current"),
            ("reserved", "reserved_bytes.all.current"),
            ("requested", "requested_bytes.all.current"),
            ("inactive_split_bytes", "inactive_split_bytes.all.current"),
            ("inactive_split", "inactive_split.all.current"),
            ("retries", "num_alloc_retries"),
            ("ooms", "num_ooms"),
            ("dev_alloc", "num_device_alloc"),
            ("dev_free", "num_device_free"),
            ("syncs", "num_sync_all_streams"),
        ];
        let shown = shown.map(|(label, name)| format!("{label}={}", stats[name]));
        format!("stats {}", shown.join(" "))
    }
}

/// Runs one vector and compares every line of it.
fn run_vector<A: Allocator>(vector: &Vector, allocator: A) {
    let device = TestDevice::new(vector.device_bytes, vector.bases);
    let mut run = Run {
        driver: Driver::new(allocator, device),
        names: BTreeMap::new(),
        recorded: BTreeMap::new(),
        queues: BTreeMap::new(),
        blocks_made: 0,
    };
    let mut ends = Vec::new();
    for &line in &vector.lines {
        match line.split_once("->") {
            Some((operation, expected)) => {
                run.operation(operation.trim());
                assert_eq!(run.log(), expected.trim(), "{}: {}", vector.name, operation.trim());
            }
            None => ends.push(line.to_owned()),
        }
    }
    let mut found = run.layout();
    found.push(run.statistics());
    assert_eq!(found, ends, "{}: end", vector.name);
}

/// Runs every vector without expandable segments and private pools.
pub(crate) fn run_plain_vectors<A: Allocator>(build: impl Fn(&Vector) -> A) {
    let mut names = Vec::new();
    for vector in vectors() {
        if !EXPANDABLE_OR_POOLS.contains(&vector.name) {
            run_vector(&vector, build(&vector));
            names.push(vector.name);
        }
    }
    let expected = "V1 V2 V3 V4 V4a V4b V5 V6 V6b V7 V9 V10 V11 V16 V21 V22 \
                    H1 H2 H3 H4";
    assert_eq!(names.join(" "), expected, "vectors that ran");
}

#[test]
fn the_model_reproduces_the_plain_vectors() {
    run_plain_vectors(|vector| Model::new(settings(vector), STREAM_HANDLES.to_vec()));
}
