//! One number for what a trace asks of an allocator.
//!
//! The one design decision: it is taken of what a replay reads, not of a file. The same trace in
//! another format, compressed otherwise, without call sites or with other times has the same
//! number; one request more, or a byte more in one, gives another.

use xxhash_rust::xxh3::Xxh3;

use super::{FaultWhen, Op, SourceKind, StartState, Trace};
use crate::units::NameId;

/// A number for everything that the decisions of an allocator may hang on: events, blocks, pools,
/// phases, settings, device and limits. Times, call sites, the job's name and what the recorded
/// allocator did are left out. The same on every machine and in every version of a file.
pub fn fingerprint(trace: &Trace) -> u64 {
    let mut digest = Digest(Xxh3::new());
    header(&mut digest, trace);
    tables(&mut digest, trace);
    start(&mut digest, trace);
    digest.number(trace.events.len() as u64);
    for event in &trace.events {
        let (kind, id) = code(event.op);
        digest.number(u64::from(kind) << 32 | u64::from(id));
    }
    digest.0.digest()
}

/// Takes parts that cannot run into each other: numbers of eight bytes, texts with their length.
struct Digest(Xxh3);

impl Digest {
    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    /// None is told from every number.
    fn maybe(&mut self, number: Option<u64>) {
        self.number(u64::from(number.is_some()));
        self.number(number.unwrap_or(0));
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn texts(&mut self, texts: &[String]) {
        self.number(texts.len() as u64);
        for text in texts {
            self.text(text);
        }
    }
}

fn header(digest: &mut Digest, trace: &Trace) {
    let header = &trace.header;
    let device = &header.device;
    digest.number(u64::from(header.source.kind == SourceKind::Generated));
    for bytes in [device.total_bytes, device.capacity_bytes, device.address_bytes_max] {
        digest.maybe(bytes);
    }
    digest.maybe(device.mappings_max);
    digest.maybe(header.limit_bytes);
    digest.maybe(header.address_policy.map(|policy| policy as u64));
    digest.number(u64::from(header.settings.is_some()));
    digest.text(header.settings.as_deref().unwrap_or_default());
    digest.number(header.faults.len() as u64);
    for fault in &header.faults {
        digest.text(fault.call.name());
        digest.maybe(match fault.when {
            FaultWhen::Nth(nth) => Some(nth),
            FaultWhen::All => None,
        });
    }
    // Plain data: it can always be serialised.
    let model = header.model.as_ref().and_then(|model| serde_json::to_string(model).ok());
    digest.text(&model.unwrap_or_default());
}

fn tables(digest: &mut Digest, trace: &Trace) {
    digest.number(trace.streams.len() as u64);
    for stream in &trace.streams {
        digest.number(stream.handle);
    }
    digest.number(trace.pools.len() as u64);
    for pool in &trace.pools {
        digest.text(&pool.name);
        digest.number(pool.kind as u64);
        digest.number(u64::from(pool.no_split) << 1 | u64::from(pool.use_on_oom));
    }
    // A name is for people, unless it says which parameter of a model a block holds.
    let has_model = trace.header.model.is_some();
    let names = if has_model { trace.names.as_slice() } else { &[] };
    for texts in [&*trace.settings_changes, &trace.phases, &trace.modules, names] {
        digest.texts(texts);
    }
    digest.number(trace.transfers.len() as u64);
    for transfer in &trace.transfers {
        digest.number(transfer.size_bytes);
        digest.number(transfer.direction as u64);
    }
    digest.number(trace.blocks.len() as u64);
    for block in &trace.blocks {
        digest.number(block.size_bytes);
        let name = if has_model { block.name } else { NameId::NONE };
        digest.number(u64::from(block.stream.0) << 32 | u64::from(name.0));
        digest.number(block.role as u64);
    }
}

fn start(digest: &mut Digest, trace: &Trace) {
    let Some(start) = &trace.start else { return digest.number(0) };
    digest.number(1);
    digest.number(start.segments.len() as u64);
    for (segment, blocks) in start.iter() {
        digest.number(segment.address);
        digest.number(segment.size_bytes);
        digest.number(u64::from(segment.stream.0) << 32 | u64::from(segment.pool.0));
        digest.number(u64::from(segment.large));
        digest.maybe(segment.reservation);
        digest.number(blocks.len() as u64);
        for block in blocks {
            let state = match block.state {
                StartState::Live => 0,
                StartState::Deferred => 1,
                StartState::Free => 2,
            };
            digest.number(block.size_bytes);
            digest.number(u64::from(block.block.0) << 32 | state);
        }
    }
}

/// A number for the kind of an event, fixed for ever, and its id.
fn code(op: Op) -> (u32, u32) {
    match op {
        Op::Alloc(id) => (0, id.0),
        Op::Attempt(id) => (1, id.0),
        Op::Free(id) => (2, id.0),
        Op::Defer(id) => (3, id.0),
        Op::Done(id) => (4, id.0),
        Op::Mark(id) => (5, id.0),
        Op::EmptyCache => (6, 0),
        Op::Settings(id) => (7, id.0),
        Op::PoolEnter(id) => (8, id.0),
        Op::PoolLeave(id) => (9, id.0),
        Op::PoolDelete(id) => (10, id.0),
        Op::ModuleEnter(id) => (11, id.0),
        Op::ModuleLeave(id) => (12, id.0),
        Op::Access(id) => (13, id.0),
        Op::Transfer(id) => (14, id.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{read_native, read_text, write_native};

    const TEXT: &str = "capacity 1GiB\nmark step0.a\nalloc a 100MiB\nalloc b 5\nfree a\n";

    fn of(text: &str) -> u64 {
        fingerprint(&read_text(text).expect("a trace"))
    }

    #[test]
    fn what_an_allocator_sees_counts_and_nothing_else() {
        let number = of(TEXT);
        assert_eq!(of(&format!("name job\n{TEXT}# the end\n")), number, "a name and a comment");
        assert_eq!(of(&TEXT.replace(" a", " x")), number, "names of blocks");
        assert_eq!(of(&TEXT.replace("alloc b", "@1ms alloc b")), number, "times");
        let others = [
            TEXT.replace("alloc b 5", "alloc b 6"),
            TEXT.replace("free a", "defer a"),
            TEXT.replace("free a\n", "free b\n"),
            TEXT.replace("free a\n", ""),
            TEXT.replace("capacity 1GiB", "capacity 2GiB"),
            TEXT.replace("capacity 1GiB", "limit 1GiB"),
            TEXT.replace("capacity 1GiB", "capacity 1GiB\nfail malloc 3"),
            TEXT.replace("alloc b 5", "alloc b 5 stream=7"),
            TEXT.replace("step0.a", "step1.a"),
        ];
        for other in others {
            assert_ne!(of(&other), number, "{other}");
        }
    }

    #[test]
    fn the_format_of_the_file_does_not_count() {
        let trace = read_text(TEXT).expect("a trace");
        let mut bytes = Vec::new();
        write_native(&trace, &mut bytes).expect("written");
        assert_eq!(fingerprint(&read_native(&*bytes).expect("read")), fingerprint(&trace));
    }
}
