//! `explain` for texts: messages, tables and logs about memory.
//!
//! # JSON
//!
//! One object: `schema_version`, `fraglab_version`, `file`, `kind` (what is explained in full:
//! `oom_message`, `memory_summary` or `step_log`), `class` and `is_fragmentation` (`yes`, `no`,
//! `partly`, `cannot_be_told`) of that, and everything found: `messages`, `messages_left_out`,
//! `memory_summaries`, `step_logs`, each element with its figures and a `diagnosis`. A size from a
//! text is `{bytes, error_bytes}`: as printed, and how far it may be off.

use serde::Serialize;

use super::Args;
use crate::cli::Verdict;
use crate::cli::console::Console;
use crate::cli::output;
use crate::import::{
    CurveClass, CurveDiagnosis, Diagnosis, IsFragmentation, MemorySummary, MemoryText, OomMessage,
    ReferenceCurve, SummaryClass, SummaryDiagnosis, diagnose,
};
use crate::report::json;
use crate::report::text::{self, ExplainedText};

#[derive(Serialize)]
struct Answer<'a> {
    schema_version: u32,
    fraglab_version: &'static str,
    file: &'a str,
    kind: &'static str,
    class: serde_json::Value,
    is_fragmentation: IsFragmentation,
    messages: Vec<Explained<'a, OomMessage, Diagnosis>>,
    messages_left_out: u64,
    memory_summaries: Vec<Explained<'a, MemorySummary, SummaryDiagnosis>>,
    step_logs: Vec<Explained<'a, ReferenceCurve, CurveDiagnosis>>,
}

/// Something found, with what it means.
#[derive(Serialize)]
struct Explained<'a, F, D> {
    #[serde(flatten)]
    found: &'a F,
    diagnosis: &'a D,
}

/// Explains what a text says of memory.
///
/// # Errors
/// If nothing is left for the GPU asked for, or an output cannot be written.
pub(super) fn execute(
    args: &Args,
    mut found: MemoryText,
    console: &Console,
) -> anyhow::Result<Verdict> {
    let file = args.file.display().to_string();
    if let Some(gpu) = args.gpu {
        found.keep_device(gpu);
        anyhow::ensure!(!found.is_empty(), "{file}: nothing is said of GPU {gpu}: leave out --gpu");
    }
    let messages: Vec<Diagnosis> = found.messages.iter().map(diagnose).collect();
    let summaries: Vec<SummaryDiagnosis> =
        found.summaries.iter().map(MemorySummary::diagnose).collect();
    let capacity_bytes = args.capacity.map(|size| size.0);
    let curves: Vec<CurveDiagnosis> =
        found.curves.iter().map(|curve| curve.diagnose(capacity_bytes)).collect();
    let explained = ExplainedText {
        file: &file,
        text: &found,
        messages: &messages,
        summaries: &summaries,
        curves: &curves,
        capacity_bytes,
        is_full: args.full,
    };
    if let Some(path) = &args.json {
        let text = json::pretty(&answer(&explained)?)?;
        output::save_text(path, &text, console)?;
    }
    if args.shows_text() {
        console.print(&text::explain_text(&explained, console.style()))?;
    }
    Ok(Verdict::Good)
}

fn answer<'a>(explained: &ExplainedText<'a>) -> anyhow::Result<Answer<'a>> {
    let (kind, class, is_fragmentation) = if let Some(first) = explained.messages.first() {
        ("oom_message", serde_json::to_value(first.class)?, first.is_fragmentation)
    } else if let Some(first) = explained.summaries.first() {
        ("memory_summary", serde_json::to_value(first.class)?, of_summary(first.class))
    } else {
        let class = explained.curves.first().map_or(CurveClass::Unknown, |first| first.class);
        ("step_log", serde_json::to_value(class)?, of_curve(class))
    };
    Ok(Answer {
        schema_version: 1,
        fraglab_version: env!("CARGO_PKG_VERSION"),
        file: explained.file,
        kind,
        class,
        is_fragmentation,
        messages: pairs(&explained.text.messages, explained.messages),
        messages_left_out: explained.text.messages_left_out,
        memory_summaries: pairs(&explained.text.summaries, explained.summaries),
        step_logs: pairs(&explained.text.curves, explained.curves),
    })
}

fn pairs<'a, F, D>(found: &'a [F], diagnoses: &'a [D]) -> Vec<Explained<'a, F, D>> {
    let pairs = found.iter().zip(diagnoses);
    pairs.map(|(found, diagnosis)| Explained { found, diagnosis }).collect()
}

fn of_summary(class: SummaryClass) -> IsFragmentation {
    match class {
        SummaryClass::Hard | SummaryClass::Soft | SummaryClass::Internal => IsFragmentation::Yes,
        SummaryClass::NotFragmentation | SummaryClass::Deferred => IsFragmentation::No,
        SummaryClass::Unknown => IsFragmentation::CannotBeTold,
    }
}

fn of_curve(class: CurveClass) -> IsFragmentation {
    match class {
        CurveClass::GrowingStranded | CurveClass::Fragmentation => IsFragmentation::Yes,
        CurveClass::GrowingLive | CurveClass::NotFragmentation | CurveClass::Deferred => {
            IsFragmentation::No
        }
        CurveClass::Unknown => IsFragmentation::CannotBeTold,
    }
}
