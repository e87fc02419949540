//! Parts of an experiment that run apart, and whether parts make a whole.
//!
//! The one design decision: all cells of a trace are of one part, and the traces go to the parts in
//! turn, as the description lists them. So who does what hangs on the description alone, a figure
//! that compares cells of one trace has all of them, and a trace is read by one part only.
//!
//! ```text
//!   traces  1 2 3 4 5 6 7 ──┬─ 1/3: 1 4 7 ──> NAME.shard-1-of-3.parquet ──┐
//!                           ├─ 2/3: 2 5   ──> NAME.shard-2-of-3.parquet ──┼─> rows, in order
//!                           └─ 3/3: 3 6   ──> NAME.shard-3-of-3.parquet ──┘
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::cells::Cell;
use super::description::{Description, Kind};
use super::store::{Key, KeyBuilder};

/// Version of what a part file holds.
const SCHEMA_VERSION: u32 = 1;

/// Most parts: as many as cells at most.
const SHARDS_MAX: u32 = 1_000_000;

/// How many of many are named in a message.
const NAMED_MAX: usize = 10;

/// A part of an experiment: the I-th of N.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shard {
    /// Which one, from 1.
    pub number: u32,
    /// Of how many.
    pub count: u32,
}

/// A text names no part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected I/N, the I-th of N parts, as in 1/4: both whole numbers, I from 1 to N, N at most \
     {SHARDS_MAX}"
)]
pub struct ShardError;

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Shard, ShardError> {
        let (number, count) = text.split_once('/').ok_or(ShardError)?;
        let whole = |text: &str| text.trim().parse::<u32>().map_err(|_| ShardError);
        let shard = Shard { number: whole(number)?, count: whole(count)? };
        let is_good = (1..=shard.count).contains(&shard.number) && shard.count <= SHARDS_MAX;
        is_good.then_some(shard).ok_or(ShardError)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.count)
    }
}

impl Shard {
    /// Whether it does the trace at this place of [`by_trace`](super::by_trace).
    pub fn has(self, trace: usize) -> bool {
        trace % self.count as usize == self.number as usize - 1
    }

    /// What its files are called, without endings: `ranks.shard-03-of-16`. Their order by name is
    /// that of the parts.
    pub fn stem(self, name: &str) -> String {
        let width = self.count.to_string().len();
        format!("{name}.shard-{:0width$}-of-{}", self.number, self.count)
    }

    /// Name of the file that it writes.
    pub fn file_name(self, name: &str) -> String {
        format!("{}.parquet", self.stem(name))
    }
}

/// What a part says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartHeader {
    /// Version of what the file holds.
    pub schema_version: u32,
    /// Version of the program.
    pub fraglab_version: String,
    /// A key of the program's bytes, which tells builds of one version apart.
    pub program: String,
    /// Name of the experiment.
    pub experiment: String,
    /// A key of what the description says of its cells.
    pub description: String,
    /// A key of the names of all cells.
    pub cells: String,
    /// Number of all cells.
    pub cells_all: u64,
    /// Which part, from 1.
    pub shard: u32,
    /// Of how many.
    pub shards: u32,
    /// Every trace could be read.
    pub is_whole: bool,
}

impl PartHeader {
    /// What a part of an experiment says of itself; `cells` are those of the whole experiment.
    pub fn new(
        description: &Description,
        cells: &[Cell],
        shard: Shard,
        version: &str,
        program: Key,
        is_whole: bool,
    ) -> PartHeader {
        PartHeader {
            schema_version: SCHEMA_VERSION,
            fraglab_version: version.to_owned(),
            program: program.to_string(),
            experiment: description.name.clone(),
            description: meaning(description).to_string(),
            cells: key_of(description, cells).to_string(),
            cells_all: cells.len() as u64,
            shard: shard.number,
            shards: shard.count,
            is_whole,
        }
    }

    fn shard(&self) -> Shard {
        Shard { number: self.shard, count: self.shards }
    }

    /// What builds are told apart by, as people see it.
    fn build(&self) -> &str {
        self.program.get(..8).unwrap_or(&self.program)
    }
}

