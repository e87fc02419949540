//! Writes the text form.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::{self, Write};

use super::super::{
    Direction, Expectation, FaultWhen, Model, ModelParameter, Op, Pool, PoolKind, Role, Source,
    SourceKind, StartLayout, StartState, Trace, Transfer, validate,
};
use super::{NAMELESS, word};
use crate::units::{BlockId, PoolId, harmless_json, is_obeyed};

/// A time with the largest unit that keeps it short, exact.
pub(super) fn show_time(time_ns: u64) -> String {
    let (unit, decimals) = match time_ns {
        0..1_000 => ("ns", 0),
        1_000..1_000_000 => ("us", 3),
        1_000_000..1_000_000_000 => ("ms", 6),
        _ => ("s", 9),
    };
    let scale = 10u64.pow(decimals);
    let (whole, part) = (time_ns / scale, time_ns % scale);
    if part == 0 {
        return format!("{whole}{unit}");
    }
    let part = format!("{part:0width$}", width = decimals as usize);
    format!("{whole}.{}{unit}", part.trim_end_matches('0'))
}

/// A size with the largest unit that divides it, exact.
fn show_size(size_bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if size_bytes != 0 && size_bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", size_bytes >> shift);
        }
    }
    size_bytes.to_string()
}

/// The word as it stands in a line: in quotes where it would otherwise be read as something else.
fn show_word(word: &str) -> Cow<'_, str> {
    let plain = !word.is_empty()
        && !word.starts_with(['"', '@'])
        && !word
            .contains(|c: char| c.is_whitespace() || c.is_control() || is_obeyed(c) || c == '#');
    match plain {
        true => Cow::Borrowed(word),
        false => Cow::Owned(harmless_json(&serde_json::Value::from(word).to_string()).into_owned()),
    }
}

/// Writes the text form. Tables come out in the order of first use when the text is read again, and
/// what no event speaks of is left out. Returns warnings about what the text cannot hold: call
/// sites, the recording, the layout at the start, how much of a history was seen, and names that
/// had to change.
///
/// # Errors
/// If writing fails; [`io::ErrorKind::InvalidInput`] for a trace that is not [valid](validate).
pub fn write_text(trace: &Trace, mut writer: impl Write) -> io::Result<Vec<String>> {
    validate(trace).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    write_header(trace, &mut writer)?;
    let mut text = TextWriter::new(trace);
    for op in trace.start.iter().flat_map(as_events) {
        if let Some(line) = text.line(op) {
            writeln!(writer, "{line}")?;
        }
    }
    let mut time_ns = 0;
    for event in &trace.events {
        let Some(line) = text.line(event.op) else { continue };
        if event.time_ns != time_ns {
            time_ns = event.time_ns;
            write!(writer, "@{} ", show_time(time_ns))?;
        }
        writeln!(writer, "{line}")?;
    }
    for expectation in &trace.header.expectations {
        let Expectation { allocator, field, value, .. } = expectation;
        let (allocator, field) = (show_word(allocator), show_word(field));
        writeln!(writer, "expect {allocator} {field} {}", show_word(value))?;
    }
    writer.flush()?;
    Ok(text.warnings())
}

fn write_header(trace: &Trace, writer: &mut impl Write) -> io::Result<()> {
    let header = &trace.header;
    let mut text_line = |word: &str, value: Option<&str>| match value {
        Some(value) => writeln!(writer, "{word} {}", show_word(value)),
        None => Ok(()),
    };
    text_line("name", Some(&header.name).filter(|name| !name.is_empty()).map(String::as_str))?;
    text_line("device", header.device.name.as_deref())?;
    text_line("conf", header.settings.as_deref())?;
    if header.source != (Source { kind: SourceKind::Text, version: None }) {
        write!(writer, "source {}", word(&header.source.kind))?;
        if let Some(version) = &header.source.version {
            write!(writer, " {}", show_word(version))?;
        }
        writeln!(writer)?;
    }
    let numbers = [
        ("device_index", header.device.index.map(u64::from)),
        ("mappings", header.device.mappings_max),
        ("start_unix_ns", header.start_unix_ns),
    ];
    for (word, value) in numbers {
        if let Some(value) = value {
            writeln!(writer, "{word} {value}")?;
        }
    }
    let sizes = [
        ("capacity", header.device.capacity_bytes),
        ("device_total", header.device.total_bytes),
        ("address_space", header.device.address_bytes_max),
        ("limit", header.limit_bytes),
    ];
    for (word, value) in sizes {
        if let Some(value) = value {
            writeln!(writer, "{word} {}", show_size(value))?;
        }
    }
    if let Some(policy) = &header.address_policy {
        writeln!(writer, "addresses {}", word(policy))?;
    }
    for fault in &header.faults {
        let when = match fault.when {
            FaultWhen::Nth(nth) => nth.to_string(),
            FaultWhen::All => "all".to_owned(),
        };
        writeln!(writer, "fail {} {when}", fault.call.name())?;
    }
    if !header.strategies.is_empty() {
        writeln!(writer, "strategies {}", show_word(&header.strategies.join(",")))?;
    }
    header.model.as_ref().map_or(Ok(()), |model| write_model(model, writer))
}

