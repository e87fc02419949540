//! Texts that people hold in their hands when memory has run out: messages, tables, logs.
//!
//! ```text
//!   bytes ── decode ──> text ─┬─ clean ── message ──> OomMessage ── diagnosis ──> Diagnosis
//!                             ├─ memory_summary ────> MemorySummary
//!                             └─ step_log ──────────> ReferenceCurve
//! ```
//!
//! A person pastes what there is: a line, a traceback, the logs of eight ranks. So everything that
//! is understood is looked for everywhere, and nothing found in between is an error.

mod amount;
mod clean;
mod diagnosis;
mod message;

pub use amount::Amount;
pub use diagnosis::{
    Certainty, Class, Contradiction, Diagnosis, IsFragmentation, NEGLIGIBLE_SHARE, Severity,
    diagnose,
};
pub use message::{Advice, OomMessage, ProcessUse, Wording};

pub(crate) use amount::{amount, split_number};
pub(crate) use clean::{plain, rank_of};

use super::memory_summary::{MemorySummary, read_memory_summaries};
use super::step_log::{ReferenceCurve, read_step_logs};
use clean::Squeezed;

/// Everything that a text says of GPU memory.
#[derive(Clone, Debug, Default)]
pub struct MemoryText {
    /// Messages, each once, in the order of the text.
    pub messages: Vec<OomMessage>,
    /// Messages beyond those that are kept.
    pub messages_left_out: u64,
    /// Tables of `torch.cuda.memory_summary()`, in the order of the text.
    pub summaries: Vec<MemorySummary>,
    /// Memory lines of frameworks, a curve a framework and rank.
    pub curves: Vec<ReferenceCurve>,
}

/// Words without which no text is worth a search, in small letters.
const HINTS: [&str; 6] =
    ["out of memory", "tried to allocate", "out_of_memory", "bad_alloc", "max_ma", "max reserved"];

impl MemoryText {
    /// What is said of an input that holds nothing of the kind.
    pub const EXPECTED: &str = "nothing about GPU memory is found; expected a message (CUDA, HIP, \
        XPU, NPU or MPS out of memory, cudaMallocAsync, JAX, RMM), a table of memory_summary(), \
        memory lines of a log (DeepSpeed, Megatron, torchtune, llama-recipes, STAlloc), or a trace";

    /// Bytes as text: UTF-16 with a byte order mark, as PowerShell redirects it, else UTF-8 with
    /// replacements for what is not.
    pub fn decode(bytes: &[u8]) -> String {
        let units = |pairs: &[u8], unit: fn([u8; 2]) -> u16| -> String {
            let units: Vec<u16> =
                pairs.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
            String::from_utf16_lossy(&units)
        };
        match bytes {
            [0xff, 0xfe, rest @ ..] => units(rest, u16::from_le_bytes),
            [0xfe, 0xff, rest @ ..] => units(rest, u16::from_be_bytes),
            _ => String::from_utf8_lossy(bytes).into_owned(),
        }
    }

    /// Whether the beginning of a file may be text in an encoding other than UTF-8.
    pub fn is_probable_text(head: &[u8]) -> bool {
        matches!(head, [0xff, 0xfe, ..] | [0xfe, 0xff, ..]) || !head.contains(&0)
    }

    /// Whether a text holds words that something understood is made of.
    pub fn is_hinted(text: &str) -> bool {
        let text = text.to_ascii_lowercase();
        HINTS.iter().any(|hint| text.contains(hint))
    }

    /// Reads what a text says.
    pub fn read(text: &str) -> MemoryText {
        let (messages, messages_left_out) = message::read_messages(&Squeezed::new(text));
        MemoryText {
            messages,
            messages_left_out,
            summaries: read_memory_summaries(text),
            curves: read_step_logs(text),
        }
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.summaries.is_empty() && self.curves.is_empty()
    }

    /// Leaves only what belongs to a device, as far as the text tells to which it belongs. A curve
    /// tells a rank, not a device, and stays.
    pub fn keep_device(&mut self, index: u32) {
        self.messages.retain(|message| message.device_index.is_none_or(|other| other == index));
        self.summaries.retain(|summary| summary.device_index.is_none_or(|other| other == index));
    }
}