/// A key of what a description says of its cells: not of its title, figures and tables, and not of
/// how the text is laid out.
fn meaning(description: &Description) -> Key {
    let mut key = KeyBuilder::default().with(&description.name);
    for axis in &description.axes {
        key = key.with(format!("{axis:?}"));
    }
    let Kind::Replay(blocks) = &description.kind else { return key.key() };
    for block in blocks {
        let traces = block.traces.iter();
        let traces = traces.map(|it| (&it.path, it.is_job, &it.set, &it.label)).collect::<Vec<_>>();
        let allocators = block.allocators.iter().map(|it| (&it.spec, &it.label));
        let allocators = allocators.collect::<Vec<_>>();
        let sizes = (&block.capacities, &block.limits, block.smallest_capacity);
        let costs = (&block.profile, block.profile_steps, &block.settings);
        key = key.with(format!("{:?} {traces:?} {allocators:?} {sizes:?} {costs:?}", block.set));
    }
    key.key()
}

/// A key of all cells by name, in order. Where the files of their traces lie does not count.
fn key_of(description: &Description, cells: &[Cell]) -> Key {
    let cells = cells.iter();
    cells
        .fold(KeyBuilder::default(), |key, it| key.with(format!("{:?}", it.names(description))))
        .key()
}

/// Parts make no whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// There are none.
    #[error("no part of {name} is there: expected files called {name}.shard-*.parquet")]
    Nothing {
        /// Name of the experiment.
        name: String,
    },
    /// Some are not there.
    #[error("{} of {count} parts missing: {}", .shards.len(), named(.name, .shards))]
    Missing {
        /// Name of the experiment.
        name: String,
        /// Which.
        shards: Vec<Shard>,
        /// Number of all parts.
        count: u32,
    },
    /// Two files are the same part.
    #[error("{first} and {second} are both part {shard}: take one of them away")]
    Twice {
        /// A file.
        first: String,
        /// Another.
        second: String,
        /// What both are.
        shard: Shard,
    },
    /// A cell is in two parts.
    #[error("cell {cell} is in both {first} and {second}: run the parts again")]
    Overlap {
        /// Place among all cells, from 0.
        cell: u64,
        /// A file.
        first: String,
        /// Another.
        second: String,
    },
    /// A part has a cell that is none.
    #[error("{file} has cell {cell} of {cells_all}: run its part again")]
    Beyond {
        /// The file.
        file: String,
        /// Place that no cell has.
        cell: u64,
        /// Number of all cells.
        cells_all: u64,
    },
    /// Cells are in no part.
    #[error(
        "{count} cells are in none of the parts, the first is cell {cell}: run the parts again"
    )]
    Gap {
        /// Place of the first among all cells, from 0.
        cell: u64,
        /// Number of such cells.
        count: u64,
    },
    /// Parts differ in what they are parts of.
    #[error(
        "{} has {what} {}, {} has {}: {advice}",
        .files[0], .values[0], .files[1], .values[1]
    )]
    Mixed {
        /// Two files; the first may be this program.
        files: Box<[String; 2]>,
        /// In what they differ.
        what: &'static str,
        /// What each has.
        values: Box<[String; 2]>,
        /// What to do.
        advice: &'static str,
    },
    /// A part is of another description.
    #[error(
        "{file} was made from another description: run its part again, or merge with the \
         description that it was made from"
    )]
    Description {
        /// The file.
        file: String,
    },
}

impl MergeError {
    /// Parts that are to be run before these can be merged.
    pub fn missing(&self) -> &[Shard] {
        if let MergeError::Missing { shards, .. } = self { shards } else { &[] }
    }
}

fn named(name: &str, shards: &[Shard]) -> String {
    let files = shards.iter().take(NAMED_MAX).map(|shard| shard.file_name(name));
    let files = files.collect::<Vec<_>>().join(", ");
    match shards.len().saturating_sub(NAMED_MAX) {
        0 => files,
        more => format!("{files} and {more} more"),
    }
}

