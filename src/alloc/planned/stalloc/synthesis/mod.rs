//! STAlloc's plan synthesizer: from a profile to a plan and the space that is spare beside it
//! (specs/stalloc.md 2).
//!
//! ```text
//!   profile ──job──> requests with classes ──┬─ weights, optimizer: one after the other ──┐
//!                                            ├─ activations of iterations 0 and 1:        ├─ plan
//!                                            │   size classes | groups | plan::solve ─────┤
//!                                            └─ mixtures of experts: windows of time ─────┴─ spare
//!
//!   0         weights      optimizer          activations              reserved
//!   ├──────────┼────────────┼──────────────────────────────────────────┤
//!              └ requests of the beginning, before anything else is there
//! ```
//!
//! # Profiles that are cut
//!
//! The tool wants three iterations and the frees after them. A profile here is mostly the first one
//! or two iterations of a recording. Whatever is live where it is cut is taken as freed at the end of
//! the program: made before the iterations it is a weight, made in the first one it is optimizer
//! state, made in a later one it is an activation. With `faithful` that is all, as if the program
//! had ended there. Without, an activation that is live at the cut is freed as far into the next
//! iteration as its like was, and a profile of one iteration is followed by the same once more,
//! without what stays.
//!
//! A whole run, which has something after its last iteration, is read as the tool reads it; without
//! `faithful` what is never freed counts as above.

mod job;
mod report;
mod windows;

use crate::alloc::planned::Profile;
use crate::plan::stalloc::files::{
    ALIGNMENT_BYTES, IntervalFile, ListedRequest, PlanFile, PlannedRequest, RequestFile, SpareFile,
};
use crate::plan::stalloc::group::{GroupError, GroupSettings, plan_groups};
use crate::plan::stalloc::size_classes::{self, Settings, SteadyIteration, rounded};
use crate::plan::{self, BYTES_MAX, BadProblem, Buffer, Problem, SolveOptions};
use job::{Class, Iteration, Job, Phase, Request};

pub use report::{ClassSummary, SynthesisReport};

/// Which planner places the activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StallocPlanner {
    /// The tool's default: by size classes.
    #[default]
    SizeClasses,
    /// The paper's: by phases.
    Groups,
    /// Largest first, each as low as it can be.
    GreedyBySize,
    /// Portfolio, repair and exact search.
    Best,
}

impl StallocPlanner {
    /// Every planner.
    pub const ALL: [StallocPlanner; 4] = [
        StallocPlanner::SizeClasses,
        StallocPlanner::Groups,
        StallocPlanner::GreedyBySize,
        StallocPlanner::Best,
    ];

    /// What it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            StallocPlanner::SizeClasses => "stalloc-size",
            StallocPlanner::Groups => "stalloc-group",
            StallocPlanner::GreedyBySize => "greedy-by-size",
            StallocPlanner::Best => "best",
        }
    }
}

/// How to make a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynthesisOptions {
    /// Which planner.
    pub planner: StallocPlanner,
    /// With all faults of the tool, and errors where it aborts. Without, a plan can be replayed for
    /// ever, and every profile with an iteration gives one.
    pub faithful: bool,
    /// Work that `best` may spend, in units of about one buffer looked at.
    pub work_units: u64,
    /// Utilization that is assumed of the memory outside the plan, in percent. Only the report
    /// depends on it.
    pub dynamic_utilization_percent: u64,
}

impl Default for SynthesisOptions {
    fn default() -> Self {
        SynthesisOptions {
            planner: StallocPlanner::default(),
            faithful: true,
            work_units: 20_000_000,
            dynamic_utilization_percent: 70,
        }
    }
}

/// A plan with everything that STAlloc writes beside it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Synthesis {
    /// Offsets of the static requests.
    pub plan: PlanFile,
    /// Space that is spare from an expert's forward to its backward pass.
    pub cross: SpareFile,
    /// Space that is spare during a mixture's pass.
    pub intra: SpareFile,
    /// The windows of time behind `cross`.
    pub cross_intervals: IntervalFile,
    /// The windows of time behind `intra`.
    pub intra_intervals: IntervalFile,
    /// What the planner was given.
    pub activations: RequestFile,
    /// What came out.
    pub report: SynthesisReport,
}

