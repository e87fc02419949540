//! From a description to its cells: parameters are multiplied, names become files.
//!
//! The one design decision: a parameter counts only where a trace or an allocator names it. What
//! does not hang on it is one cell, not one a value, so that `caching` stands once beside three
//! policies of `stitch`. What cells have in common they share, so that a million of them are small.
//!
//! ```text
//!   [parameters]          traces              allocators                    cells
//!   strategy = [N, R]     job-{strategy}.gz   caching                       N caching
//!   policy = [p, q]                           stitch+policy={policy}        N stitch p, N stitch q
//!                                                                           R caching, ...
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::description::{
    AllocatorTemplate, Axis, AxisValue, Block, Description, Kind, Size, SizeKind, TraceTemplate,
};
use super::error::DescriptionError;
use super::files::{Found, find, find_place};
use super::filter::Filter;
use super::rows::{Column, Value};
use super::template;
use crate::alloc::planned;
use crate::alloc::spec::AllocSpec;
use crate::import::trace_name;

/// Most cells of an experiment: more is a slip of the pen, or work for an experiment each. While it
/// runs a cell is some 200 bytes, and its row a kilobyte.
const CELLS_MAX: usize = 1_000_000;

/// Folders that names are looked for in.
#[derive(Clone, Debug)]
pub struct Folders {
    /// Where the description stands; names are looked for here first, then in the folder around it.
    pub base: PathBuf,
    /// What `{recordings}` stands for.
    pub recordings: PathBuf,
}

/// Where the trace of a cell comes from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TraceSource {
    /// A file.
    File(PathBuf),
    /// The description of a job and what replaces its keys.
    Job(PathBuf, Vec<(String, String)>),
}

impl TraceSource {
    /// The file that is read.
    pub fn path(&self) -> &Path {
        match self {
            TraceSource::File(path) | TraceSource::Job(path, _) => path,
        }
    }
}

/// One cell: a trace through an allocator on a device.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Its block.
    pub set: Arc<str>,
    /// Where its trace comes from.
    pub source: Arc<TraceSource>,
    /// What the trace is called.
    pub trace: Arc<str>,
    /// The value of each parameter, nothing where it does not count.
    pub axes: Arc<[Option<String>]>,
    /// What the allocator is called in figures.
    pub label: Arc<str>,
    /// The allocator, as the description has it.
    pub allocator: Arc<AllocSpec>,
    /// The allocator with the files that it names as they are opened.
    pub resolved: Arc<AllocSpec>,
    /// Device memory.
    pub capacity: Arc<Size>,
    /// The allocator's own limit.
    pub limit: Arc<Size>,
    /// Look for the smallest capacity.
    pub searches: bool,
    /// Cost profile.
    pub profile: Arc<str>,
    /// First steps that allocators which plan ahead learn from.
    pub profile_steps: Option<u64>,
    /// Settings in place of the recorded ones.
    pub settings: Option<Arc<str>>,
    /// Where its allocator stands in the text, in bytes.
    at: usize,
}

impl Description {
    /// An error about a cell, at the place where its allocator stands.
    pub fn error_of(&self, cell: &Cell, message: String) -> DescriptionError {
        DescriptionError::at(&self.source, cell.at, message)
    }
}

impl Cell {
    /// What its row begins with: the columns up to `limit`.
    pub fn names(&self, description: &Description) -> Vec<Value> {
        let mut names = Vec::new();
        if description.has_sets() {
            names.push(Value::of_word(&self.set));
        }
        names.push(Value::of_word(&self.trace));
        names.extend(self.axes.iter().map(|value| match value {
            Some(text) => Value::of_word(text),
            None => Value::None,
        }));
        let allocator = self.allocator.to_string();
        let rest = [&*self.label, &allocator, &self.profile, &self.capacity.text, &self.limit.text];
        names.extend(rest.map(Value::of_word));
        names
    }