/// Checks that parts, each with the name of its file, are all parts of one run of a description by
/// this version of the program.
///
/// # Errors
/// The first thing that is wrong.
pub fn check_parts(
    description: &Description,
    version: &str,
    parts: &[(String, PartHeader)],
    allows_mixed_builds: bool,
) -> Result<(), MergeError> {
    let Some((first, of_first)) = parts.first() else {
        return Err(MergeError::Nothing { name: description.name.clone() });
    };
    let again = "run the parts again with one fraglab";
    let meaning = meaning(description).to_string();
    for (file, header) in parts {
        let differ =
            |first: &str, what, of_first: &dyn ToString, of_second: &dyn ToString, advice| {
                let files = Box::new([first.to_owned(), file.clone()]);
                let values = Box::new([of_first.to_string(), of_second.to_string()]);
                Err(MergeError::Mixed { files, what, values, advice })
            };
        let program = "this fraglab";
        if header.schema_version != SCHEMA_VERSION {
            let (ours, theirs) = (&SCHEMA_VERSION, &header.schema_version);
            return differ(program, "the version of parts", ours, theirs, again);
        }
        if header.fraglab_version != version {
            return differ(program, "the version", &version, &header.fraglab_version, again);
        }
        if header.shards != of_first.shards {
            let advice = "take the parts of one division away";
            return differ(first, "the number of parts", &of_first.shards, &header.shards, advice);
        }
        if header.description != meaning || header.experiment != description.name {
            return Err(MergeError::Description { file: file.clone() });
        }
        if (&header.cells, header.cells_all) != (&of_first.cells, of_first.cells_all) {
            let advice = "the folders that the parts saw held other traces: run the parts again";
            let cells = |it: &PartHeader| format!("{} of {} cells", &it.cells, it.cells_all);
            return differ(first, "the list", &cells(of_first), &cells(header), advice);
        }
        if header.program != of_first.program && !allows_mixed_builds {
            let advice = "run the parts again with one build, or say --allow-mixed-builds";
            return differ(first, "the build", &of_first.build(), &header.build(), advice);
        }
    }
    let mut files: BTreeMap<u32, &String> = BTreeMap::new();
    for (file, header) in parts {
        if let Some(other) = files.insert(header.shard, file) {
            let (first, second) = (other.clone(), file.clone());
            return Err(MergeError::Twice { first, second, shard: header.shard() });
        }
    }
    let count = of_first.shards;
    let missing = (1..=count).filter(|number| !files.contains_key(number));
    let shards: Vec<Shard> = missing.map(|number| Shard { number, count }).collect();
    if shards.is_empty() {
        return Ok(());
    }
    Err(MergeError::Missing { name: description.name.clone(), shards, count })
}

/// Checks that each of all cells is in one part; `parts` are files with the places of their cells.
///
/// # Errors
/// The first cell that is in two parts, in none, or none at all.
pub fn check_cells(parts: &[(String, Vec<u64>)], cells_all: u64) -> Result<(), MergeError> {
    let mut owners: BTreeMap<u64, &String> = BTreeMap::new();
    for (file, cells) in parts {
        for &cell in cells {
            if cell >= cells_all {
                return Err(MergeError::Beyond { file: file.clone(), cell, cells_all });
            }
            if let Some(other) = owners.insert(cell, file) {
                let (first, second) = (other.clone(), file.clone());
                return Err(MergeError::Overlap { cell, first, second });
            }
        }
    }
    let lacking = (0..cells_all).filter(|cell| !owners.contains_key(cell));
    let (mut lacking, mut count) = (lacking.peekable(), 0);
    let Some(&cell) = lacking.peek() else { return Ok(()) };
    lacking.for_each(|_| count += 1);
    Err(MergeError::Gap { cell, count })
}

#[cfg(test)]
mod tests {
    use super::super::read_description;
    use super::*;

