//! Hand-worked runs of PyTorch's caching allocator with every log entry, the final layout and the
//! statistics: `tests/golden/pytorch_2_11.txt`, most of them checked on the released PyTorch
//! binary.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fraglab::alloc::{Action, ActionKind, Allocator, BlockState, Request};
use fraglab::trace::{Pool, PoolKind};
use fraglab::units::{BlockId, MIB, PoolId, SettingsId, StreamId};

use crate::model::device::{Bases, TestDevice};
use crate::model::driver::Driver;
use crate::model::settings::{Options, Settings};
use crate::model::{Inputs, Model};

const VECTORS: &str = include_str!("golden/pytorch_2_11.txt");

/// One vector as it stands in the file.
pub(crate) struct Vector {
    name: &'static str,
    /// The `PYTORCH_CUDA_ALLOC_CONF` string.
    pub(crate) config: &'static str,
    pub(crate) device_bytes: u64,
    /// The allocator is to search once more after a flush.
    pub(crate) research_after_flush: bool,
    /// In the order in which they are created.
    pub(crate) pools: Vec<Pool>,
    /// Settings strings given at run time, in order.
    pub(crate) settings_changes: Vec<&'static str>,
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
                research_after_flush: false,
                pools: Vec::new(),
                settings_changes: Vec::new(),
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
            None if line == "research_after_flush" => vector.research_after_flush = true,
            Some(("create", _)) => {
                vector.pools.push(pool(line));
                vector.lines.push(line);
            }
            Some(("settings", change)) => {
                let (text, _) = change.split_once("->").expect("nothing is logged");
                vector.settings_changes.push(text.trim());
                vector.lines.push(line);
            }
            _ => vector.lines.push(line),
        }
    }
    vectors
}

/// `create pool NAME [no_split=True] [use_on_oom=True] [capture] -> -`.
fn pool(line: &'static str) -> Pool {
    let words: Vec<&str> = line.split_whitespace().collect();
    Pool {
        name: words[2].to_owned(),
        kind: if words.contains(&"capture") { PoolKind::Capture } else { PoolKind::MemPool },
        no_split: words.contains(&"no_split=True"),
        use_on_oom: words.contains(&"use_on_oom=True"),
    }
}

fn number(text: &str) -> u64 {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

/// What the model needs to know of a vector.
fn inputs(vector: &Vector) -> Inputs {
    let mut settings = Settings::default();
    settings.give(options(vector.name, vector.config));
    if let Some((_, rest)) = vector.config.split_once("per_process_memory_fraction:") {
        let text = rest.split(',').next().expect("a value");
        let fraction: f64 = text.parse().expect("a fraction");
        settings.limit = Some((fraction * vector.device_bytes as f64) as u64);
    }
    Inputs {
        settings,
        changes: vector.settings_changes.iter().map(|text| options(vector.name, text)).collect(),
        pools: vector.pools.clone(),
        stream_handles: STREAM_HANDLES.to_vec(),
        device_total_bytes: vector.device_bytes,
        research_after_flush: vector.research_after_flush,
    }
}

/// The options that occur in the vectors.
fn options(vector: &str, text: &str) -> Options {
    let mut options = Options::default();
    for option in text.split(',').filter(|option| !option.is_empty()) {
        let (key, value) = option.split_once(':').expect("key:value");
        match key {
            "garbage_collection_threshold" => {
                options.gc_threshold = Some(value.parse().expect("a fraction"));
            }
            "max_split_size_mb" => options.max_split_size = Some(number(value) * MIB),
            "large_segment_size_mb" => options.large_segment_size = Some(number(value) * MIB),
            "roundup_power2_divisions" => options.roundup = Some([number(value); 16]),
            "expandable_segments" => options.expandable = Some(value == "True"),
            // Not an option that can change: see `inputs`.
            "per_process_memory_fraction" => {}
            _ => panic!("{vector}: unknown option {key:?}"),
        }
    }
    options
}

/// Raw handles of the streams of all vectors.
pub(crate) const STREAM_HANDLES: [u64; 3] = [0, 0x7100, 0x8100];

fn stream(text: &str) -> StreamId {
    let handle = number(text);
    let at = STREAM_HANDLES.iter().position(|&known| known == handle);
    StreamId(at.expect("a known stream") as u32)
}

/// A run of one vector: names of blocks, and what streams still have to do.
struct Run<'a, A> {
    vector: &'a Vector,
    driver: Driver<A>,
    names: BTreeMap<&'static str, BlockId>,
    recorded: BTreeMap<BlockId, BTreeSet<StreamId>>,
    /// Per stream the blocks whose event stands in its queue.
    queues: BTreeMap<StreamId, VecDeque<BlockId>>,
    blocks_made: u32,
    settings_given: u32,
    /// Pools entered and not left.
    entered: Vec<PoolId>,
    /// The allocator's own numbers of the pools, as far as they were entered.
    pool_numbers: BTreeMap<u32, PoolId>,
}