fn write_model(model: &Model, writer: &mut impl Write) -> io::Result<()> {
    writeln!(writer, "ranks {} {}", model.ranks, model.local_ranks)?;
    for (key, value) in &model.options {
        writeln!(writer, "option {} {}", show_word(key), show_word(value))?;
    }
    for unit in &model.units {
        write!(writer, "unit {}", show_word(&unit.module))?;
        for (flag, word) in [(unit.leaf, "leaf"), (unit.host, "host")] {
            if flag {
                write!(writer, " {word}")?;
            }
        }
        for ModelParameter { name, elements, frozen } in &unit.parameters {
            let frozen = if *frozen { ":frozen" } else { "" };
            write!(writer, " {}", show_word(&format!("{name}={elements}{frozen}")))?;
        }
        writeln!(writer)?;
    }
    Ok(())
}

/// What was there at the start, as if the program asked for it first. Deferred blocks come before
/// live ones, so that they add nothing to what is live.
fn as_events(start: &StartLayout) -> Vec<Op> {
    let mut ops = Vec::new();
    for state in [StartState::Deferred, StartState::Live] {
        for (segment, blocks) in start.iter() {
            let mut blocks = blocks.iter().filter(|block| block.state == state).peekable();
            if blocks.peek().is_none() {
                continue;
            }
            let pool = segment.pool.some();
            ops.extend(pool.map(Op::PoolEnter));
            for block in blocks {
                ops.push(Op::Alloc(block.block));
                if state == StartState::Deferred {
                    ops.push(Op::Defer(block.block));
                }
            }
            ops.extend(pool.map(Op::PoolLeave));
        }
    }
    ops
}

/// Writes events, and keeps track of the names that are taken.
struct TextWriter<'a> {
    trace: &'a Trace,
    /// By block: something happens to it after its alloc.
    spoken_of: Vec<bool>,
    /// Every name of the trace: an invented one must not be among them.
    known: HashSet<&'a str>,
    /// Names of live blocks.
    taken: HashSet<&'a str>,
    /// Live blocks that go by an invented name though they have one.
    renamed: HashSet<BlockId>,
    renames: u64,
    pool_names: Vec<String>,
    pools_entered: Vec<bool>,
    deletes_dropped: u64,
}

impl<'a> TextWriter<'a> {
    fn new(trace: &'a Trace) -> Self {
        let mut spoken_of = vec![false; trace.blocks.len()];
        let at_start = trace.start.iter().flat_map(as_events);
        for op in at_start.chain(trace.events.iter().map(|event| event.op)) {
            if let Op::Free(block) | Op::Defer(block) | Op::Done(block) | Op::Access(block) = op {
                spoken_of[block.index()] = true;
            }
        }
        TextWriter {
            trace,
            spoken_of,
            known: trace.names.iter().map(String::as_str).collect(),
            taken: HashSet::new(),
            renamed: HashSet::new(),
            renames: 0,
            pool_names: unique_names(&trace.pools),
            pools_entered: vec![false; trace.pools.len()],
            deletes_dropped: 0,
        }
    }

    /// The line of an event, or nothing if the text cannot hold it.
    fn line(&mut self, op: Op) -> Option<String> {
        let trace = self.trace;
        Some(match op {
            Op::Alloc(block) => self.ask("alloc", block),
            Op::Attempt(block) => self.ask("attempt", block),
            Op::Free(block) => {
                let line = format!("free {}", self.name(block));
                self.give_up(block);
                line
            }
            Op::Defer(block) => format!("defer {}", self.name(block)),
            Op::Done(block) => {
                let line = format!("done {}", self.name(block));
                self.give_up(block);
                line
            }
            Op::Access(block) => format!("access {}", self.name(block)),
            Op::Mark(phase) => format!("mark {}", show_word(&trace.phases[phase.index()])),
            Op::EmptyCache => "empty_cache".to_owned(),
            Op::Settings(settings) => {
                format!("settings {}", show_word(&trace.settings_changes[settings.index()]))
            }
            Op::PoolEnter(pool) => self.pool_enter(pool),
            Op::PoolLeave(pool) => {
                format!("pool leave {}", show_word(&self.pool_names[pool.index()]))
            }
            Op::PoolDelete(pool) if !self.pools_entered[pool.index()] => {
                self.deletes_dropped += 1;
                return None;
            }
            Op::PoolDelete(pool) => {
                format!("pool delete {}", show_word(&self.pool_names[pool.index()]))
            }
            Op::ModuleEnter(module) => {
                format!("enter {}", show_word(&trace.modules[module.index()]))
            }
            Op::ModuleLeave(module) => {
                format!("leave {}", show_word(&trace.modules[module.index()]))
            }
            Op::Transfer(transfer) => {
                let Transfer { size_bytes, direction } = &trace.transfers[transfer.index()];
                let direction = match direction {
                    Direction::HostToDevice => "h2d",
                    Direction::DeviceToHost => "d2h",
                };
                format!("transfer {} {direction}", show_size(*size_bytes))
            }
        })
    }