    /// Whether all conditions on its names hold; `columns` are those of the description.
    pub fn passes(
        &self,
        description: &Description,
        columns: &[Column],
        filters: &[Filter],
    ) -> bool {
        if filters.is_empty() {
            return true;
        }
        let names = self.names(description);
        filters.iter().all(|filter| {
            let value = columns.iter().zip(&names).find(|(column, _)| column.name == filter.column);
            let Some((_, value)) = value else { return false };
            filter.passes(if let Value::Word(word) = value { word } else { "" })
        })
    }
}

/// Every cell of a description, in the order of its blocks, traces, allocators, limits and
/// capacities.
///
/// # Errors
/// If a name leads to no file, an allocator is not understood, two traces have one label, or there
/// are too many cells.
pub fn cells(description: &Description, folders: &Folders) -> Result<Vec<Cell>, DescriptionError> {
    cells_and_others(description, folders).map(|(cells, _)| cells)
}

/// [`cells`], and the files in folders of traces that are no traces.
///
/// # Errors
/// As [`cells`].
pub fn cells_and_others(
    description: &Description,
    folders: &Folders,
) -> Result<(Vec<Cell>, BTreeSet<PathBuf>), DescriptionError> {
    let Kind::Replay(blocks) = &description.kind else { return Ok(Default::default()) };
    let mut maker = Maker {
        description,
        folders,
        cells: Vec::new(),
        others: BTreeSet::new(),
        labels: BTreeMap::new(),
        allocators: BTreeMap::new(),
    };
    for block in blocks {
        let shared = Shared::of(block);
        for trace in &block.traces {
            maker.add_trace(block, &shared, trace)?;
        }
    }
    Ok((maker.cells, maker.others))
}

/// The value that each parameter has, by place; nothing where it does not count.
type Chosen<'a> = Vec<Option<&'a AxisValue>>;

/// What all cells of a block have in common.
struct Shared {
    set: Arc<str>,
    profile: Arc<str>,
    settings: Option<Arc<str>>,
    limits: Vec<Arc<Size>>,
    capacities: Vec<Arc<Size>>,
}

impl Shared {
    fn of(block: &Block) -> Shared {
        let shared = |sizes: &[Size]| sizes.iter().cloned().map(Arc::new).collect();
        Shared {
            set: block.set.as_str().into(),
            profile: block.profile.as_str().into(),
            settings: block.settings.as_deref().map(Arc::from),
            limits: shared(&block.limits),
            capacities: shared(&block.capacities),
        }
    }
}

/// An allocator with values in place of parameters: its label, and itself without and with the
/// files that it names as they are opened.
type Named = (Arc<str>, Arc<AllocSpec>, Arc<AllocSpec>);

struct Maker<'a> {
    description: &'a Description,
    folders: &'a Folders,
    cells: Vec<Cell>,
    others: BTreeSet<PathBuf>,
    labels: BTreeMap<Arc<str>, Arc<TraceSource>>,
    /// By specification and label.
    allocators: BTreeMap<(String, String), Named>,
}

impl<'a> Maker<'a> {
    fn error(&self, at: usize, message: String) -> DescriptionError {
        DescriptionError::at(&self.description.source, at, message)
    }