impl<A: Allocator> Run<'_, A> {
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
            ["settings", _] => {
                self.driver.change_settings(SettingsId(self.settings_given));
                self.settings_given += 1;
            }
            // It comes into being when it is entered.
            ["create", "pool", ..] => {}
            ["enter", "pool", name] => self.pool_enter(self.pool(name)),
            ["leave", "pool"] => {
                let pool = self.entered.pop().expect("a pool is entered");
                self.driver.pool_leave(pool);
            }
            ["delete", "pool", name] => self.driver.pool_delete(self.pool(name)),
            _ => panic!("unknown operation {text:?}"),
        }
    }

    fn pool(&self, name: &str) -> PoolId {
        let at = self.vector.pools.iter().position(|pool| pool.name == name);
        PoolId(at.expect("a pool of the vector") as u32)
    }

    fn pool_enter(&mut self, pool: PoolId) {
        self.entered.push(pool);
        self.driver.pool_enter(pool);
        for size_bytes in [1, 2 * MIB] {
            let request = Request { block: BlockId::NONE, size_bytes, stream: StreamId(0) };
            self.pool_numbers.insert(self.driver.allocator.pool_of(request), pool);
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
            ActionKind::SegmentMap => "seg_map",
            ActionKind::SegmentUnmap => "seg_unmap",
            ActionKind::Oom => return format!("oom {}", action.size_bytes),
            other => panic!("{other:?} has no place in these vectors"),
        };
        let base = self.driver.device().given[action.segment as usize].address;
        assert_eq!(action.address, base + action.offset_bytes, "{action:?}");
        let segment = self.segment_name(action.segment);
        let stream = match STREAM_HANDLES[action.stream.index()] {
            0 => String::new(),
            handle => format!(" s{handle:x}"),
        };
        format!("{kind} {segment}+{} {}{stream}", action.offset_bytes, action.size_bytes)
    }

    /// `S` and `E` are numbered each for themselves.
    fn segment_name(&self, ordinal: u32) -> String {
        let given = &self.driver.device().given[..=ordinal as usize];
        let reserved = given[ordinal as usize].reserved;
        let number = given.iter().filter(|other| other.reserved == reserved).count() - 1;
        format!("{}{number}", if reserved { 'E' } else { 'S' })
    }

    /// The `final` lines: segments and mapped runs.
    fn layout(&self) -> Vec<String> {
        let mut lines: Vec<(String, u64, String)> = Vec::new();
        let mut end = 0;
        for block in self.driver.layout() {
            let offset = block.address - block.segment_address;
            if offset == 0 || block.address != end {
                let name = self.segment_name(block.segment);
                lines.push((format!("final {name}+{offset} size"), 0, self.pool_text(block.pool)));
            }
            end = block.address + block.size_bytes;
            let state = match block.state {
                BlockState::Allocated => 'A',
                BlockState::Deferred => 'P',
                BlockState::Free => 'f',
            };
            let (_, size, text) = lines.last_mut().expect("just pushed");
            *size += block.size_bytes;
            *text += &format!(" {}{state}", block.size_bytes);
        }
        lines.into_iter().map(|(start, size, text)| format!("{start} {size}{text}")).collect()
    }

    /// Private pools are (0, 1), (0, 2), ... in the order of their creation.
    fn pool_text(&self, number: u32) -> String {
        match self.pool_numbers.get(&number) {
            Some(pool) => format!(" pool (0, {}):", pool.0 + 1),
            None => ":".to_owned(),
        }
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
        vector,
        driver: Driver::new(allocator, device),
        names: BTreeMap::new(),
        recorded: BTreeMap::new(),
        queues: BTreeMap::new(),
        blocks_made: 0,
        settings_given: 0,
        entered: Vec::new(),
        pool_numbers: BTreeMap::new(),
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

/// Runs every vector.
pub(crate) fn run_vectors<A: Allocator>(build: impl Fn(&Vector) -> A) {
    let vectors = vectors();
    for vector in &vectors {
        run_vector(vector, build(vector));
    }
    let names: Vec<&str> = vectors.iter().map(|vector| vector.name).collect();
    let expected = "V1 V2 V3 V4 V4a V4b V5 V6 V6b V7 V9 V10 V11 V12 V14 V15 V16 V18 V20 V21 V22 \
                    H1 H2 H3 H4 H5 H6 H7 H8 H9 H10";
    assert_eq!(names.join(" "), expected, "vectors that ran");
}

#[test]
fn the_model_reproduces_the_vectors() {
    run_vectors(|vector| Model::new(inputs(vector)));
}
