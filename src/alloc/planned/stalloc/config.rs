//! Parameters: what the environment of STAlloc says, and a switch for each of its surprises
//! (specs/stalloc.md 3.5, 4.2).

use super::synthesis::{StallocPlanner, SynthesisOptions};
use crate::alloc::spec::{Params, SpecError};
use crate::units::MIB;

/// The built-in caching allocator (spec 3.4), as far as ours can say it.
pub(super) const BUILT_IN: &str = "caching+max_split_size_mb=128+segment_rounding=512";

/// Which dynamic requests may have free space of the static pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reuse {
    /// None.
    Off,
    /// Experts, and what a mixture's backward pass asks for: what the code does.
    Shipped,
    /// All of them in the windows of their labels: what the paper says.
    All,
}

/// The parameters.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Config {
    /// Everything as STAlloc does it, unless another parameter says otherwise.
    pub(super) faithful: bool,
    /// Begin the steady plan anew at the mark of every step but the first.
    pub(super) realign: bool,
    /// Look at the planned blocks in use before the free ranges.
    pub(super) static_fallback: bool,
    /// Keep a planned block in that list though it went to the inner allocator.
    pub(super) leak: bool,
    /// Which dynamic requests reuse the pool.
    pub(super) reuse: Reuse,
    /// Experts a layer on this GPU; 0 lets none of them reuse anything.
    pub(super) experts_per_layer: u64,
    /// Count experts from 0 in every layer instead of carrying the count on.
    pub(super) counts_by_layer: bool,
    /// Memory that another stream used last is not handed out.
    pub(super) keeps_streams: bool,
    /// What neither the pool nor the inner allocator has goes anywhere in the pool.
    pub(super) rescue: bool,
    /// Empty the inner allocator's cache at a utilization of at most so many percent; 0 is off.
    pub(super) utilization_percent: u64,
    /// and only if it reserves so many bytes more than its peak.
    pub(super) difference_bytes: u64,
    /// The inner allocator.
    pub(super) inner: String,
    /// Name of a plan in files; else it is made from the profile.
    pub(super) plan: Option<String>,
    /// Who makes it.
    pub(super) planner: StallocPlanner,
}

/// What `fraglab list` says about the parameters.
pub(in crate::alloc::planned) fn help() -> Vec<(&'static str, &'static str)> {
    vec![
        (
            "faithful",
            "mode=stalloc: as the published code does it (true, default), or mended (false)",
        ),
        ("plan", "mode=stalloc: STAlloc's own plan, a file dev_N.txt or the folder with output/"),
        ("planner", "mode=stalloc: stalloc-size (default), stalloc-group, greedy-by-size or best"),
        (
            "realign",
            "mode=stalloc: none (default), or iteration: find the place again at every step",
        ),
        ("static_fallback", "mode=stalloc: STALLOC_STATIC_FALLBACK, 0 (default) or 1"),
        ("leak", "mode=stalloc: with static_fallback=1, places that stay blocked for ever (true)"),
        (
            "reuse_static",
            "mode=stalloc: STALLOC_REUSE_STATIC, 0 (default) or 1; all: as the paper says",
        ),
        (
            "expert_per_gpu",
            "mode=stalloc: EXPERT_PER_GPU, a number or all; default 0: no expert reuses",
        ),
        ("expert_counter", "mode=stalloc: carried into the next layer (default), or layer"),
        ("streams", "mode=stalloc: ignored (default), or kept: no memory that another stream used"),
        (
            "rescue",
            "mode=stalloc: what is refused elsewhere goes anywhere in the pool; default false",
        ),
        (
            "dynamic_utilization",
            "mode=stalloc: STALLOC_DYNAMIC_UTILIZATION, percent; default 0: off",
        ),
        ("dynamic_diff_mb", "mode=stalloc: STALLOC_DYNAMIC_DIFF, in MiB; default 1"),
        ("inner", "mode=stalloc: for what is not planned; default STAlloc's own caching allocator"),
    ]
}

impl Config {
    /// Takes the parameters.
    ///
    /// # Errors
    /// A value that is not accepted.
    pub(super) fn take(params: &mut Params) -> Result<Config, SpecError> {
        let faithful = switch(params, "faithful", true)?;
        let realign = word(params, "realign", if faithful { "none" } else { "iteration" });
        let reuse = word(params, "reuse_static", if faithful { "0" } else { "all" });
        let counter = word(params, "expert_counter", if faithful { "carried" } else { "layer" });
        let streams = word(params, "streams", if faithful { "ignored" } else { "kept" });
        let experts = word(params, "expert_per_gpu", if faithful { "0" } else { "all" });
        Ok(Config {
            faithful,
            realign: one_of(params, "realign", &realign, [("none", false), ("iteration", true)])?,
            static_fallback: switch(params, "static_fallback", false)?,
            leak: switch(params, "leak", faithful)?,
            reuse: one_of(
                params,
                "reuse_static",
                &reuse,
                [("0", Reuse::Off), ("1", Reuse::Shipped), ("all", Reuse::All)],
            )?,
            experts_per_layer: match experts.as_str() {
                "all" => u64::MAX,
                number => parse(params, "expert_per_gpu", number, "a number, or all")?,
            },
            counts_by_layer: one_of(
                params,
                "expert_counter",
                &counter,
                [("carried", false), ("layer", true)],
            )?,
            keeps_streams: one_of(
                params,
                "streams",
                &streams,
                [("ignored", false), ("kept", true)],
            )?,
            rescue: switch(params, "rescue", !faithful)?,
            utilization_percent: percentage(params)?,
            difference_bytes: number(params, "dynamic_diff_mb", 1)?.saturating_mul(MIB),
            inner: params.take("inner").unwrap_or_else(|| BUILT_IN.to_owned()),
            plan: params.take("plan"),
            planner: planner(params)?,
        })
    }

