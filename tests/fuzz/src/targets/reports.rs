//! Everything that is told of a trace, for traces that nobody would record: sizes at the ends of what
//! there is, names that a browser or a terminal could take for orders.

use fraglab::alloc::spec::AllocSpec;
use fraglab::engine::{
    CapacitySearch, Observe, Observed, Prepared, RunError, RunOptions, When, moments, run,
    smallest_capacity,
};
use fraglab::experiment::advise::{AdviceRequest, Goal, advise};
use fraglab::experiment::diff::{DiffAt, DiffRequest, diff_traces, usual_grouping};
use fraglab::experiment::explain::explain;
use fraglab::metrics::ENVELOPE_POINTS;
use fraglab::report::html::{Cell, Page, PageError, page};
use fraglab::report::text::{self, Style, TraceRuns};
use fraglab::trace::{Trace, read_text};
use fraglab::units::GIB;

use super::as_text;
use super::files::repeats_much;
use super::traces::{assert_printable, assert_said, options};

/// Longer traces are left to other targets: an explanation takes dozens of replays.
const EXPLAINED_EVENTS_MAX: usize = 40;
/// The same for advice, which takes hundreds.
const ADVISED_EVENTS_MAX: usize = 10;
/// Smallest devices are looked for up to requests of this size: an allocator of pieces of 2 MiB makes
/// half a million of them for 1 TiB, on dozens of devices.
const SEARCHED_BYTES_MAX: u64 = 64 * GIB;
/// Blocks of a map.
const MAP_BLOCKS: usize = 100;

/// The text form, through replay, page, explanation, comparison and advice.
pub(super) fn reports(data: &[u8]) {
    let Some(text) = as_text(data).filter(|text| !repeats_much(text)) else { return };
    let Ok(trace) = read_text(text) else { return };
    if trace.events.len() > EXPLAINED_EVENTS_MAX {
        return;
    }
    let options = options();
    let spec: AllocSpec = "caching".parse().expect("a specification");
    let observe = Observe {
        steps: true,
        envelope: Some(ENVELOPE_POINTS),
        map_blocks: Some(MAP_BLOCKS),
        ..Observe::default()
    };
    let observed = match run(&trace, &spec, &options, observe) {
        Ok(observed) => observed,
        Err(RunError::Contract { event, message, .. }) => panic!("event {event}: {message}"),
        Err(error) => return assert_said(&error),
    };
    tell_run(&trace, &observed);
    show_page(&trace, &observed, &spec, &options);
    match explain(&trace, &options, None, &|_, _| ()) {
        Ok(explanation) => {
            assert_printable(&text::explain(&explanation, true, Style::default()));
            assert_printable(&text::explain(&explanation, false, Style::default()));
        }
        Err(error) => assert_said(&error),
    }
    compare_with_itself(&trace, &spec, &options);
    let is_searched = trace.blocks.iter().all(|block| block.size_bytes <= SEARCHED_BYTES_MAX);
    if trace.events.len() <= ADVISED_EVENTS_MAX && is_searched {
        advise_on(&trace, &options);
    }
}

fn tell_run(trace: &Trace, observed: &Observed) {
    assert_printable(&text::run(
        &TraceRuns {
            settings: trace.header.settings.as_deref(),
            share_is_bound: false,
            recorded_refusal: trace.first_attempt(),
            recorded_reserved_bytes_peak: trace.recorded_reserved_bytes_peak(),
            results: &[&observed.result],
        },
        Style::default(),
    ));
}

/// The page runs the scripts that it is made with, and no others.
fn show_page(trace: &Trace, observed: &Observed, spec: &AllocSpec, options: &RunOptions) {
    let prepared = Prepared::new(trace, options);
    let moments = moments(&prepared, spec, None, &[When::FirstRefusal, When::ReservedPeak])
        .expect("what was replayed once is replayed again");
    let moment = moments.into_iter().flatten().next();
    let cell = Cell { label: "caching".to_owned(), observed, moment, compared: None };
    let settings = trace.header.settings.as_deref();
    match page(&Page { trace, settings, cells: &[cell], shown: 0 }) {
        Ok(files) => {
            let html = files.html.to_ascii_lowercase();
            let (opened, closed) =
                (html.matches("<script").count(), html.matches("</script").count());
            assert_eq!((opened, closed), (SCRIPTS, SCRIPTS), "a name became a script");
        }
        Err(PageError::Figure(error)) => assert_said(&error),
        Err(error) => panic!("{error}"),
    }
}

/// Scripts of a page: its data, and what draws it.
const SCRIPTS: usize = 2;

fn compare_with_itself(trace: &Trace, spec: &AllocSpec, options: &RunOptions) {
    let by = usual_grouping([trace, trace]);
    let request = DiffRequest { spec, at: DiffAt::RequestedPeak, by };
    match diff_traces([trace, trace], &request, options) {
        Ok(diff) => {
            assert!(diff.same_requests && diff.same_sizes, "a trace differs from itself");
            assert_printable(&text::diff_traces(&diff, 10, Style::default()));
        }
        Err(error) => assert_said(&error),
    }
}

fn advise_on(trace: &Trace, options: &RunOptions) {
    let search = CapacitySearch { check_points: 2 };
    let request =
        AdviceRequest { goal: Goal::Capacity, what_ifs: Vec::new(), capacity: Some(search) };
    match advise(trace, options, &request, &|_, _| ()) {
        Ok(advice) => {
            let prepared = Prepared::new(trace, options);
            let summary = prepared.summary();
            assert_printable(&text::advise(summary, &advice, &[], true, Style::default()));
        }
        Err(error) => assert_said(&error),
    }
    for name in ["expandable", "stitch", "best-fit"] {
        let spec: AllocSpec = name.parse().expect("a specification");
        let prepared = Prepared::new(trace, options);
        match smallest_capacity(&prepared, &spec, search) {
            Ok(found) => {
                let above = found.capacity_bytes.zip(found.refused_bytes_max);
                assert!(
                    found.non_monotone || above.is_none_or(|(enough, refused)| enough > refused),
                    "{name}: {found:?}"
                );
            }
            Err(error) => assert_said(&error),
        }
    }
}
