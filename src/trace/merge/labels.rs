//! What ranks are called inside a merged trace.

use std::collections::BTreeSet;

use crate::trace::step_name;

/// A short name for each rank, no two alike: their names without the parts between
/// dots that all have in common at the front and at the end. `job.rank0`, `job.rank1` are `rank0`,
/// `rank1`; a name that is there again gets a number behind it.
pub fn rank_labels(names: &[String]) -> Vec<String> {
    let parts: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    let shortest = parts.iter().map(Vec::len).min().unwrap_or(0);
    let first = parts.first().cloned().unwrap_or_default();
    let is_common =
        |part: &dyn Fn(&[&str]) -> String| parts.iter().all(|parts| part(parts) == part(&first));
    let front = (0..shortest).take_while(|&at| is_common(&|parts| parts[at].to_owned())).count();
    let back = (0..shortest - front)
        .take_while(|&at| is_common(&|parts| parts[parts.len() - 1 - at].to_owned()))
        .count();
    let mut taken = BTreeSet::new();
    let label = |parts: &Vec<&str>| {
        let own = parts[front..parts.len() - back].join(".");
        let label = if own.is_empty() { parts.join(".") } else { own };
        // What begins like a step would be taken for one.
        let label = match label.is_empty() || step_name(&label).is_some() {
            true => format!("rank-{label}"),
            false => label,
        };
        let numbered = (2..).map(|number| format!("{label}-{number}"));
        let label = std::iter::once(label.clone()).chain(numbered).find(|it| !taken.contains(it));
        let label = label.unwrap_or_default();
        taken.insert(label.clone());
        label
    };
    parts.iter().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(names: &[&str]) -> Vec<String> {
        rank_labels(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn what_all_names_have_in_common_is_left_out() {
        assert_eq!(labels(&["job.rank0", "job.rank1"]), ["rank0", "rank1"]);
        assert_eq!(labels(&["job.rank0.late", "job.rank12.late"]), ["rank0", "rank12"]);
        assert_eq!(labels(&["actor", "critic"]), ["actor", "critic"]);
        assert_eq!(labels(&["llama.rank0", "gpt.rank0"]), ["llama", "gpt"]);
        assert_eq!(labels(&["job", "job.rank1"]), ["job", "rank1"]);
        assert_eq!(labels(&["alone.rank0"]), ["alone.rank0"]);
    }

    #[test]
    fn no_two_are_alike_and_none_looks_like_a_step() {
        assert_eq!(labels(&["job", "job", "job"]), ["job", "job-2", "job-3"]);
        assert_eq!(labels(&["a", "a-2", "a"]), ["a", "a-2", "a-3"]);
        assert_eq!(labels(&["step1", "step2"]), ["rank-step1", "rank-step2"]);
        assert_eq!(labels(&["", ""]), ["rank-", "rank--2"]);
        assert!(labels(&[]).is_empty());
    }
}