    fn own_name(&self, block: BlockId) -> Option<&'a str> {
        let name = self.trace.blocks[block.index()].name.some()?;
        Some(&self.trace.names[name.index()])
    }

    fn name(&self, block: BlockId) -> Cow<'a, str> {
        match self.own_name(block) {
            Some(name) if !self.renamed.contains(&block) => show_block_name(name),
            _ => Cow::Owned(self.invented(block)),
        }
    }

    /// A name that no block of the trace has. Two blocks never get the same: their numbers differ.
    fn invented(&self, block: BlockId) -> String {
        let mut name = format!("b{}", block.0);
        while self.known.contains(&*name) {
            name.push('\'');
        }
        name
    }

    fn give_up(&mut self, block: BlockId) {
        if !self.renamed.remove(&block)
            && let Some(name) = self.own_name(block)
        {
            self.taken.remove(name);
        }
    }

    fn ask(&mut self, verb: &str, id: BlockId) -> String {
        let block = &self.trace.blocks[id.index()];
        let name = match self.own_name(id) {
            Some(name) if self.taken.contains(name) => {
                self.renames += 1;
                self.renamed.insert(id);
                self.name(id)
            }
            Some(name) => {
                if verb == "alloc" {
                    self.taken.insert(name);
                }
                show_block_name(name)
            }
            None if self.spoken_of[id.index()] => self.name(id),
            None => Cow::Borrowed(NAMELESS),
        };
        let mut line = format!("{verb} {name} {}", show_size(block.size_bytes));
        let handle = self.trace.streams[block.stream.index()].handle;
        if handle != 0 {
            line.push_str(&format!(" stream={handle:#x}"));
        }
        if block.role != Role::Unknown {
            line.push_str(&format!(" role={}", word(&block.role)));
        }
        line
    }

    fn pool_enter(&mut self, pool: PoolId) -> String {
        let mut line = format!("pool enter {}", show_word(&self.pool_names[pool.index()]));
        if !std::mem::replace(&mut self.pools_entered[pool.index()], true) {
            let pool = &self.trace.pools[pool.index()];
            let properties = [
                (" no_split", pool.no_split),
                (" use_on_oom", pool.use_on_oom),
                (" capture", pool.kind == PoolKind::Capture),
            ];
            line.extend(properties.into_iter().filter(|(_, has)| *has).map(|(word, _)| word));
        }
        line
    }

    fn warnings(&self) -> Vec<String> {
        let trace = self.trace;
        let mut warnings = Vec::new();
        if trace.recording.is_some() {
            let lost = "the text form does not hold the recorded allocator's addresses and actions";
            warnings.push(lost.to_owned());
        }
        let mut warn = |count: u64, what: &str| {
            if count > 0 {
                warnings.push(format!("the text form does not hold {what} ({count})"));
            }
        };
        warn(trace.sites.stacks.len() as u64, "call sites");
        warn(
            trace.start.as_ref().map_or(0, |start| start.segments.len() as u64),
            "segments from before the history, so that a replay of it reserves another amount: \
             only their blocks in use",
        );
        warn(trace.header.history.allocs_unseen(), "how many allocs came before the history");
        warn(self.renames, "two live blocks of one name: renamed");
        warn(self.deletes_dropped, "the end of pools that are never entered: left out");
        let renamed = self.pool_names.iter().zip(&trace.pools).filter(|(name, p)| **name != p.name);
        warn(renamed.count() as u64, "two pools of one name: renamed");
        warnings
    }
}

/// A block called `_` would be read as nameless.
fn show_block_name(name: &str) -> Cow<'_, str> {
    if name == NAMELESS { Cow::Borrowed("\"_\"") } else { show_word(name) }
}

/// The pools' names, each made different from all others.
fn unique_names(pools: &[Pool]) -> Vec<String> {
    let known: HashSet<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    let mut given: HashSet<String> = HashSet::new();
    let mut unique = Vec::with_capacity(pools.len());
    for (index, pool) in pools.iter().enumerate() {
        let mut name = pool.name.clone();
        if given.contains(&name) {
            name = format!("{name}.{index}");
            while given.contains(&name) || known.contains(&*name) {
                name.push('\'');
            }
        }
        given.insert(name.clone());
        unique.push(name);
    }
    unique
}
