//! What the allocator of the recorded run did: kept for comparison, never fed to an allocator.
//!
//! The recorded order of everything can be rebuilt from the events and this table. Event `i` stands
//! for the actions with `event == i`, in order, followed by what the event itself implies:
//!
//! ```text
//!   Alloc(b)    segment_free*, free_completed*, segment_alloc ... then  alloc at address(b)
//!   Attempt(b)  ...                                                then  (an Oom action is listed)
//!   Free(b)                     free_requested at address(b), free_completed at address(b)
//!   Defer(b)                    free_requested at address(b)
//!   Done(b)                     free_completed at address(b), unless an action already listed it
//!   EmptyCache  free_completed*, segment_free*, segment_unmap*
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::units::{BlockId, StreamId};

/// What kind of recorded action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordedKind {
    /// Device memory obtained.
    SegmentAlloc,
    /// Device memory returned.
    SegmentFree,
    /// Pages mapped.
    SegmentMap,
    /// Pages unmapped.
    SegmentUnmap,
    /// A deferred block completed inside this event (a flush or an empty_cache waited for it).
    FreeCompleted,
    /// The request was refused. `address` holds the device's free bytes, `size_bytes` the rounded size.
    Oom,
}

/// One recorded action that an event does not imply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedAction {
    /// Index of the event during which it happened.
    pub event: u32,
    /// What happened.
    pub kind: RecordedKind,
    /// The completed block for `FreeCompleted`, else [`BlockId::NONE`].
    pub block: BlockId,
    /// Stream of the segment.
    pub stream: StreamId,
    /// Base of the segment or first page. For `Oom`: free bytes of the device.
    pub address: u64,
    /// Size of the segment or of the mapped pages. For `Oom`: the rounded size.
    pub size_bytes: u64,
}

/// What a `NAME.truth.json` tells beside a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truth {
    /// `torch.cuda.memory_stats()` at the end, flat names.
    pub stats: BTreeMap<String, i64>,
    /// How the recorded run ended: `ok`, or the text of its error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// The job reset peak statistics while it ran, so peaks count from an unknown moment.
    #[serde(default)]
    pub peak_stats_reset: bool,
}

/// What the recorded allocator did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// Address of every block when it was handed out, by [`BlockId`]; 0 where unknown (an
    /// attempt). As long as the block table.
    pub block_addresses: Vec<u64>,
    /// Actions that the events do not imply, in order of `event`.
    pub actions: Vec<RecordedAction>,
    /// What the recorded allocator reported of itself.
    pub truth: Option<Truth>,
}
