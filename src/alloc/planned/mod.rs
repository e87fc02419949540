//! `planned`: allocators that place blocks where a plan says, made ahead from a [`Profile`].
//!
//! A training job repeats itself: the requests of one step are those of the next. So an earlier run
//! of the program, its *profile*, is packed off line, and at run time most requests take the place
//! that was found for them. What differs from the profile is placed on line. An allocator here
//! knows the profile and what has happened so far, never what comes.
//!
//! ```text
//!   profile:  beginning │ step 0 │ step 1        ──packed──> offsets
//!   run:      beginning │ step 0 │ step 1 │ step 2 │ ...     each request: its place, or on line
//! ```
//!
//! There is one file or folder for each mode: `mode=best` is ours, `mode=stalloc` is STAlloc.

mod best;
mod inner;
mod profile;
mod stalloc;
mod summary;

pub use profile::Profile;
pub use stalloc::{PlanFiles, synthesis};
pub use summary::{PlanSummary, StepSummary};

use super::spec::{AllocSpec, Params, SpecError};
use super::{Allocator, BuildInputs, Env, Handle, LayoutBlock, Levels, OutOfMemory, Request};
use crate::units::{PoolId, StreamId};
use best::Best;
use stalloc::Stalloc;

/// Name of the allocator in specifications.
pub const NAME: &str = "planned";
/// Parameters that name a file or folder.
const FILES: [&str; 2] = ["trace", "plan"];
/// Name of the mode of our own.
const BEST: &str = "best";
/// Name of the mode that is STAlloc.
const STALLOC: &str = "stalloc";

/// The files and folders that a specification names, each with its parameter: a profile
/// (`trace=FILE`), or a plan of STAlloc (`plan=FILE` or `plan=DIR`).
pub fn files(spec: &AllocSpec) -> impl Iterator<Item = (&str, &str)> {
    let named = spec.params.iter().filter(|(key, _)| FILES.contains(&key.as_str()));
    named.filter(|_| spec.name == NAME).map(|(key, file)| (key.as_str(), file.as_str()))
}

/// A specification with the names of its files changed.
///
/// # Errors
/// The first that `change` gives.
pub fn with_files<E>(
    spec: &AllocSpec,
    change: impl Fn(&str) -> Result<String, E>,
) -> Result<AllocSpec, E> {
    let mut spec = spec.clone();
    if spec.name == NAME {
        for (_, file) in spec.params.iter_mut().filter(|(key, _)| FILES.contains(&key.as_str())) {
            *file = change(file)?;
        }
    }
    Ok(spec)
}

/// The allocator that is registered: one of several that plan ahead.
#[derive(Clone, Debug)]
pub enum Planned {
    /// Our own.
    Best(Box<Best>),
    /// STAlloc's run time.
    Stalloc(Box<Stalloc>),
}

/// What `fraglab list` says about the parameters.
pub(super) fn parameter_help() -> Vec<(&'static str, &'static str)> {
    let shared = vec![
        ("mode", "best: our own (default); stalloc: STAlloc's run time"),
        ("profile_steps", "first steps of the trace that are the profile; 2, of two steps 1"),
        ("trace", "a trace that is the profile, whole, in place of the first steps"),
    ];
    [shared, best::help(), stalloc::help()].concat()
}

impl Planned {
    /// Builds the allocator; `mode` says which.
    ///
    /// # Errors
    /// If there is no profile, a value that is not accepted, and a parameter that the mode does not
    /// know.
    pub fn build(mut params: Params, inputs: &BuildInputs) -> Result<Planned, SpecError> {
        let mode = params.take("mode").unwrap_or_else(|| BEST.to_owned());
        if let Some(steps) = params.take("profile_steps")
            && !steps.parse().is_ok_and(|steps: u64| steps > 0)
        {
            let message = format!("profile_steps={steps}: expected a number of steps, at least 1");
            return Err(params.value_error(message));
        }
        // The engine has cut the profile by these two.
        params.take("trace");
        if mode == STALLOC {
            return Ok(Planned::Stalloc(Box::new(Stalloc::build(params, inputs)?)));
        }
        if mode != BEST {
            return Err(params.value_error(format!("mode={mode}: expected best or stalloc")));
        }
        let Some(profile) = &inputs.profile else {
            return Err(SpecError::NoProfile { allocator: params.allocator().to_owned() });
        };
        Ok(Planned::Best(Box::new(Best::build(params, inputs, profile)?)))
    }
}

/// The same call of whichever allocator it is.
macro_rules! delegate {
    ($planned:expr, $mode:ident => $call:expr) => {
        match $planned {
            Planned::Best($mode) => $call,
            Planned::Stalloc($mode) => $call,
        }
    };
}

impl Allocator for Planned {
    const ADDRESSES_MATTER: bool = true;

    #[inline]
    fn malloc<E: Env>(&mut self, env: &mut E, request: Request) -> Result<Handle, OutOfMemory> {
        delegate!(self, mode => mode.malloc(env, request))
    }

    #[inline]
    fn free<E: Env>(&mut self, env: &mut E, handle: Handle) {
        delegate!(self, mode => mode.free(env, handle))
    }

    fn defer<E: Env>(&mut self, env: &mut E, handle: Handle) {
        delegate!(self, mode => mode.defer(env, handle))
    }

    fn empty_cache<E: Env>(&mut self, env: &mut E) {
        delegate!(self, mode => mode.empty_cache(env))
    }

    fn pool_enter<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        delegate!(self, mode => mode.pool_enter(env, pool))
    }

    fn pool_leave<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        delegate!(self, mode => mode.pool_leave(env, pool))
    }

    fn pool_delete<E: Env>(&mut self, env: &mut E, pool: PoolId) {
        delegate!(self, mode => mode.pool_delete(env, pool))
    }

    fn stream_added(&mut self, stream: StreamId, handle: u64) {
        // Our own mode keeps streams apart by what it planned for them, and needs no table.
        if let Planned::Stalloc(stalloc) = self {
            stalloc.stream_added(stream, handle);
        }
    }

    fn mark<E: Env>(&mut self, env: &mut E, phase: &str) {
        delegate!(self, mode => mode.mark(env, phase))
    }

    fn module_enter<E: Env>(&mut self, env: &mut E, module: &str) {
        delegate!(self, mode => mode.module_enter(env, module))
    }

    fn module_leave<E: Env>(&mut self, env: &mut E, module: &str) {
        delegate!(self, mode => mode.module_leave(env, module))
    }

    #[inline]
    fn levels(&self) -> Levels {
        delegate!(self, mode => mode.levels())
    }

    fn pool_of(&self, request: Request) -> u32 {
        delegate!(self, mode => mode.pool_of(request))
    }

    fn largest_hole(&self, request: Request) -> u64 {
        delegate!(self, mode => mode.largest_hole(request))
    }

    fn limit_bytes(&self) -> Option<u64> {
        delegate!(self, mode => mode.limit_bytes())
    }

    fn failure(&self) -> Option<String> {
        delegate!(self, mode => mode.failure())
    }

    fn check_invariants(&self) -> Result<(), String> {
        delegate!(self, mode => mode.check_invariants())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        delegate!(self, mode => mode.counters())
    }

    fn plan_summary(&self) -> Option<PlanSummary> {
        delegate!(self, mode => mode.plan_summary())
    }

    fn params(&self) -> Vec<(String, String)> {
        delegate!(self, mode => mode.params())
    }

    fn layout(&self, visit: &mut dyn FnMut(LayoutBlock)) {
        delegate!(self, mode => mode.layout(visit))
    }
}