impl Synthesis {
    /// The files of device `device` with their places in the tool's folder, and their texts.
    pub fn files(&self, device: u32) -> Vec<(String, String)> {
        let logs = "output/activations_memlog";
        let windows = format!("{logs}/dynamic_intervals/dev{device}");
        vec![
            (format!("output/plan/dev_{device}.txt"), self.plan.to_text()),
            (format!("{logs}/activations_tensors/dev{device}.txt"), self.activations.to_text()),
            (format!("{windows}_cross_interval.txt"), self.cross_intervals.to_text()),
            (format!("{windows}_intra_interval.txt"), self.intra_intervals.to_text()),
            (format!("{windows}_cross_interval_spare_addr.txt"), self.cross.to_text()),
            (format!("{windows}_intra_interval_spare_addr.txt"), self.intra.to_text()),
            (format!("output/trace_analysis/dev_{device}.log"), self.report.to_text()),
        ]
    }
}

/// There is no plan.
#[derive(Debug, thiserror::Error)]
pub enum SynthesisError {
    /// The profile has no iteration.
    #[error("the profile has no step; expected marks step0, step1, ... in it")]
    NoIteration,
    /// More than 2^60 bytes.
    #[error("the requests of the profile come to more than 2^60 bytes")]
    TooLarge,
    /// STAlloc's synthesizer stops here.
    #[error("{0} (STAlloc stops here; faithful=false plans all the same)")]
    Aborts(#[from] Aborts),
    /// The activations contradict themselves.
    #[error(transparent)]
    Problem(#[from] BadProblem),
}

/// Where STAlloc's synthesizer stops. Times count mallocs and frees from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Aborts {
    /// Fewer than two iterations.
    #[error("the profile has one step; expected at least two")]
    OneIteration,
    /// Iterations have more passes of one kind than of the other.
    #[error("{forward} forward passes in a step, but {backward} backward passes; expected as many")]
    Passes {
        /// Most forward passes of an iteration.
        forward: u32,
        /// Most backward passes of an iteration.
        backward: u32,
    },
    /// A module is left and none was entered.
    #[error("event {event}: module {module:?} is left; expected that it was entered before")]
    Unbalanced {
        /// Index of the event in the profile.
        event: usize,
        /// The module.
        module: String,
    },
    /// An expert's request lives on into the next iteration.
    #[error("the request at {start}, made in an expert, crosses steps; expected its free before")]
    ExpertCrosses {
        /// Time of its malloc.
        start: u64,
    },
    /// A request of the beginning or of a late iteration is never freed.
    #[error("the request at {start} is never freed; expected that only of requests of step 0")]
    NeverFreed {
        /// Time of its malloc.
        start: u64,
    },
    /// Too much is never freed.
    #[error("{bytes} bytes are never freed; expected at most 128 MiB")]
    UnreleasedBytes {
        /// How much.
        bytes: u64,
    },
    /// Nothing lives through the whole run.
    #[error("no request lives from before the steps to after them; expected a weight")]
    NoWeight,
    /// The beginning asks for more than will be there later.
    #[error(
        "the beginning asks for {init_bytes} bytes in all; expected less than the {room_bytes} that \
         later requests need beside the weights"
    )]
    InitTooLarge {
        /// Sum of its rounded sizes.
        init_bytes: u64,
        /// Peak of all static requests less the weights.
        room_bytes: u64,
    },
    /// A late iteration is not like the second.
    #[error(
        "step {iteration} differs from step 1 at its static request {position}; expected the same \
         number, classes and sizes"
    )]
    Unsteady {
        /// Number of the iteration in the profile.
        iteration: u32,
        /// Position of the request in the iteration, from 0.
        position: usize,
    },
    /// The group planner.
    #[error(transparent)]
    Groups(#[from] GroupError),
}

impl From<GroupError> for SynthesisError {
    fn from(error: GroupError) -> Self {
        SynthesisError::Aborts(Aborts::Groups(error))
    }
}

/// Makes STAlloc's plan from a profile.
///
/// # Errors
/// If the profile has no iteration, or if STAlloc would stop and `options.faithful` is set.
pub fn synthesize(
    profile: &Profile,
    options: &SynthesisOptions,
) -> Result<Synthesis, SynthesisError> {
    let one = options.faithful && profile.steps.len() == 1;
    if one {
        return Err(Aborts::OneIteration.into());
    }
    let job = job::read(profile, options.faithful)?;
    let total: u128 = job.requests.iter().map(|request| u128::from(request.size_bytes)).sum();
    if total > u128::from(BYTES_MAX / 2) {
        return Err(SynthesisError::TooLarge);
    }
    Synthesizer { job: &job, options, warnings: Vec::new() }.run()
}

struct Synthesizer<'a> {
    job: &'a Job,
    options: &'a SynthesisOptions,
    warnings: Vec<String>,
}

