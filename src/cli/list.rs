//! `fraglab list`: what there is to choose from.

use serde::Serialize;

use super::Verdict;
use super::console::Console;
use crate::alloc::registry::AllocatorInfo;
use crate::device::CostProfile;
use crate::engine;
use crate::report::json;
use crate::report::text::{self, TraceFormatInfo};

const AFTER_HELP: &str = "\
Examples:
  fraglab list
  fraglab list --json | jq -r '.allocators[].name'";

/// What was typed.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Args {
    /// Write JSON: {allocators, profiles, formats}
    #[arg(long)]
    json: bool,
}

/// The formats, in the order in which people meet them.
const FORMATS: [TraceFormatInfo; 7] = [
    TraceFormatInfo {
        name: "pickle",
        files: "NAME.pickle",
        read: true,
        written: false,
        summary: "snapshot of PyTorch's allocator",
    },
    TraceFormatInfo {
        name: "kineto",
        files: "NAME.json",
        read: true,
        written: false,
        summary: "trace of PyTorch's profiler",
    },
    TraceFormatInfo {
        name: "rmm",
        files: "NAME.csv",
        read: true,
        written: false,
        summary: "log of RMM's logging adaptor",
    },
    TraceFormatInfo {
        name: "minimalloc",
        files: "NAME.csv",
        read: true,
        written: false,
        summary: "buffers with lifetimes; `plan` writes it",
    },
    TraceFormatInfo {
        name: "json",
        files: "NAME.json",
        read: true,
        written: true,
        summary: "native, holds everything",
    },
    TraceFormatInfo {
        name: "parquet",
        files: "NAME.parquet",
        read: cfg!(feature = "analytics"),
        written: cfg!(feature = "analytics"),
        summary: "a row an event",
    },
    TraceFormatInfo {
        name: "text",
        files: "NAME.txt",
        read: true,
        written: true,
        summary: "for people to write and review",
    },
];

#[derive(Serialize)]
struct Listing<'a> {
    allocators: Vec<AllocatorEntry<'a>>,
    profiles: Vec<ProfileEntry<'a>>,
    formats: &'a [TraceFormatInfo],
}

#[derive(Serialize)]
struct AllocatorEntry<'a> {
    name: &'a str,
    summary: &'a str,
    params: Vec<ParamEntry<'a>>,
}

#[derive(Serialize)]
struct ParamEntry<'a> {
    name: &'a str,
    summary: &'a str,
}

#[derive(Serialize)]
struct ProfileEntry<'a> {
    name: &'a str,
    gpu: &'a str,
    driver: &'a str,
    date: &'a str,
    derived: bool,
    method: &'a str,
}

/// Lists everything.
///
/// # Errors
/// If standard output cannot be written.
pub(super) fn execute(args: &Args, console: &Console) -> anyhow::Result<Verdict> {
    let allocators = engine::allocators();
    let profiles = CostProfile::shipped_names()
        .into_iter()
        .map(CostProfile::shipped)
        .collect::<Result<Vec<_>, _>>()?;
    let text = if args.json {
        json::pretty(&listing(&allocators, &profiles))?
    } else {
        text::list(&allocators, &profiles, &FORMATS, console.style())
    };
    console.print(&text)?;
    Ok(Verdict::Good)
}

fn listing<'a>(allocators: &'a [AllocatorInfo], profiles: &'a [CostProfile]) -> Listing<'a> {
    let param = |&(name, summary): &(&'a str, &'a str)| ParamEntry { name, summary };
    let allocator = |info: &'a AllocatorInfo| AllocatorEntry {
        name: info.name,
        summary: info.summary,
        params: info.params.iter().map(param).collect(),
    };
    let profile = |profile: &'a CostProfile| ProfileEntry {
        name: &profile.name,
        gpu: &profile.gpu,
        driver: &profile.driver,
        date: &profile.date,
        derived: profile.derived,
        method: &profile.method,
    };
    Listing {
        allocators: allocators.iter().map(allocator).collect(),
        profiles: profiles.iter().map(profile).collect(),
        formats: &FORMATS,
    }
}
