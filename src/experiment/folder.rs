//! A folder of traces in place of a description: every trace in it through some allocators.

use super::description::{
    AllocatorTemplate, Block, Description, Kind, Size, SizeKind, TraceTemplate,
};
use super::fleet::FleetSpec;
use crate::alloc::spec::AllocSpec;

/// Longest name of an experiment in characters: it becomes a file's.
pub(super) const NAME_CHARS_MAX: usize = 80;

/// Whether a character may stand in the name of an experiment.
pub(super) fn fits_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

impl Description {
    /// What a description of all traces of a folder through these allocators would say: the devices
    /// are those of the traces, and the report sums them up as a fleet. It is called as
    /// the folder is, which stands in [`Folders::base`](super::Folders::base).
    pub fn of_folder(folder: &str, allocators: &[AllocSpec]) -> Description {
        let size = |text: &str| Size { text: text.to_owned(), kind: SizeKind::OfTrace };
        let template =
            |spec: &AllocSpec| AllocatorTemplate { spec: spec.to_string(), label: None, at: 0 };
        let block = Block {
            set: String::new(),
            traces: vec![TraceTemplate {
                path: folder.to_owned(),
                is_job: false,
                set: Vec::new(),
                label: None,
                at: 0,
            }],
            allocators: allocators.iter().map(template).collect(),
            capacities: vec![size("auto")],
            limits: vec![size("trace")],
            smallest_capacity: false,
            profile: "h200".to_owned(),
            profile_steps: None,
            settings: None,
        };
        Description {
            name: name_of(folder),
            title: format!("Traces of {folder}"),
            text: String::new(),
            date: None,
            kind: Kind::Replay(vec![block]),
            axes: Vec::new(),
            figures: Vec::new(),
            tables: Vec::new(),
            fleet: Some(FleetSpec::default()),
            source: String::new(),
        }
    }

    /// Whether it stands for a folder: then there is no text with places that errors could tell.
    pub fn is_of_folder(&self) -> bool {
        self.source.is_empty()
    }
}

/// The name of a folder as that of an experiment.
fn name_of(folder: &str) -> String {
    let fitting = folder.chars().map(|c| if fits_name(c) { c } else { '-' });
    let name: String = fitting.skip_while(|&c| c == '.').take(NAME_CHARS_MAX).collect();
    if name.is_empty() { "traces".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_folders_become_names_of_files() {
        for (folder, name) in
            [("ranks", "ranks"), (".my ranks", "my-ranks"), ("..", "traces"), ("läuft", "l-uft")]
        {
            assert_eq!(name_of(folder), name, "{folder}");
        }
        assert_eq!(name_of(&"x".repeat(200)).len(), NAME_CHARS_MAX);
    }
}