/// Offsets of the static requests, by their positions in the job.
#[derive(Default)]
struct Layout {
    offsets_bytes: Vec<Option<u64>>,
    /// Where the activations begin.
    activations_bytes: u64,
    reserved_bytes: u64,
}

/// Activations of iterations 0 and 1 with their offsets from where activations begin.
#[derive(Default)]
struct Activations {
    /// Positions in the job.
    positions: Vec<usize>,
    listed: Vec<ListedRequest>,
    offsets_bytes: Vec<u64>,
    peak_bytes: u64,
}

impl Synthesizer<'_> {
    fn run(mut self) -> Result<Synthesis, SynthesisError> {
        self.check_steady()?;
        let activations = self.plan_activations()?;
        let static_peak_bytes = self.peak(Class::is_static);
        let layout = self.lay_out(&activations, static_peak_bytes)?;
        let plan = self.plan_file(&layout, static_peak_bytes);
        let (cross_intervals, intra_intervals) = windows::find(self.job, self.options.faithful);
        let spare = |intervals: &IntervalFile| {
            windows::spare(intervals, &activations, layout.activations_bytes)
        };
        let (cross, intra) = (spare(&cross_intervals), spare(&intra_intervals));
        let report = self.report(&plan, &activations);
        let activations = RequestFile { requests: activations.listed };
        Ok(Synthesis { plan, cross, intra, cross_intervals, intra_intervals, activations, report })
    }

    fn peak(&self, counts: impl Fn(Class) -> bool) -> u64 {
        job::peak_bytes(self.job.requests.iter().filter(|request| counts(request.class)))
    }

    /// Static requests of an iteration, in order.
    fn statics_of(&self, iteration: u32) -> impl Iterator<Item = &Request> {
        let of = move |request: &&Request| request.iteration == Iteration::Step(iteration);
        self.job.requests.iter().filter(of).filter(|request| request.class.is_static())
    }

    /// Later iterations must be like the second; the last may be shorter.
    fn check_steady(&mut self) -> Result<(), SynthesisError> {
        let sizes = |iteration: u32| -> Vec<u64> {
            let activations = self.statics_of(iteration).filter(|it| it.class.is_activation());
            activations.map(|request| request.size_bytes).collect()
        };
        if sizes(0) != sizes(1) {
            let warning = "activations of steps 0 and 1 differ in number or size";
            self.warnings.push(warning.to_owned());
        }
        let kind = |request: &Request| (request.class, request.size_bytes);
        let steady: Vec<_> = self.statics_of(1).map(kind).collect();
        let count = self.job.iteration_starts.len() as u32;
        for iteration in 2..count {
            let like: Vec<_> = self.statics_of(iteration).map(kind).collect();
            let differs = steady.iter().zip(&like).position(|(one, other)| one != other);
            let short = like.len() < steady.len() && iteration + 1 < count;
            let longer = like.len() > steady.len();
            let ends = (short || longer).then_some(steady.len().min(like.len()));
            let Some(position) = differs.or(ends) else { continue };
            if self.options.faithful {
                return Err(Aborts::Unsteady { iteration, position }.into());
            }
            self.warnings.push(format!("step {iteration} is not like step 1 from {position} on"));
        }
        Ok(())
    }

    fn plan_activations(&self) -> Result<Activations, SynthesisError> {
        let mut activations = Activations::default();
        for (at, request) in self.job.requests.iter().enumerate() {
            let planned = matches!(request.iteration, Iteration::Step(0 | 1));
            if planned && request.class.is_activation() {
                let Request { start, end, size_bytes, .. } = *request;
                activations.positions.push(at);
                activations.listed.push(ListedRequest { start, end, size_bytes });
            }
        }
        let settings = self.settings(&activations);
        let planner = self.options.planner;
        let placement = match planner {
            StallocPlanner::SizeClasses => size_classes::plan(&activations.listed, &settings),
            StallocPlanner::Groups => {
                let groups = self.groups(&activations);
                let faithful = self.options.faithful;
                let settings = GroupSettings { base: settings, faithful };
                plan_groups(&activations.listed, &groups, &settings)?
            }
            StallocPlanner::GreedyBySize | StallocPlanner::Best => {
                let (offsets_bytes, peak_bytes) = self.solve(&activations)?;
                return Ok(Activations { offsets_bytes, peak_bytes, ..activations });
            }
        };
        let (offsets_bytes, peak_bytes) = (placement.offsets_bytes, placement.peak_bytes);
        Ok(Activations { offsets_bytes, peak_bytes, ..activations })
    }

    /// What the tool takes for the second iteration, or what it is.
    fn settings(&self, activations: &Activations) -> Settings {
        if !self.options.faithful {
            return Settings { steady: self.second_iteration(), wrap_safe: true };
        }
        let requests = || activations.positions.iter().map(|&at| &self.job.requests[at]);
        let second = Iteration::Step(1);
        let starts = requests().filter(|request| request.iteration == second);
        let ends = requests().filter(|request| request.end_iteration == second);
        let start = starts.map(|request| request.start).min();
        let end = ends.map(|request| request.end).max();
        let steady = match (start, end) {
            (Some(start), Some(end)) => SteadyIteration { start, end },
            // Nothing comes again.
            _ => SteadyIteration { start: u64::MAX, end: u64::MAX },
        };
        Settings { steady, wrap_safe: false }
    }

    /// The second iteration as it is, up to where the third begins.
    fn second_iteration(&self) -> SteadyIteration {
        let starts = &self.job.iteration_starts;
        match starts.get(1) {
            Some(&start) => {
                SteadyIteration { start, end: starts.get(2).copied().unwrap_or(self.job.end) }
            }
            None => SteadyIteration { start: u64::MAX, end: u64::MAX },
        }
    }

    /// Groups of activations by iteration and phases, numbered as they appear.
    fn groups(&self, activations: &Activations) -> Vec<Option<u32>> {
        let mut ids: std::collections::BTreeMap<(Iteration, Phase, Phase), u32> =
            std::collections::BTreeMap::new();
        let group = |&at: &usize| {
            let request = &self.job.requests[at];
            let next = ids.len() as u32;
            let key = (request.iteration, request.phase, request.end_phase);
            (request.class == Class::Scoped).then(|| *ids.entry(key).or_insert(next))
        };
        activations.positions.iter().map(group).collect()
    }

    /// Places activations with the general solver. Without the tool's faults, what the second
    /// iteration leaves to the third must not meet the second's requests as they come again.
    fn solve(&self, activations: &Activations) -> Result<(Vec<u64>, u64), SynthesisError> {
        let listed = &activations.listed;
        let buffer = |it: &ListedRequest| Buffer::new(it.start, it.end, it.size_bytes);
        let mut buffers: Vec<Buffer> = listed.iter().map(buffer).collect();
        let steady = self.second_iteration();
        let period = steady.end.saturating_sub(steady.start);
        let last_end = listed.iter().map(|it| it.end).max().unwrap_or(0);
        if !self.options.faithful {
            for (at, it) in listed.iter().enumerate() {
                if it.start >= steady.start && it.start + period < last_end {
                    let alias = Some(at as u32);
                    buffers[at] = buffers[at].clone().with(|extra| extra.alias = alias);
                    let again = Buffer::new(it.start + period, it.end + period, it.size_bytes);
                    buffers.push(again.with(|extra| extra.alias = alias));
                }
            }
        }
        let problem =
            Problem { buffers, granularity_bytes: ALIGNMENT_BYTES, capacities_bytes: Vec::new() };
        let planner = match self.options.planner {
            StallocPlanner::Best => plan::Planner::Best,
            _ => plan::Planner::GreedyBySize,
        };
        let options = SolveOptions {
            planner,
            time: None,
            work_units: Some(self.options.work_units),
            ..SolveOptions::default()
        };
        let packing = plan::solve(&problem, &options)?.packing;
        let mut offsets_bytes = packing.offsets_bytes;
        offsets_bytes.truncate(listed.len());
        let ends = offsets_bytes.iter().zip(listed).map(|(at, it)| at + rounded(it.size_bytes));
        let peak_bytes = ends.max().unwrap_or(0);
        Ok((offsets_bytes, peak_bytes))
    }

    /// Gives every static request its offset from the base of the pool.
    fn lay_out(
        &mut self,
        activations: &Activations,
        static_peak_bytes: u64,
    ) -> Result<Layout, SynthesisError> {
        let mut layout =
            Layout { offsets_bytes: vec![None; self.job.requests.len()], ..Layout::default() };
        let weights_end = self.in_a_row(&mut layout, Class::Weight, 0);
        if weights_end == 0 && self.options.faithful {
            return Err(Aborts::NoWeight.into());
        }
        layout.activations_bytes = self.in_a_row(&mut layout, Class::Optimizer, weights_end);
        for (&at, offset) in activations.positions.iter().zip(&activations.offsets_bytes) {
            layout.offsets_bytes[at] = Some(layout.activations_bytes + offset);
        }
        layout.reserved_bytes = layout.activations_bytes + activations.peak_bytes;
        let init: Vec<usize> = self.of_class(Class::Init).collect();
        let size = |&at: &usize| rounded(self.job.requests[at].size_bytes);
        let init_bytes: u64 = init.iter().map(size).sum();
        let room_bytes = static_peak_bytes.saturating_sub(weights_end);
        if init_bytes < room_bytes || init.is_empty() {
            self.in_a_row(&mut layout, Class::Init, weights_end);
        } else if self.options.faithful {
            return Err(Aborts::InitTooLarge { init_bytes, room_bytes }.into());
        } else {
            self.pack_init(&mut layout, &init, weights_end);
        }
        Ok(layout)
    }

    /// Positions of a class, in order.
    fn of_class(&self, class: Class) -> impl Iterator<Item = usize> {
        let requests = self.job.requests.iter().enumerate();
        requests.filter(move |(_, request)| request.class == class).map(|(at, _)| at)
    }

    /// Places a class one after the other; gives where it ends.
    fn in_a_row(&self, layout: &mut Layout, class: Class, from_bytes: u64) -> u64 {
        let mut end_bytes = from_bytes;
        for at in self.of_class(class) {
            layout.offsets_bytes[at] = Some(end_bytes);
            end_bytes += rounded(self.job.requests[at].size_bytes);
        }
        end_bytes
    }

    /// Packs a beginning that churns through more than is there, behind the weights.
    fn pack_init(&mut self, layout: &mut Layout, init: &[usize], from_bytes: u64) {
        let listed: Vec<ListedRequest> = init
            .iter()
            .map(|&at| {
                let Request { start, end, size_bytes, .. } = self.job.requests[at];
                ListedRequest { start, end, size_bytes }
            })
            .collect();
        let nothing_again = SteadyIteration { start: u64::MAX, end: u64::MAX };
        let settings = Settings { steady: nothing_again, wrap_safe: false };
        let placement = size_classes::plan(&listed, &settings);
        for (&at, offset) in init.iter().zip(&placement.offsets_bytes) {
            layout.offsets_bytes[at] = Some(from_bytes + offset);
        }
        layout.reserved_bytes = layout.reserved_bytes.max(from_bytes + placement.peak_bytes);
    }

    fn plan_file(&self, layout: &Layout, static_max_allocated_bytes: u64) -> PlanFile {
        let mut plan = PlanFile {
            static_max_allocated_bytes,
            static_reserved_bytes: layout.reserved_bytes,
            var_peak_bytes: self.peak(|class| class == Class::Small),
            ..PlanFile::default()
        };
        for (at, request) in self.job.requests.iter().enumerate() {
            if request.class == Class::Unreleased {
                plan.unreleased.extend(request.malloc_id);
            }
            if !request.class.is_static() {
                continue;
            }
            match request.iteration {
                Iteration::Head | Iteration::Step(0) => plan.first_requests += 1,
                Iteration::Step(1) => plan.steady_requests += 1,
                Iteration::Step(_) | Iteration::Tail => {}
            }
            let (offset_bytes, size_bytes) = (layout.offsets_bytes[at], request.size_bytes);
            plan.requests.push(PlannedRequest { offset_bytes, size_bytes });
        }
        plan
    }

    fn report(self, plan: &PlanFile, activations: &Activations) -> SynthesisReport {
        let is_dynamic = |class| matches!(class, Class::DynamicMlp | Class::DynamicMoe);
        let class = |class: Class| ClassSummary {
            name: class.name(),
            requests: self.of_class(class).count() as u64,
            peak_bytes: self.peak(|other| other == class),
        };
        let classes = Class::ALL.into_iter().map(class).collect();
        let activation_live_bytes_peak =
            job::peak_bytes(activations.positions.iter().map(|&at| &self.job.requests[at]));
        let dynamic_bytes_peak = self.peak(is_dynamic);
        let percent = self.options.dynamic_utilization_percent.max(1);
        let assumed = u128::from(dynamic_bytes_peak) * 100 / u128::from(percent);
        SynthesisReport {
            planner: self.options.planner.name(),
            classes,
            max_allocated_bytes: self.peak(|class| class.is_static() || is_dynamic(class)),
            max_reserved_bytes: plan.static_reserved_bytes + assumed as u64,
            dynamic_bytes_peak,
            activation_live_bytes_peak,
            activation_planned_bytes: activations.peak_bytes,
            warnings: self.warnings,
        }
    }
}