    /// How the plan is made.
    pub(super) fn synthesis(&self) -> SynthesisOptions {
        SynthesisOptions {
            planner: self.planner,
            faithful: self.faithful,
            ..SynthesisOptions::default()
        }
    }

    /// Whether the inner allocator is STAlloc's own.
    pub(super) fn is_built_in(&self) -> bool {
        self.inner == BUILT_IN
    }

    /// Effective parameters, by name.
    pub(super) fn params(&self) -> Vec<(String, String)> {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let pick = |condition, yes, no| if condition { yes } else { no };
        let experts = match self.experts_per_layer {
            u64::MAX => "all".to_owned(),
            number => number.to_string(),
        };
        let reuse = match self.reuse {
            Reuse::Off => "0",
            Reuse::Shipped => "1",
            Reuse::All => "all",
        };
        let mut params = vec![
            pair("mode", "stalloc"),
            pair("faithful", pick(self.faithful, "true", "false")),
            pair("planner", self.planner.name()),
            pair("realign", pick(self.realign, "iteration", "none")),
            pair("static_fallback", pick(self.static_fallback, "1", "0")),
            pair("leak", pick(self.leak, "true", "false")),
            pair("reuse_static", reuse),
            pair("expert_per_gpu", &experts),
            pair("expert_counter", pick(self.counts_by_layer, "layer", "carried")),
            pair("streams", pick(self.keeps_streams, "kept", "ignored")),
            pair("rescue", pick(self.rescue, "true", "false")),
            pair("dynamic_utilization", &self.utilization_percent.to_string()),
            pair("dynamic_diff_mb", &(self.difference_bytes / MIB).to_string()),
            pair("inner", &self.inner),
        ];
        params.extend(self.plan.as_ref().map(|plan| pair("plan", plan)));
        params
    }
}

fn word(params: &mut Params, key: &'static str, default: &str) -> String {
    params.take(key).unwrap_or_else(|| default.to_owned())
}

/// true or 1, false or 0.
fn switch(params: &mut Params, key: &'static str, default: bool) -> Result<bool, SpecError> {
    let Some(value) = params.take(key) else { return Ok(default) };
    one_of(params, key, &value, [("true", true), ("1", true), ("false", false), ("0", false)])
}

fn one_of<T, const N: usize>(
    params: &Params,
    key: &str,
    value: &str,
    known: [(&str, T); N],
) -> Result<T, SpecError> {
    let names = known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ");
    let found = known.into_iter().find(|(name, _)| *name == value);
    found
        .map(|(_, meaning)| meaning)
        .ok_or_else(|| params.value_error(format!("{key}={value}: expected {names}")))
}

fn number(params: &mut Params, key: &'static str, default: u64) -> Result<u64, SpecError> {
    let Some(value) = params.take(key) else { return Ok(default) };
    parse(params, key, &value, "a number")
}

fn parse(params: &Params, key: &str, value: &str, expected: &str) -> Result<u64, SpecError> {
    value.parse().map_err(|_| params.value_error(format!("{key}={value}: expected {expected}")))
}

fn planner(params: &mut Params) -> Result<StallocPlanner, SpecError> {
    let Some(name) = params.take("planner") else { return Ok(StallocPlanner::default()) };
    one_of(params, "planner", &name, StallocPlanner::ALL.map(|planner| (planner.name(), planner)))
}

fn percentage(params: &mut Params) -> Result<u64, SpecError> {
    let percent = number(params, "dynamic_utilization", 0)?;
    if percent > 100 {
        let message = format!("dynamic_utilization={percent}: expected a percentage, 0 to 100");
        return Err(params.value_error(message));
    }
    Ok(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(spec: &str) -> Result<Config, String> {
        let spec = spec.parse().expect("a specification");
        let mut params = Params::new(&spec);
        let config = Config::take(&mut params).map_err(|error| error.to_string())?;
        params.finish().map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn one_word_mends_everything_and_each_thing_can_be_mended_alone() {
        let faithful = config("planned").expect("defaults");
        let mended = config("planned+faithful=false").expect("mended");
        assert!(faithful.leak && !faithful.realign && !faithful.keeps_streams);
        assert_eq!((faithful.reuse, faithful.experts_per_layer), (Reuse::Off, 0));
        assert!(!mended.leak && mended.realign && mended.keeps_streams && mended.counts_by_layer);
        assert_eq!((mended.reuse, mended.experts_per_layer), (Reuse::All, u64::MAX));
        let one = config("planned+realign=iteration").expect("one");
        assert_eq!(one, Config { realign: true, ..faithful });
        let other = config("planned+faithful=false+realign=none").expect("all but one");
        assert_eq!(other, Config { realign: false, ..mended });
    }

    #[test]
    fn values_are_checked() {
        let wrong = |spec| config(spec).expect_err("refused");
        assert!(wrong("planned+realign=2").contains("realign=2: expected none or iteration"));
        assert!(wrong("planned+expert_per_gpu=few").contains("a number, or all"));
        assert!(wrong("planned+dynamic_utilization=101").contains("0 to 100"));
        assert!(wrong("planned+leak=maybe").contains("true or 1 or false or 0"));
    }
}
