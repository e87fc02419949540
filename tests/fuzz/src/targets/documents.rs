//! Descriptions in TOML, and the JSON files that commands read.

use std::path::PathBuf;

use fraglab::chunk::LinkCosts;
use fraglab::device::{CostProfile, DeviceCall};
use fraglab::experiment::check::Baseline;
use fraglab::experiment::diff::{diff_results, parse_results};
use fraglab::experiment::{Folders, cells, latency_rows, name_columns, read_description};
use fraglab::report::text::{self, Style};
use fraglab::trace::validate;
use fraglab::workload::{Job, activation_estimate, generate, read_job, units, write_job};

use super::as_text;
use super::traces::{assert_printable, assert_said, options, replay};

/// A description of a job, as `fraglab gen` reads it.
pub(super) fn job(data: &[u8]) {
    let Some(text) = as_text(data) else { return };
    let job = match read_job(text, &[]) {
        Ok(job) => job,
        Err(error) => {
            assert_said(&error);
            return;
        }
    };
    let again = read_job(&write_job(&job), &[]);
    assert_eq!(again.as_ref(), Ok(&job), "{}", write_job(&job));
    if !is_small(&job) {
        return;
    }
    activation_estimate(&job, &units(&job));
    match generate(&job) {
        Ok(trace) => {
            validate(&trace).expect("a generated trace is valid");
            if trace.events.len() < 3000 {
                replay(&trace, "caching", &options());
                replay(&trace, "chunk", &options());
            }
        }
        // `Invalid` is a mistake of this program.
        Err(error @ fraglab::workload::GenerateError::Invalid(_)) => panic!("{error}"),
        Err(error) => assert_said(&error),
    }
}

/// Whether its trace is made in a few milliseconds.
fn is_small(job: &Job) -> bool {
    let work = [
        job.shape.layers,
        job.train.steps,
        job.train.micro_batches,
        job.parallel.virtual_stages,
        job.shape.experts.max(1),
    ];
    work.into_iter().fold(1, u64::saturating_mul) <= 32
}

/// A description of an experiment: its cells, and the rows that need no replay.
pub(super) fn experiment(data: &[u8]) {
    let Some(text) = as_text(data) else { return };
    let described = read_description(text).and_then(|description| {
        name_columns(&description);
        let nowhere = PathBuf::from("no-such-folder");
        let folders = Folders { base: nowhere.clone(), recordings: nowhere };
        latency_rows(&description)?;
        cells(&description, &folders)
    });
    if let Err(error) = described {
        assert_said(&error);
        error.excerpt();
    }
}

/// The JSON files that commands read: costs of device calls and of copies, a baseline, results.
pub(super) fn json(data: &[u8]) {
    let Some(text) = as_text(data) else { return };
    match CostProfile::from_json(text) {
        Ok(profile) => {
            for call in DeviceCall::ALL {
                for size_bytes in [0, 1, 2 << 20, 1 << 40, u64::MAX] {
                    let cost_ns = profile.cost_ns(call, size_bytes);
                    assert!(cost_ns >= 0.0, "{call:?} of {size_bytes}: {cost_ns}");
                }
            }
            let written = profile.to_json().expect("plain data");
            CostProfile::from_json(&written).expect("what was written can be read");
        }
        Err(error) => assert_said(&error),
    }
    if let Err(error) = LinkCosts::from_json(text) {
        assert_said(&error);
    }
    match Baseline::parse(text) {
        Ok(baseline) => {
            let written = serde_json::to_string(&baseline).expect("plain data");
            assert_eq!(Baseline::parse(&written).expect("what was written"), baseline);
        }
        Err(error) => assert_said(&error),
    }
    match parse_results(text) {
        Ok(results) => {
            let same = diff_results(&results, &results);
            assert_printable(&text::diff_results(&same, 10, Style::default()));
            if let [first, .., last] = &results[..] {
                let diff = diff_results(std::slice::from_ref(first), std::slice::from_ref(last));
                assert_printable(&text::diff_results(&diff, 10, Style::default()));
            }
        }
        Err(error) => assert_said(&error),
    }
}
