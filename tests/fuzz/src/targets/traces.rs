//! What must hold of every trace that a reader accepts, whatever the file said.

use fraglab::alloc::spec::AllocSpec;
use fraglab::device::CostProfile;
use fraglab::engine::{Observe, RunError, RunOptions, run, verify};
use fraglab::report::text::{self, FileFacts, Style};
use fraglab::trace::{
    AnonymizeOptions, Trace, anonymize, read_native, read_text, validate, write_native, write_text,
};

/// Longer traces are not replayed: a target should give thousands of answers a second.
const REPLAYED_EVENTS_MAX: usize = 400;

/// Goes with a trace where a user would: checks, facts, other formats, a replay.
pub(super) fn use_trace(trace: &Trace, warnings: Vec<String>) {
    validate(trace).expect("a reader gives valid traces only");
    let facts = FileFacts::new("input".to_owned(), None, trace, warnings);
    assert_printable(&text::info(&facts, Style::default()));
    keep_in_native(trace);
    keep_in_text(trace);
    let mut nameless = trace.clone();
    anonymize(&mut nameless, AnonymizeOptions::default());
    validate(&nameless).expect("a trace without names is valid");
    if trace.events.len() <= REPLAYED_EVENTS_MAX {
        replay(trace, "caching", &options());
        if let Ok(result) = verify(trace) {
            assert_printable(&text::verify(&result, Style::default()));
        }
    }
}

/// The native form holds everything.
pub(super) fn keep_in_native(trace: &Trace) {
    let mut file = Vec::new();
    write_native(trace, &mut file).expect("a valid trace can be written");
    let again = read_native(&file[..]).expect("what was written can be read");
    assert_eq!(again, *trace, "the native form lost something");
}

/// The text form holds the requests.
pub(super) fn keep_in_text(trace: &Trace) {
    let mut file = Vec::new();
    write_text(trace, &mut file).expect("a valid trace can be written");
    let file = String::from_utf8(file).expect("the text form is text");
    let again = read_text(&file).unwrap_or_else(|error| panic!("{error}\n{file}"));
    assert_eq!(
        again.requested_bytes_peak(),
        trace.requested_bytes_peak(),
        "the text form lost requests"
    );
}

/// Every check on, and nothing given: what the trace says counts.
pub(super) fn options() -> RunOptions {
    let costs = CostProfile::shipped("h200").expect("ships");
    RunOptions { paranoid: true, ..RunOptions::new(costs) }
}

/// Replays a trace. That an allocator cannot be built, or memory runs out, is an answer like any
/// other; a broken contract is not.
pub(super) fn replay(trace: &Trace, spec: &str, options: &RunOptions) {
    let spec: AllocSpec = spec.parse().expect("a specification");
    replay_with(trace, &spec, options);
}

/// [`replay`] with a specification that was read already.
pub(super) fn replay_with(trace: &Trace, spec: &AllocSpec, options: &RunOptions) {
    match run(trace, spec, options, Observe::default()) {
        Ok(observed) => {
            let result = &observed.result;
            let peaks = &result.peaks;
            assert!(peaks.requested_bytes_peak <= peaks.allocated_bytes_peak, "{spec}: {peaks:?}");
            assert!(peaks.allocated_bytes_peak <= peaks.active_bytes_peak, "{spec}: {peaks:?}");
            assert!(peaks.active_bytes_peak <= peaks.reserved_bytes_peak, "{spec}: {peaks:?}");
        }
        Err(RunError::Contract { allocator, event, message }) => {
            panic!("{allocator} broke the contract at event {event}: {message}")
        }
        Err(error) => assert_said(&error),
    }
}

/// A refusal says something. What of it reaches a terminal is the command line's care.
pub(super) fn assert_said(error: &dyn std::error::Error) {
    assert!(!error.to_string().is_empty(), "{error:?} says nothing");
}

/// A terminal takes no orders from a file: reports are text and line ends.
pub(super) fn assert_printable(shown: &str) {
    for line in shown.lines() {
        assert_eq!(text::printable(line), line, "this would reach the terminal");
    }
}
