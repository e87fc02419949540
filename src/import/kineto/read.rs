//! Walks over the JSON and keeps what is about memory.
//!
//! Keys come in any order, so an event's numbers are gathered first and judged when it ends. Once
//! `ph` or `name` shows that an event is of no interest, the rest of it is skipped unread.

use std::fmt;
use std::io::{BufReader, Read};

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use super::KinetoError;
use super::value::{Args, DeviceProperties, Scalar, Value};
use crate::import::intern::Interner;

const BUFFER_BYTES: usize = 1 << 17;

/// What is kept of a file.
#[derive(Debug)]
pub(super) struct Profile {
    /// Memory events of all devices, in the order of the file.
    pub(super) memory: Vec<MemoryEvent>,
    /// Ranges that the program annotated, in the order of the file.
    pub(super) annotations: Vec<Annotation>,
    /// Their names.
    pub(super) names: Interner<u8>,
    /// The GPUs that the file describes.
    pub(super) devices: Vec<DeviceProperties>,
    /// What is added to times for Unix time, where the file tells.
    pub(super) base_time_ns: Option<i64>,
    /// Events of any kind.
    pub(super) events: u64,
    /// Memory events without an address.
    pub(super) without_address: u64,
}

/// Which memory: PyTorch's number of the kind of device, and its index among its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DeviceKey {
    pub(super) kind: i32,
    pub(super) index: i32,
}

/// A `[memory]` or `[OutOfMemory]` event.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryEvent {
    /// Nanoseconds of the profiler's clock.
    pub(super) time_ns: i64,
    /// `Ev Idx`; 0 where there is none.
    pub(super) index: u64,
    pub(super) device: DeviceKey,
    /// 0 for a refused request.
    pub(super) address: u64,
    /// Above 0 handed out, below 0 freed; of a refused request always above 0.
    pub(super) bytes: i64,
    pub(super) refused: bool,
    /// What the allocator has handed out after the event.
    pub(super) allocated_bytes: Option<u64>,
    /// What it holds after the event.
    pub(super) reserved_bytes: Option<u64>,
}

impl MemoryEvent {
    /// How many bytes more are handed out after it.
    pub(super) fn change_bytes(&self) -> i64 {
        if self.refused { 0 } else { self.bytes }
    }
}

/// A range of the program's own thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Annotation {
    pub(super) begin_ns: i64,
    pub(super) end_ns: i64,
    /// Id among the names.
    pub(super) name: u32,
    pub(super) thread: u64,
}

/// Reads a file to its end.
pub(super) fn profile(reader: impl Read) -> Result<Profile, KinetoError> {
    let mut profile = Profile {
        memory: Vec::new(),
        annotations: Vec::new(),
        names: Interner::new(),
        devices: Vec::new(),
        base_time_ns: None,
        events: 0,
        without_address: 0,
    };
    let reader = BufReader::with_capacity(BUFFER_BYTES, reader);
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    deserializer.deserialize_any(Document { profile: &mut profile })?;
    deserializer.end()?;
    Ok(profile)
}

/// Keys of the file that matter.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
enum FileKey {
    TraceEvents,
    DeviceProperties,
    BaseTimeNanoseconds,
    #[serde(other)]
    Other,
}

/// Keys of an event that matter.
#[derive(Deserialize)]
#[serde(field_identifier)]
enum EventKey {
    #[serde(rename = "ph")]
    Phase,
    #[serde(rename = "cat")]
    Category,
    #[serde(rename = "name")]
    Name,
    #[serde(rename = "ts")]
    Time,
    #[serde(rename = "dur")]
    Duration,
    #[serde(rename = "tid")]
    Thread,
    #[serde(rename = "args")]
    Args,
    #[serde(other)]
    Other,
}

/// The whole file.
struct Document<'a> {
    profile: &'a mut Profile,
}

impl<'de> Visitor<'de> for Document<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with traceEvents, or a list of events")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_events = false;
        while let Some(key) = map.next_key::<FileKey>()? {
            match key {
                FileKey::TraceEvents => {
                    has_events = true;
                    map.next_value_seed(Events { profile: self.profile })?;
                }
                FileKey::DeviceProperties => {
                    map.next_value_seed(Value::Devices(&mut self.profile.devices))?;
                }
                FileKey::BaseTimeNanoseconds => {
                    self.profile.base_time_ns = map.next_value::<Scalar>()?.whole();
                }
                FileKey::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        if has_events { Ok(()) } else { Err(A::Error::custom("no traceEvents in the object")) }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        Events { profile: self.profile }.visit_seq(seq)
    }
}