    fn axes(&self) -> &'a [Axis] {
        &self.description.axes
    }

    fn add_trace(
        &mut self,
        block: &'a Block,
        shared: &Shared,
        template: &'a TraceTemplate,
    ) -> Result<(), DescriptionError> {
        let texts = [Some(&template.path), template.label.as_ref()];
        let texts = texts.into_iter().flatten().chain(template.set.iter().map(|(_, value)| value));
        let mut counts = self.counting(texts);
        for (counts, axis) in counts.iter_mut().zip(self.axes()) {
            *counts |= template.is_job && axis.sets();
        }
        let nothing = vec![None; self.axes().len()];
        for chosen in self.product(&counts, &nothing, template.at)? {
            for (source, label) in self.sources(template, &chosen)? {
                let (source, label) = (Arc::new(source), Arc::from(label));
                let trace = self.check_label(template, &label, &source)?;
                for allocator in &block.allocators {
                    self.add_allocator((block, shared), &trace, &label, allocator, &chosen)?;
                }
            }
        }
        Ok(())
    }

    fn too_many(&self, at: usize) -> DescriptionError {
        self.error(at, format!("more than {CELLS_MAX} cells: make an experiment of each part"))
    }

    /// Every choice of the parameters that count, the last one running fastest; those that are
    /// already chosen stay.
    fn product(
        &self,
        counts: &[bool],
        chosen: &Chosen<'a>,
        place: usize,
    ) -> Result<Vec<Chosen<'a>>, DescriptionError> {
        let axes = self.axes().iter().enumerate();
        let open: Vec<(usize, &Axis)> =
            axes.filter(|(at, _)| counts[*at] && chosen[*at].is_none()).collect();
        let count =
            open.iter().fold(1, |count: usize, (_, axis)| count.saturating_mul(axis.values.len()));
        if count > CELLS_MAX {
            return Err(self.too_many(place));
        }
        let mut choices = vec![chosen.clone()];
        for (at, axis) in open {
            let wider = choices.iter().flat_map(|choice| {
                axis.values.iter().map(move |value| {
                    let mut choice = choice.clone();
                    choice[at] = Some(value);
                    choice
                })
            });
            choices = wider.collect();
        }
        Ok(choices)
    }

    /// Which parameters these texts name.
    fn counting<'t>(&self, texts: impl Iterator<Item = &'t String>) -> Vec<bool> {
        let names: Vec<&str> = texts.flat_map(|text| template::names(text)).collect();
        self.axes().iter().map(|axis| names.contains(&axis.name.as_str())).collect()
    }

    fn filled(&self, text: &str, chosen: &Chosen<'a>) -> String {
        template::filled(text, |name| {
            let at = self.axes().iter().position(|axis| axis.name == name)?;
            Some(chosen[at]?.text.as_str())
        })
    }

    /// The files or jobs of a template, with their labels.
    fn sources(
        &mut self,
        template: &TraceTemplate,
        chosen: &Chosen<'a>,
    ) -> Result<Vec<(TraceSource, String)>, DescriptionError> {
        let name = self.filled(&template.path, chosen);
        let found = find(&name, self.folders).map_err(|why| {
            let hint = if name.contains("{recordings}") {
                "; --recordings DIR says where the recordings are"
            } else {
                ""
            };
            let message = match self.description.is_of_folder() {
                // A folder in place of a description: whoever named it knows its name.
                true => why,
                false => format!("{name:?}: {why}{hint}"),
            };
            self.error(template.at, message)
        })?;
        let Found { paths, others, is_folder } = found;
        self.others.extend(others);
        let label = template.label.as_ref().map(|label| self.filled(label, chosen));
        if let (Some(label), [_, _, ..]) = (&label, &paths[..]) {
            let message = format!("{} traces would all be called {label:?}", paths.len());
            return Err(self.error(template.at, message));
        }
        let stems = if is_folder {
            short_names(&paths)
        } else {
            paths.iter().map(|path| stem(path)).collect()
        };
        let sources = paths.into_iter().zip(stems).map(|(path, stem)| {
            if !template.is_job {
                return (TraceSource::File(path), label.clone().unwrap_or(stem));
            }
            let beside = self.beside(template, chosen);
            let stem = stem.strip_suffix(".toml").unwrap_or(&stem).to_owned();
            let named = chosen.iter().flatten().map(|value| value.text.as_str());
            let default = [stem.as_str()].into_iter().chain(named).collect::<Vec<_>>().join(" ");
            (TraceSource::Job(path, beside), label.clone().unwrap_or(default))
        });
        Ok(sources.collect())
    }

    /// What replaces keys of a job: what the trace says, then what the parameters say.
    fn beside(&self, template: &TraceTemplate, chosen: &Chosen<'a>) -> Vec<(String, String)> {
        let own = template.set.iter().map(|(key, value)| (key.clone(), self.filled(value, chosen)));
        let of_axes = chosen.iter().flatten().flat_map(|value| value.set.iter().cloned());
        own.chain(of_axes).collect()
    }

    /// The source that a label stands for: the same one for all cells of a trace.
    fn check_label(
        &mut self,
        template: &TraceTemplate,
        label: &Arc<str>,
        source: &Arc<TraceSource>,
    ) -> Result<Arc<TraceSource>, DescriptionError> {
        let known = self.labels.entry(Arc::clone(label)).or_insert_with(|| Arc::clone(source));
        if known == source {
            return Ok(Arc::clone(known));
        }
        let message = format!(
            "two different traces are called {label:?}: give them labels that tell them apart, as \
             in {{ file = \"TRACE\", label = \"NAME\" }}"
        );
        Err(self.error(template.at, message))
    }

    fn add_allocator(
        &mut self,
        (block, shared): (&'a Block, &Shared),
        source: &Arc<TraceSource>,
        trace: &Arc<str>,
        template: &'a AllocatorTemplate,
        of_trace: &Chosen<'a>,
    ) -> Result<(), DescriptionError> {
        let texts = [Some(&template.spec), template.label.as_ref()];
        let counts = self.counting(texts.into_iter().flatten());
        for chosen in self.product(&counts, of_trace, template.at)? {
            let (label, allocator, resolved) = self.allocator(template, &chosen)?;
            let axes: Arc<[Option<String>]> =
                chosen.iter().map(|value| Some(value.as_ref()?.text.clone())).collect();
            for limit in &shared.limits {
                for capacity in &shared.capacities {
                    self.cells.push(Cell {
                        set: Arc::clone(&shared.set),
                        source: Arc::clone(source),
                        trace: Arc::clone(trace),
                        axes: Arc::clone(&axes),
                        label: Arc::clone(&label),
                        allocator: Arc::clone(&allocator),
                        resolved: Arc::clone(&resolved),
                        capacity: Arc::clone(capacity),
                        limit: Arc::clone(limit),
                        searches: block.smallest_capacity && capacity.kind == SizeKind::OfTrace,
                        profile: Arc::clone(&shared.profile),
                        profile_steps: block.profile_steps,
                        settings: shared.settings.clone(),
                        at: template.at,
                    });
                }
            }
            if self.cells.len() > CELLS_MAX {
                return Err(self.too_many(template.at));
            }
        }
        Ok(())
    }

    /// An allocator with values in place of parameters.
    fn allocator(
        &mut self,
        template: &AllocatorTemplate,
        chosen: &Chosen<'a>,
    ) -> Result<Named, DescriptionError> {
        let text = self.filled(&template.spec, chosen);
        let label = template.label.as_ref().map(|label| self.filled(label, chosen));
        let place = (text, label.unwrap_or_else(|| self.filled(&template.spec, chosen)));
        if let Some(known) = self.allocators.get(&place) {
            return Ok(known.clone());
        }
        let (text, label) = &place;
        let allocator: AllocSpec =
            text.parse().map_err(|error| self.error(template.at, format!("{error}")))?;
        let resolved = planned::with_files(&allocator, |file| find_place(file, self.folders))
            .map_err(|why| self.error(template.at, format!("{text:?}: {why}")))?;
        let named = (Arc::from(label.as_str()), Arc::new(allocator), Arc::new(resolved));
        self.allocators.insert(place, Named::clone(&named));
        Ok(named)
    }
}

