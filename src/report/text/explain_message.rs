//! The answer of `explain` for texts: what ran out, whether it is fragmentation, what to do.
//!
//! The one design decision: the first screen is an answer, not a report. It has at most 25 lines:
//! one thing is explained, the sentence with the deciding number first, and everything else that
//! the text holds is summed up in a line. The figures as read and the arithmetic are for `--full`.

mod advice;
mod curve;
mod message;
mod table;

use super::{Style, Tone, counted, percent, printable, wrapped};
use crate::import::{
    Class, CurveClass, CurveDiagnosis, Diagnosis, MemorySummary, MemoryText, OomMessage,
    ReferenceCurve, SummaryClass, SummaryDiagnosis,
};

/// A text about memory and what its parts mean.
#[derive(Clone, Copy, Debug)]
pub struct ExplainedText<'a> {
    /// Name of the file, `-` for standard input.
    pub file: &'a str,
    /// What the text says.
    pub text: &'a MemoryText,
    /// What each message means.
    pub messages: &'a [Diagnosis],
    /// What each table means.
    pub summaries: &'a [SummaryDiagnosis],
    /// What each curve means.
    pub curves: &'a [CurveDiagnosis],
    /// Memory of the device, if it was given.
    pub capacity_bytes: Option<u64>,
    /// Also the figures as read and the arithmetic.
    pub is_full: bool,
}

/// The answer as a screen of text.
pub fn explain_text(explained: &ExplainedText<'_>, style: Style) -> String {
    let messages: Vec<(&OomMessage, &Diagnosis)> =
        explained.text.messages.iter().zip(explained.messages).collect();
    let summaries: Vec<(&MemorySummary, &SummaryDiagnosis)> =
        explained.text.summaries.iter().zip(explained.summaries).collect();
    let curves: Vec<(&ReferenceCurve, &CurveDiagnosis)> =
        explained.text.curves.iter().zip(explained.curves).collect();
    let file = printable(explained.file);
    let mut out = String::new();
    let (mut others, mut other_tables, mut other_curves) =
        (&messages[..], &summaries[..], &curves[..]);
    if let Some((first, rest)) = messages.split_first() {
        out.push_str(&message::message(&file, *first, explained.is_full, style));
        others = rest;
    } else if let Some((first, rest)) = summaries.split_first() {
        out.push_str(&table::table(&file, *first, explained.is_full, style));
        other_tables = rest;
    } else if let Some((first, rest)) = curves.split_first() {
        let capacity = explained.capacity_bytes;
        out.push_str(&curve::curve(&file, *first, capacity, explained.is_full, style));
        other_curves = rest;
    }
    let rest = Others { messages: others, summaries: other_tables, curves: other_curves };
    out.push_str(&rest.told(explained, LINES_MAX.saturating_sub(out.lines().count()), style));
    out
}

/// Longest answer without `--full`, in lines.
const LINES_MAX: usize = 25;
/// Lines that are kept free for what else is in a text.
const LINES_FOR_OTHERS: usize = 2;

/// What is not explained in full.
struct Others<'a> {
    messages: &'a [(&'a OomMessage, &'a Diagnosis)],
    summaries: &'a [(&'a MemorySummary, &'a SummaryDiagnosis)],
    curves: &'a [(&'a ReferenceCurve, &'a CurveDiagnosis)],
}

impl Others<'_> {
    /// A line each if there is room for them, else their numbers.
    fn told(&self, explained: &ExplainedText<'_>, room: usize, style: Style) -> String {
        let left_out = explained.text.messages_left_out;
        let counts = [
            (self.messages.len() as u64 + left_out, "message"),
            (self.summaries.len() as u64, "table"),
            (self.curves.len() as u64, "curve"),
        ];
        let counts = counts.into_iter().filter(|(count, _)| *count > 0);
        let counts: Vec<String> =
            counts.map(|(count, noun)| counted(count, &format!("more {noun}"))).collect();
        if counts.is_empty() {
            return String::new();
        }
        let lines = self.messages.iter().map(|&both| message::summed_up(both));
        let lines = lines.chain(self.summaries.iter().map(|&both| table::summed_up(both)));
        let lines = lines.chain(self.curves.iter().map(|&both| curve::summed_up(both)));
        let mut out = format!("\n{}\n", heading("also in this text", style));
        for line in lines {
            out.push_str(&wrapped("  ", &line, "    "));
            if !explained.is_full && out.lines().count() > room {
                break;
            }
        }
        let fits = explained.is_full || out.lines().count() <= room;
        if fits && left_out == 0 {
            return out;
        }
        if explained.is_full {
            out.push_str(&format!("  {} in all\n", counts.join(", ")));
            return out;
        }
        format!("\n{} in this text: see --full.\n", counts.join(", "))
    }
}

fn heading(text: &str, style: Style) -> String {
    style.paint(Tone::Heading, text)
}

/// The sentence that answers, its first words in the colour of the answer.
fn verdict(words: &str, rest: &str, is_good: bool, style: Style) -> String {
    let tone = if is_good { Tone::Good } else { Tone::Bad };
    let text = wrapped("", &format!("{words} {rest}"), "");
    // Colour after breaking, since its codes have no width.
    match text.strip_prefix(words) {
        Some(rest) => format!("{}{rest}", style.paint(tone, words)),
        None => text,
    }
}

/// A share of one as percent, also where it rounds to nothing.
fn share_words(share: f64) -> String {
    const SHOWN_MIN: f64 = 0.0005;
    if share > 0.0 && share < SHOWN_MIN { "less than 0.1%".to_owned() } else { percent(share) }
}

/// A class as words.
fn class_words(class: Class) -> &'static str {
    match class {
        Class::NotFragmentation => "not fragmentation",
        Class::Outside => "not fragmentation: others hold the memory",
        Class::NearMiss => "a near miss",
        Class::Fragmentation => "fragmentation",
        Class::Partly => "partly fragmentation",
        Class::PrivatePool => "private pools hold the memory",
        Class::Limit => "a limit, not the device",
        Class::Driver => "the driver refused",
        Class::DriverPool => "the driver's own pool or others hold the memory",
        Class::LargerThanDevice => "a request larger than the device",
        Class::Oversubscribed => "more in use than the device has",
        Class::Undecided => "cannot be told from rounded figures",
        Class::Unknown => "too few figures to tell",
    }
}

/// A class of a table as words.
fn summary_words(class: SummaryClass) -> &'static str {
    match class {
        SummaryClass::NotFragmentation => "no fragmentation",
        SummaryClass::Hard => "fragmentation beside live blocks",
        SummaryClass::Soft => "unused segments",
        SummaryClass::Deferred => "memory that waits for other streams",
        SummaryClass::Internal => "rounding inside blocks",
        SummaryClass::Unknown => "too few rows to tell",
    }
}

/// A class of a curve as words.
fn curve_words(class: CurveClass) -> &'static str {
    match class {
        CurveClass::GrowingLive => "what the program holds grows",
        CurveClass::GrowingStranded => "fragmentation grows",
        CurveClass::NotFragmentation => "no fragmentation",
        CurveClass::Deferred => "memory that waits for other streams",
        CurveClass::Fragmentation => "steady, with a part unused",
        CurveClass::Unknown => "too few figures to tell",
    }
}