/// The list of events.
struct Events<'a> {
    profile: &'a mut Profile,
}

impl<'de> DeserializeSeed<'de> for Events<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut event = EventParts::default();
        loop {
            event.clear();
            if seq.next_element_seed(&mut event)?.is_none() {
                return Ok(());
            }
            self.profile.events += 1;
            event.keep(self.profile).map_err(A::Error::custom)?;
        }
    }
}

/// An event, as far as it matters here. Its texts are used again for the next one.
#[derive(Default)]
struct EventParts {
    phase: String,
    category: String,
    name: String,
    time: Scalar,
    duration: Scalar,
    thread: Scalar,
    args: Args,
}

impl EventParts {
    fn clear(&mut self) {
        self.phase.clear();
        self.category.clear();
        self.name.clear();
        self.time = Scalar::default();
        self.duration = Scalar::default();
        self.thread = Scalar::default();
        self.args = Args::default();
    }

    fn is_memory(&self) -> bool {
        matches!(self.name.as_str(), "[memory]" | "[OutOfMemory]")
    }

    /// What came so far tells that it is no memory event, so its `args` do not matter.
    fn has_other_args(&self) -> bool {
        (!self.name.is_empty() && !self.is_memory())
            || !matches!(self.phase.as_str(), "" | "i" | "I")
    }

    /// Keeps it if it is about memory or a range of the program.
    fn keep(&self, profile: &mut Profile) -> Result<(), String> {
        match self.phase.as_str() {
            "i" | "I" if self.is_memory() => self.keep_memory(profile),
            "X" if self.category == "user_annotation" => {
                self.keep_annotation(profile);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn keep_memory(&self, profile: &mut Profile) -> Result<(), String> {
        let args = &self.args;
        let refused = self.name == "[OutOfMemory]";
        let missing = |key: &str| format!("a {} event has no number `{key}`", self.name);
        let bytes = args.bytes.whole().ok_or_else(|| missing("Bytes"))?;
        let kind = args.device_kind.small().ok_or_else(|| missing("Device Type"))?;
        let index = args.device_index.small().ok_or_else(|| missing("Device Id"))?;
        let address = args.address.bits();
        if !refused && address.is_none() {
            profile.without_address += 1;
            return Ok(());
        }
        profile.memory.push(MemoryEvent {
            time_ns: self.time.microseconds_in_ns().ok_or_else(|| missing("ts"))?,
            index: args.index.bits().unwrap_or(0),
            device: DeviceKey { kind, index },
            address: address.filter(|_| !refused).unwrap_or(0),
            bytes,
            refused,
            allocated_bytes: args.allocated_bytes.count(),
            reserved_bytes: args.reserved_bytes.count(),
        });
        Ok(())
    }

    /// A range without times, or more names than ids, is nothing to stop for: phases only tell
    /// people where they are.
    fn keep_annotation(&self, profile: &mut Profile) {
        let Some(begin_ns) = self.time.microseconds_in_ns() else { return };
        let duration_ns = self.duration.microseconds_in_ns().unwrap_or(0).max(0);
        let Some(name) = profile.names.intern(self.name.as_bytes()) else { return };
        let thread = self.thread.bits().unwrap_or(u64::MAX);
        let end_ns = begin_ns.saturating_add(duration_ns);
        profile.annotations.push(Annotation { begin_ns, end_ns, name, thread });
    }
}

impl<'de> DeserializeSeed<'de> for &mut EventParts {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut EventParts {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key()? {
            let mut text = |buffer| map.next_value_seed(Value::text(buffer)).map(drop);
            match key {
                EventKey::Phase => text(&mut self.phase)?,
                EventKey::Category => text(&mut self.category)?,
                EventKey::Name => text(&mut self.name)?,
                EventKey::Time => self.time = map.next_value()?,
                EventKey::Duration => self.duration = map.next_value()?,
                EventKey::Thread => self.thread = map.next_value()?,
                EventKey::Args if !self.has_other_args() => {
                    map.next_value_seed(Value::Args(&mut self.args))?;
                }
                EventKey::Args | EventKey::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}