    #[test]
    fn parts_are_named_by_number_and_count() {
        let shard: Shard = "3/16".parse().unwrap();
        assert_eq!(shard.stem("ranks"), "ranks.shard-03-of-16");
        for text in ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/2/3", "", "1/1000001"] {
            assert_eq!(text.parse::<Shard>(), Err(ShardError), "{text}");
        }
    }

    #[test]
    fn every_trace_is_of_one_part_and_parts_are_alike() {
        for count in [1, 3, 7, 20] {
            let shards: Vec<Shard> = (1..=count).map(|number| Shard { number, count }).collect();
            let mut traces = vec![0; shards.len()];
            for trace in 0..17 {
                let owners: Vec<usize> =
                    (0..shards.len()).filter(|&at| shards[at].has(trace)).collect();
                assert_eq!(owners.len(), 1);
                traces[owners[0]] += 1;
            }
            let spread = traces.iter().max().unwrap() - traces.iter().min().unwrap();
            assert!(spread <= 1, "{traces:?}");
        }
    }

    const TEXT: &str =
        "name = \"x\"\ntitle = \"X\"\ntraces = [\"a.txt\"]\nallocators = [\"caching\"]\n";

    fn key(text: &str) -> Key {
        meaning(&read_description(text).expect("reads"))
    }

    #[test]
    fn what_cells_do_not_hang_on_does_not_count() {
        let key_of_text = key(TEXT);
        assert_eq!(key(&TEXT.replace("\"X\"", "\"Another\"")), key_of_text);
        assert_eq!(key(&format!("# Laid out otherwise\n\n{TEXT}")), key_of_text);
        for (from, to) in [
            ("\"x\"", "\"y\""),
            ("a.txt", "b.txt"),
            ("\"caching\"", "\"caching\", \"native\""),
            ("traces", "capacities = [\"1GiB\"]\ntraces"),
            ("traces", "limits = [\"1GiB\"]\ntraces"),
            ("traces", "settings = \"expandable_segments:True\"\ntraces"),
            ("traces", "smallest_capacity = true\ntraces"),
        ] {
            assert_ne!(key(&TEXT.replace(from, to)), key_of_text, "{to}");
        }
    }

    fn part(number: u32, count: u32) -> (String, PartHeader) {
        let description = read_description(TEXT).expect("reads");
        let program = KeyBuilder::default().key();
        let shard = Shard { number, count };
        let header = PartHeader::new(&description, &[], shard, "1.0", program, true);
        (shard.file_name("x"), header)
    }

    /// What is said of these parts; nothing if they make a whole.
    fn fault(parts: &[(String, PartHeader)]) -> Option<String> {
        let description = read_description(TEXT).expect("reads");
        check_parts(&description, "1.0", parts, false).err().map(|error| error.to_string())
    }

    #[test]
    fn only_parts_of_one_run_make_a_whole() {
        let whole = || vec![part(1, 3), part(2, 3), part(3, 3)];
        assert_eq!(fault(&whole()), None);
        assert!(fault(&[]).unwrap().contains("no part of x"));
        let gone = fault(&[part(2, 3)]).unwrap();
        assert_eq!(gone, "2 of 3 parts missing: x.shard-1-of-3.parquet, x.shard-3-of-3.parquet");
        let told = fault(&[part(1, 3), part(2, 3), part(3, 3), part(1, 4)]).unwrap();
        assert!(told.contains("the number of parts 3") && told.contains("has 4"), "{told}");
        let mut twice = whole();
        twice.push(("copy.parquet".to_owned(), part(2, 3).1));
        let told = fault(&twice).unwrap();
        assert!(
            told.contains("x.shard-2-of-3.parquet and copy.parquet are both part 2/3"),
            "{told}"
        );
        let changed = |change: &dyn Fn(&mut PartHeader)| {
            let mut parts = whole();
            change(&mut parts[1].1);
            fault(&parts).unwrap()
        };
        let other = || "0".repeat(32);
        assert!(changed(&|it| it.fraglab_version = "0.9".to_owned()).contains("0.9"));
        assert!(changed(&|it| it.schema_version = 2).contains("the version of parts 1"));
        assert!(changed(&|it| it.description = other()).contains("another description"));
        assert!(changed(&|it| it.cells = other()).contains("held other traces"));
        let told = changed(&|it| it.program = other());
        assert!(told.contains("has 00000000") && told.contains("--allow-mixed-builds"), "{told}");
        let mut parts = whole();
        parts[1].1.program = other();
        let description = read_description(TEXT).expect("reads");
        assert_eq!(check_parts(&description, "1.0", &parts, true), Ok(()));
    }

    #[test]
    fn each_cell_is_in_one_part() {
        let parts = |cells: [&[u64]; 2]| {
            let [one, two] = cells.map(<[u64]>::to_vec);
            check_cells(&[("one".to_owned(), one), ("two".to_owned(), two)], 5)
        };
        assert_eq!(parts([&[0, 2, 4], &[1, 3]]), Ok(()));
        let (first, second) = ("one".to_owned(), "two".to_owned());
        let overlap = MergeError::Overlap { cell: 2, first, second };
        assert_eq!(parts([&[0, 2, 4], &[1, 2, 3]]), Err(overlap));
        assert_eq!(parts([&[0, 4], &[1]]), Err(MergeError::Gap { cell: 2, count: 2 }));
        let beyond = MergeError::Beyond { file: "two".to_owned(), cell: 5, cells_all: 5 };
        assert_eq!(parts([&[0, 2, 4], &[1, 3, 5]]), Err(beyond));
    }
}
