//! `fraglab explain` for texts: messages as people posted them, tables, logs, and what people do to
//! them on the way.

mod damage;
mod logs;
mod program;
mod rounding;
mod tables;
mod wordings;

use serde::Deserialize;

use fraglab::import::{Diagnosis, MemoryText, diagnose};
use fraglab::report::text::{ExplainedText, Style, explain_text};

/// A message of `messages.toml`.
#[derive(Debug, Deserialize)]
pub(crate) struct Posted {
    source: String,
    class: String,
    is_fragmentation: String,
    missing_mib: Option<f64>,
    text: String,
}

pub(crate) fn posted() -> Vec<Posted> {
    #[derive(Deserialize)]
    struct File {
        message: Vec<Posted>,
    }
    let file: File = toml::from_str(include_str!("explain_messages/messages.toml")).expect("TOML");
    file.message
}

/// A value as it is written in JSON.
pub(crate) fn word(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).expect("plain data");
    value.as_str().expect("a word").to_owned()
}

/// What is found in a text, with what it means, as the program shows it.
pub(crate) fn screen(text: &str, is_full: bool) -> String {
    let found = MemoryText::read(text);
    let messages: Vec<Diagnosis> = found.messages.iter().map(diagnose).collect();
    let summaries: Vec<_> = found.summaries.iter().map(|table| table.diagnose()).collect();
    let curves: Vec<_> = found.curves.iter().map(|curve| curve.diagnose(None)).collect();
    let explained = ExplainedText {
        file: "-",
        text: &found,
        messages: &messages,
        summaries: &summaries,
        curves: &curves,
        capacity_bytes: None,
        is_full,
    };
    explain_text(&explained, Style::default())
}

/// The only message of a text.
#[track_caller]
pub(crate) fn only(text: &str) -> (fraglab::import::OomMessage, Diagnosis) {
    let found = MemoryText::read(text);
    let [message] = &found.messages[..] else {
        panic!("{} messages: {text}", found.messages.len())
    };
    (message.clone(), diagnose(message))
}

#[test]
fn posted_messages_are_classified() {
    let posted = posted();
    assert!(posted.len() >= 75, "{}", posted.len());
    for message in &posted {
        let (_, diagnosis) = only(&message.text);
        let source = &message.source;
        assert_eq!(word(&diagnosis.class), message.class, "{source}");
        assert_eq!(word(&diagnosis.is_fragmentation), message.is_fragmentation, "{source}");
        if let Some(expected) = message.missing_mib {
            let missing = diagnosis.missing_bytes.expect(source) as f64 / f64::from(1 << 20);
            assert!((missing - expected).abs() < 0.02, "{source}: {missing}, not {expected}");
        }
    }
}

/// Every class that a person can meet is met by somebody.
#[test]
fn posted_messages_cover_the_classes() {
    let posted = posted();
    for class in [
        "not_fragmentation",
        "outside",
        "near_miss",
        "fragmentation",
        "partly",
        "limit",
        "driver",
        "driver_pool",
        "larger_than_device",
        "oversubscribed",
        "unknown",
    ] {
        assert!(posted.iter().any(|message| message.class == class), "{class}");
    }
}

#[test]
fn the_answer_is_one_narrow_screen() {
    for message in posted() {
        let screen = screen(&message.text, false);
        assert!(screen.lines().count() <= 25, "{}\n{screen}", message.source);
        let wide = screen.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None, "{}", message.source);
        let full = self::screen(&message.text, true);
        assert!(full.starts_with(screen.trim_end()), "{full}");
        assert!(full.len() > screen.len(), "{}", message.source);
    }
}

/// The reason people are told in vain to tune the allocator: the answer says so.
#[test]
fn nobody_is_told_to_tune_what_cannot_help() {
    for message in posted() {
        let screen = screen(&message.text, false);
        let recommends = screen.contains("=expandable_segments:True before torch is imported");
        let may_help = matches!(message.class.as_str(), "fragmentation" | "partly");
        assert_eq!(recommends, may_help, "{}\n{screen}", message.source);
        if message.class == "not_fragmentation" {
            assert!(screen.contains("No setting of the allocator helps"), "{screen}");
        }
    }
}
