//! What an allocator that plans ahead knows: an earlier run of the program, in whole steps.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::trace::Trace;

/// The beginning of a run, or a whole other one. It is cut before an allocator sees it and holds
/// nothing of what the replay is to show: no later block, phase, module or size.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// Where it comes from, in words: `2 steps of llama-1b-varlen`.
    pub source: String,
    /// Events, blocks, streams and phases. Blocks are numbered in the order of their allocs, those of
    /// the start first. Without refused requests and without what the recorded allocator did.
    pub trace: Trace,
    /// Events of each step, in order; what comes before the first is the program's beginning.
    pub steps: Vec<Range<usize>>,
    /// What was made of it already.
    pub made: Made,
}

/// Something that was made once, or is being made.
type Once = Arc<OnceLock<Arc<dyn Any + Send + Sync>>>;

/// What was made of a profile, by how: an allocator is built once for every device that a search
/// for the smallest one tries, and planning is dear. No part of what a profile says: a copy has
/// nothing of it, and it makes no profile differ from another.
#[derive(Default)]
pub struct Made(Mutex<BTreeMap<String, Once>>);

impl Made {
    /// What `make` gives: made when it is first asked for under this name, and kept. Names must say
    /// everything that it depends on but the profile.
    pub(super) fn get<T, F>(&self, name: &str, make: F) -> Arc<T>
    where
        T: Any + Send + Sync,
        F: Fn() -> T,
    {
        let once = {
            // Nothing that can panic is done while this is held.
            let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(made.entry(name.to_owned()).or_default())
        };
        let kept = Arc::clone(once.get_or_init(|| Arc::new(make())));
        // Two kinds of things under one name are made anew each time.
        kept.downcast().unwrap_or_else(|_| Arc::new(make()))
    }
}

impl Clone for Made {
    fn clone(&self) -> Made {
        Made::default()
    }
}

impl PartialEq for Made {
    fn eq(&self, _other: &Made) -> bool {
        true
    }
}

impl fmt::Debug for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Made")
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_thing_is_made_once_for_each_name() {
        let made = Made::default();
        let count = Cell::new(0);
        let make = || {
            count.set(count.get() + 1);
            count.get()
        };
        assert_eq!([*made.get("a", make), *made.get("a", make), *made.get("b", make)], [1, 1, 2]);
        assert_eq!(*made.clone().get("a", make), 3, "a copy has nothing");
        assert_eq!(*made.get("a", || "another kind"), "another kind");
    }
}
