//! Files that an allocator's specification names: a profile (`planned+trace=FILE`), or a plan of
//! STAlloc (`plan=FILE` or `plan=DIR`). Allocators read no files, so they are read here, once each.
//!
//! ```text
//!   DIR/output/plan/dev_0.txt                                            plan=DIR
//!   DIR/output/activations_memlog/dynamic_intervals/
//!       dev0_cross_interval_spare_addr.txt, dev0_intra_...               beside it; may be absent
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;

use super::{input, limits};
use crate::alloc::planned::{self, PlanFiles};
use crate::alloc::spec::AllocSpec;
use crate::engine::RunOptions;
use crate::plan::stalloc::files::{PlanFile, SpareFile};

/// Largest plan in bytes: tens of millions of requests.
const PLAN_BYTES_MAX: u64 = 1 << 30;

/// Reads what the specifications name into the options.
///
/// # Errors
/// The first file that cannot be read, with the specification that names it.
pub(super) fn read(specs: &[AllocSpec], options: &mut RunOptions) -> anyhow::Result<()> {
    for spec in specs {
        for (key, name) in planned::files(spec) {
            let named = || format!("{spec}");
            match key {
                "trace" if !options.profiles.contains_key(name) => {
                    let trace = input::read(Path::new(name), &limits::read_options());
                    let trace = trace.with_context(named)?.trace;
                    options.profiles.insert(name.to_owned(), Arc::new(trace));
                }
                "plan" if !options.plans.contains_key(name) => {
                    let files = plan_files(Path::new(name)).with_context(named)?;
                    options.plans.insert(name.to_owned(), Arc::new(files));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// A plan and what lies beside it.
fn plan_files(path: &Path) -> anyhow::Result<PlanFiles> {
    let file = plan_file(path)?;
    let plan = PlanFile::parse(&text(&file)?).with_context(|| file.display().to_string())?;
    let [cross, intra] = ["cross", "intra"].map(|kind| spare_file(&file, kind));
    Ok(PlanFiles { source: file.display().to_string(), plan, cross: cross?, intra: intra? })
}

/// The plan of a folder is that of its first device.
fn plan_file(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let places = ["output/plan/dev_0.txt", "plan/dev_0.txt", "dev_0.txt"];
    let found = places.iter().map(|place| path.join(place)).find(|place| place.is_file());
    found.with_context(|| {
        format!("{}: no plan in it: expected {}", path.display(), places.join(" or "))
    })
}

/// Spare addresses that belong to `.../plan/dev_N.txt`; empty if there are none.
fn spare_file(plan: &Path, kind: &str) -> anyhow::Result<SpareFile> {
    let beside = || {
        let device = plan.file_stem()?.to_str()?.strip_prefix("dev_")?;
        let folder = plan.parent()?.parent()?.join("activations_memlog/dynamic_intervals");
        let names = ["_interval_spare_addr.txt", "_spare_addr.txt"];
        let mut places = names.iter().map(|end| folder.join(format!("dev{device}_{kind}{end}")));
        places.find(|file| file.is_file())
    };
    match beside() {
        Some(file) => SpareFile::parse(&text(&file)?).with_context(|| file.display().to_string()),
        None => Ok(SpareFile::default()),
    }
}

fn text(file: &Path) -> anyhow::Result<String> {
    input::read_text(file, PLAN_BYTES_MAX, "a plan of STAlloc")
}
