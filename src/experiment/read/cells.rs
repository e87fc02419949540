//! The part of a description that says which cells there are.

use super::super::description::{
    AllocatorTemplate, Axis, AxisValue, Block, Size, SizeKind, TraceTemplate,
};
use super::super::error::DescriptionError;
use super::super::template;
use super::fields::{Field, Fields};
use crate::device::CostProfile;
use crate::units::Bytes;

/// Keys that say which cells there are; at the top they hold for every `[[cells]]` that does not
/// say otherwise.
pub(super) const BLOCK_KEYS: [&str; 8] = [
    "traces",
    "allocators",
    "capacities",
    "limits",
    "smallest_capacity",
    "profile",
    "profile_steps",
    "settings",
];

/// Most steps of a profile.
const STEPS_MAX: u64 = 1_000_000;
/// Most values of a parameter.
const VALUES_MAX: usize = 10_000;
/// Longest value of a parameter, and longest text that one stands in, in bytes: what is made of
/// them must not grow without bound.
const VALUE_LENGTH_MAX: usize = 200;
const TEXT_LENGTH_MAX: usize = 2000;
/// Multiples of the requested peak that make sense.
const MULTIPLE_MAX: f64 = 1000.0;

/// Parameters, in the order of the text.
pub(super) fn axes(top: &Fields<'_>) -> Result<Vec<Axis>, DescriptionError> {
    let Some(parameters) = top.get("parameters") else { return Ok(Vec::new()) };
    let mut axes = Vec::new();
    for (name, values) in parameters.any_table()? {
        if !template::is_name(name) || RESERVED.contains(&name) {
            let message = format!(
                "{name:?} cannot be a parameter: expected letters, digits and _, none of {}",
                RESERVED.join(", ")
            );
            return Err(values.error(message));
        }
        let listed = values.list()?;
        if listed.is_empty() || listed.len() > VALUES_MAX {
            return Err(values.wrong(&format!("expected 1 to {VALUES_MAX} values")));
        }
        let read: Vec<AxisValue> = listed.iter().map(axis_value).collect::<Result<_, _>>()?;
        let twice = read
            .iter()
            .enumerate()
            .find(|(at, value)| read[..*at].iter().any(|earlier| earlier.text == value.text));
        if let Some((_, value)) = twice {
            return Err(values.error(format!("{name} has the value {:?} twice", value.text)));
        }
        axes.push(Axis { name: name.to_owned(), values: read });
    }
    Ok(axes)
}

/// Names that columns of every result have, or folders.
const RESERVED: [&str; 8] =
    ["recordings", "set", "trace", "label", "allocator", "profile", "capacity", "limit"];

fn axis_value(value: &Field<'_>) -> Result<AxisValue, DescriptionError> {
    if !value.is_table() {
        return Ok(AxisValue { text: short_text(value)?, set: Vec::new() });
    }
    let fields = value.table(&["value", "set"])?;
    let text = fields.required("value", "value = \"NAME\", which results call it by")?;
    Ok(AxisValue { text: short_text(&text)?, set: replaced(&fields)? })
}

fn short_text(value: &Field<'_>) -> Result<String, DescriptionError> {
    let text = value.spelled()?;
    if text.len() > VALUE_LENGTH_MAX {
        return Err(value.wrong(&format!("expected at most {VALUE_LENGTH_MAX} bytes")));
    }
    Ok(text)
}

/// Keys that replace those of a job.
fn replaced(fields: &Fields<'_>) -> Result<Vec<(String, String)>, DescriptionError> {
    let Some(set) = fields.get("set") else { return Ok(Vec::new()) };
    let mut replaced = Vec::new();
    for (key, value) in set.any_table()? {
        flatten(key.to_owned(), &value, &mut replaced)?;
    }
    Ok(replaced)
}

/// `train = { batch = 4 }` and `"train.batch" = 4` are the same.
fn flatten(
    path: String,
    value: &Field<'_>,
    into: &mut Vec<(String, String)>,
) -> Result<(), DescriptionError> {
    if !value.is_table() {
        into.push((path, value.spelled()?));
        return Ok(());
    }
    for (key, value) in value.any_table()? {
        flatten(format!("{path}.{key}"), &value, into)?;
    }
    Ok(())
}

/// The blocks of cells: those of `[[cells]]`, else the one at the top.
pub(super) fn blocks(top: &Fields<'_>) -> Result<Vec<Block>, DescriptionError> {
    let axes: Vec<String> = axes(top)?.into_iter().map(|axis| axis.name).collect();
    let tables = top.tables("cells")?;
    if tables.is_empty() {
        return Ok(vec![block(String::new(), top, None, &axes)?]);
    }
    let mut blocks: Vec<Block> = Vec::new();
    for table in tables {
        let known: Vec<&str> = ["set"].iter().chain(&BLOCK_KEYS).copied().collect();
        let fields = table.table(&known)?;
        let set = fields.required("set", "set = \"NAME\", which results call these cells by")?;
        let name = set.text()?.to_owned();
        if name.is_empty() || blocks.iter().any(|block| block.set == name) {
            return Err(set.wrong("expected a name that no other [[cells]] has"));
        }
        blocks.push(block(name, &fields, Some(top), &axes)?);
    }
    Ok(blocks)
}

