//! What `gen` and its neighbours ask alike: the description of a job, and what replaces its keys.

use std::path::Path;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::input::{ReadFailure, read_text};
use super::limits::limits;
use crate::workload::options::{OPTIONS, OptionInfo, OptionKind};
use crate::workload::{Job, read_job_within};

/// Largest description in bytes: what is larger is some other file.
const DESCRIPTION_BYTES_MAX: u64 = 4 << 20;
/// What stands in such a file.
const EXPECTED: &str = "the description of a job: TOML, as `fraglab gen --example llama` prints it";

/// Keys that replace those of a description.
#[derive(Debug, Default, clap::Args)]
pub(super) struct JobArgs {
    /// Replace a key of the description, as in train.batch=4 or strategy.recompute=full
    ///
    /// Any key of traces/README.md, with its table in front. Texts need no quotes; lists have
    /// commas: strategy.lora.targets=q,v. strategy.lora=none takes adapters away.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = parse_set)]
    set: Vec<(String, String)>,

    #[command(flatten)]
    options: OptionFlags,
}

impl JobArgs {
    /// The keys with their values; options last.
    pub(super) fn beside(&self) -> Vec<(String, String)> {
        self.set.iter().chain(&self.options.0).cloned().collect()
    }
}

fn parse_set(text: &str) -> Result<(String, String), String> {
    let (key, value) =
        text.split_once('=').ok_or("expected KEY=VALUE, as in train.batch=4".to_owned())?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

/// PatrickStar's options, each a flag by its own name: `("options.use_ckp", "true")`.
#[derive(Debug, Default)]
struct OptionFlags(Vec<(String, String)>);

/// The flag of an option: its name, and the same with dashes.
fn flag(option: &OptionInfo) -> Arg {
    let mut names = vec![option.name.replace('_', "-")];
    if option.name == "with_mem_saving_com" {
        names.extend(["with_mem_saving_comm", "with-mem-saving-comm"].map(str::to_owned));
    }
    names.retain(|name| name != option.name);
    let flag = Arg::new(option.name)
        .long(option.name)
        .aliases(names)
        .action(ArgAction::Set)
        .help(format!("{} [{}]", option.summary, option.default))
        .help_heading("PatrickStar's options (also [options] of the description)");
    match option.kind {
        OptionKind::Switch => flag
            .value_name("BOOL")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        OptionKind::Ratio => flag.value_name("SHARE"),
        OptionKind::Elements => flag.value_name("ELEMENTS"),
    }
}

impl clap::Args for OptionFlags {
    fn augment_args(command: Command) -> Command {
        OPTIONS.iter().fold(command, |command, option| command.arg(flag(option)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for OptionFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = OptionFlags::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for option in &OPTIONS {
            if let Some(value) = matches.get_one::<String>(option.name) {
                self.0.push((format!("options.{}", option.name), value.clone()));
            }
        }
        Ok(())
    }
}

/// Reads the description of a job, `-` for standard input.
///
/// # Errors
/// One line that begins with the file name, and the place if the description is wrong.
pub(super) fn read_job_file(path: &Path, beside: &[(String, String)]) -> anyhow::Result<Job> {
    let text = read_text(path, DESCRIPTION_BYTES_MAX, EXPECTED)?;
    read_job_within(&text, beside, &limits())
        .map_err(|error| ReadFailure::of_job(path, &error).into())
}