/// Name of a file without its endings.
fn stem(path: &Path) -> String {
    trace_name(path).unwrap_or_else(|| path.display().to_string())
}

/// Names of the files of a folder: without endings, where that still tells them apart.
fn short_names(paths: &[PathBuf]) -> Vec<String> {
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for path in paths {
        *counts.entry(stem(path)).or_default() += 1;
    }
    let name = |path: &PathBuf| {
        let file = || path.file_name().map(|name| name.to_string_lossy().into_owned());
        let stem = stem(path);
        if counts.get(&stem) == Some(&1) { stem } else { file().unwrap_or(stem) }
    };
    paths.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::super::read_description;
    use super::*;

    fn folder_with(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            std::fs::write(folder.path().join(file), "alloc a 1MiB\nfree a\n").unwrap();
        }
        folder
    }

    fn folders(folder: &tempfile::TempDir) -> Folders {
        Folders { base: folder.path().to_owned(), recordings: folder.path().join("none") }
    }

    fn names(text: &str, folder: &tempfile::TempDir) -> Vec<String> {
        let description = read_description(text).expect("reads");
        let cells = cells(&description, &folders(folder)).expect("cells");
        let name = |cell: &Cell| format!("{} {} {}", cell.trace, cell.label, cell.capacity.text);
        cells.iter().map(name).collect()
    }

    const TWO_AXES: &str = r#"