fn block(
    set: String,
    fields: &Fields<'_>,
    defaults: Option<&Fields<'_>>,
    axes: &[String],
) -> Result<Block, DescriptionError> {
    // The table that says something about a key.
    let of = |key: &'static str| match defaults {
        Some(defaults) if fields.get(key).is_none() => defaults,
        _ => fields,
    };
    let traces = of("traces").required("traces", "traces = [\"job.pickle.gz\"]")?.list()?;
    let allocators =
        of("allocators").required("allocators", "allocators = [\"caching\", \"expandable\"]")?;
    let allocators = allocators.list()?;
    let sizes = |key: &'static str, trace: &'static str| match of(key).get(key) {
        Some(field) => field.texts()?.iter().map(|field| size(field, trace)).collect(),
        None => Ok(vec![Size { text: trace.to_owned(), kind: SizeKind::OfTrace }]),
    };
    Ok(Block {
        set,
        traces: traces.iter().map(|field| trace(field, axes)).collect::<Result<_, _>>()?,
        allocators: allocators
            .iter()
            .map(|field| allocator(field, axes))
            .collect::<Result<_, _>>()?,
        capacities: sizes("capacities", "auto")?,
        limits: sizes("limits", "trace")?,
        smallest_capacity: of("smallest_capacity").switch("smallest_capacity")?.unwrap_or(false),
        profile: match of("profile").get("profile") {
            Some(field) => profile(&field)?,
            None => "h200".to_owned(),
        },
        profile_steps: of("profile_steps").whole("profile_steps", 1, STEPS_MAX)?,
        settings: of("settings").text("settings")?,
    })
}

/// The name of a cost profile that ships.
pub(super) fn profile(field: &Field<'_>) -> Result<String, DescriptionError> {
    let name = field.text()?;
    let known = CostProfile::shipped_names();
    if known.contains(&name) {
        return Ok(name.to_owned());
    }
    Err(field.wrong(&format!("expected one of {}", known.join(", "))))
}

fn trace(field: &Field<'_>, axes: &[String]) -> Result<TraceTemplate, DescriptionError> {
    if !field.is_table() {
        let path = templated(field, axes)?;
        return Ok(TraceTemplate {
            path,
            is_job: false,
            set: Vec::new(),
            label: None,
            at: field.at,
        });
    }
    let fields = field.table(&["file", "gen", "set", "label"])?;
    let (path, is_job) = match (fields.get("file"), fields.get("gen")) {
        (Some(file), None) => (templated(&file, axes)?, false),
        (None, Some(job)) => (templated(&job, axes)?, true),
        _ => {
            let message = "a trace is either file = \"TRACE\" or gen = \"JOB.toml\"".to_owned();
            return Err(field.error(message));
        }
    };
    if let (false, Some(set)) = (is_job, fields.get("set")) {
        return Err(set.error("set replaces keys of a job: it goes with gen".to_owned()));
    }
    let set = replaced(&fields)?;
    for (_, value) in &set {
        check_names(field, value, axes)?;
    }
    let label = fields.get("label").map(|label| templated(&label, axes)).transpose()?;
    Ok(TraceTemplate { path, is_job, set, label, at: field.at })
}

fn allocator(field: &Field<'_>, axes: &[String]) -> Result<AllocatorTemplate, DescriptionError> {
    if !field.is_table() {
        let spec = templated(field, axes)?;
        return Ok(AllocatorTemplate { spec, label: None, at: field.at });
    }
    let fields = field.table(&["spec", "label"])?;
    let spec = fields.required("spec", "spec = \"stitch+policy=best\"")?;
    let label = fields.get("label").map(|label| templated(&label, axes)).transpose()?;
    Ok(AllocatorTemplate { spec: templated(&spec, axes)?, label, at: spec.at })
}

/// A text in which `{key}` stands for parameters.
fn templated(field: &Field<'_>, axes: &[String]) -> Result<String, DescriptionError> {
    let text = field.text()?;
    check_names(field, text, axes)?;
    Ok(text.to_owned())
}

fn check_names(field: &Field<'_>, text: &str, axes: &[String]) -> Result<(), DescriptionError> {
    if text.len() > TEXT_LENGTH_MAX {
        return Err(field.error(format!("expected a text of at most {TEXT_LENGTH_MAX} bytes")));
    }
    let known = |name: &&str| *name == "recordings" || axes.iter().any(|axis| axis == name);
    match template::names(text).into_iter().find(|name| !known(name)) {
        Some(name) => Err(field.error(format!(
            "{{{name}}} is no parameter: [parameters] has {}, and there is {{recordings}}",
            if axes.is_empty() { "none".to_owned() } else { axes.join(", ") }
        ))),
        None => Ok(()),
    }
}

/// `auto` or `trace`, a size, or a multiple of the requested peak.
fn size(field: &Field<'_>, trace: &'static str) -> Result<Size, DescriptionError> {
    let text = field.text()?.trim();
    let multiple = || {
        let factor: f64 = text.strip_suffix('x')?.parse().ok()?;
        (factor > 0.0 && factor <= MULTIPLE_MAX).then_some(SizeKind::OfPeak(factor))
    };
    let bytes = || match text.parse::<Bytes>() {
        Ok(Bytes(bytes)) if bytes > 0 => Some(SizeKind::Bytes(bytes)),
        _ => None,
    };
    let kind = if text == trace { Some(SizeKind::OfTrace) } else { multiple().or_else(bytes) };
    let expected = format!(
        "expected {trace:?}, a size as in \"80GiB\", or a multiple of the requested peak as in \
         \"1.25x\""
    );
    let kind = kind.ok_or_else(|| field.wrong(&expected))?;
    Ok(Size { text: text.to_owned(), kind })
}