name = "two"
traces = ["job-{strategy}.txt"]
allocators = ["caching", "stitch+policy={policy}"]
capacities = ["auto", "1GiB"]
[parameters]
strategy = ["N", "R"]
policy = ["paper", "best"]
"#;

    #[test]
    fn parameters_are_multiplied_where_they_are_named() {
        let folder = folder_with(&["job-N.txt", "job-R.txt"]);
        let expected: Vec<String> = ["N", "R"]
            .iter()
            .flat_map(|strategy| {
                ["caching", "stitch+policy=paper", "stitch+policy=best"].map(|allocator| {
                    ["auto", "1GiB"].map(|size| format!("job-{strategy} {allocator} {size}"))
                })
            })
            .flatten()
            .collect();
        assert_eq!(names(TWO_AXES, &folder), expected);
        let description = read_description(TWO_AXES).unwrap();
        let cells = cells(&description, &folders(&folder)).unwrap();
        // 2 strategies x (1 + 2 policies) x 2 sizes; `caching` hangs on no policy.
        assert_eq!(cells.len(), 12);
        assert_eq!(*cells[0].axes, [Some("N".to_owned()), None]);
        assert_eq!(*cells[4].axes, [Some("N".to_owned()), Some("best".to_owned())]);
    }

    #[test]
    fn a_parameter_of_both_is_one_parameter() {
        let folder = folder_with(&["a.txt", "b.txt"]);
        let text = "name = \"x\"\ntraces = [\"{t}.txt\"]\n\
                    allocators = [{ spec = \"caching\", label = \"on {t}\" }]\n\
                    [parameters]\nt = [\"a\", \"b\"]\n";
        assert_eq!(names(text, &folder), ["a on a auto", "b on b auto"]);
    }

    #[test]
    fn files_of_allocators_are_looked_for_as_traces_are() {
        let (folder, other) = (folder_with(&["a.txt"]), folder_with(&["r.txt"]));
        let folders = Folders { recordings: other.path().to_owned(), ..folders(&folder) };
        let text = "name = \"x\"\ntraces = [\"a.txt\"]\n\
                    allocators = [\"planned+trace=a.txt\", \"planned+trace={recordings}/r.txt\"]\n";
        let cells = cells(&read_description(text).unwrap(), &folders).unwrap();
        let file = |at: usize| Path::new(&cells[at].resolved.params[0].1);
        assert_eq!(file(0), folder.path().join("a.txt"));
        assert_eq!(file(1), other.path().join("r.txt"));
        // What stands in reports does not hang on where the files lie.
        assert_eq!(&*cells[1].label, "planned+trace={recordings}/r.txt");
        assert_eq!(cells[1].allocator.to_string(), &*cells[1].label);
    }

    #[test]
    fn stars_stand_for_files_in_order() {
        let folder = folder_with(&["b.txt", "a.txt", "c.csv"]);
        let text = "name = \"x\"\ntraces = [\"*.txt\"]\nallocators = [\"native\"]\n";
        assert_eq!(names(text, &folder), ["a native auto", "b native auto"]);
    }

    #[test]
    fn a_folder_stands_for_its_traces_in_the_order_of_numbers() {
        let folder = folder_with(&[]);
        std::fs::create_dir(folder.path().join("ranks")).unwrap();
        for file in ["rank10.txt", "rank2.txt", "rank2.json", "README.md", "rank2.truth.json"] {
            std::fs::write(folder.path().join("ranks").join(file), "{\"fraglab_trace\"").unwrap();
        }
        for name in ["ranks", "ranks/"] {
            let text = format!("name = \"x\"\ntraces = [\"{name}\"]\nallocators = [\"native\"]\n");
            // Two files of one name are told apart by their endings.
            let expected =
                ["rank2.json", "rank2.txt", "rank10"].map(|it| format!("{it} native auto"));
            assert_eq!(names(&text, &folder), expected);
        }
    }

    #[test]
    fn faults_that_show_later_are_told_with_their_place_too() {
        let folder = folder_with(&["job-N.txt"]);
        let error = |text: &str| {
            let description = read_description(text).expect("reads");
            let error = cells(&description, &folders(&folder)).expect_err("wrong");
            (error.line, error.message)
        };
        let (line, message) = error(TWO_AXES);
        assert_eq!(line, 3);
        assert!(message.contains("job-R.txt") && message.contains("no such file"), "{message}");
        let one = TWO_AXES.replace("job-{strategy}", "{recordings}/job");
        let (line, message) = error(&one);
        assert_eq!(line, 3);
        assert!(message.contains("--recordings"), "{message}");
        let both = TWO_AXES.replace(
            "\"job-{strategy}.txt\"",
            "{ file = \"job-N.txt\", label = \"x\" }, { gen = \"job-N.txt\", label = \"x\" }",
        );
        let (line, message) = error(&both);
        assert_eq!(line, 3);
        assert!(message.contains("two different traces"), "{message}");
    }

    #[test]
    fn too_many_cells_are_refused_before_they_are_made() {
        let folder = folder_with(&[]);
        let values: Vec<String> = (0..1000).map(|value| value.to_string()).collect();
        let values = values.join(", ");
        let text = format!(
            "name = \"x\"\ntraces = [\"{{a}}{{b}}{{c}}\"]\nallocators = [\"native\"]\n\
             [parameters]\na = [{values}]\nb = [{values}]\nc = [{values}]\n"
        );
        let description = read_description(&text).expect("reads");
        let error = cells(&description, &folders(&folder)).expect_err("refused");
        assert!(error.line == 2 && error.message.contains("more than 1000000 cells"), "{error}");
    }

    #[test]
    fn values_of_parameters_replace_keys_of_jobs() {
        let folder = folder_with(&["job.toml"]);
        let text = r#"
name = "x"
traces = [{ gen = "job.toml", set = { "train.batch" = "{batch}" } }]
allocators = ["caching"]
[parameters]
batch = [1, 2]
option = ["none", { value = "ckp", set = { options = { use_ckp = true } } }]
"#;
        let description = read_description(text).unwrap();
        let cells = cells(&description, &folders(&folder)).unwrap();
        let jobs: Vec<(String, Vec<(String, String)>)> = cells
            .iter()
            .map(|cell| match &*cell.source {
                TraceSource::Job(_, beside) => (cell.trace.to_string(), beside.clone()),
                TraceSource::File(_) => panic!("a job"),
            })
            .collect();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(jobs.len(), 4);
        assert_eq!(jobs[0], ("job 1 none".to_owned(), vec![pair("train.batch", "1")]));
        let both = vec![pair("train.batch", "2"), pair("options.use_ckp", "true")];
        assert_eq!(jobs[3], ("job 2 ckp".to_owned(), both));
    }
}
