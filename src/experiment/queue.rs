//! Traces that wait, and the threads that do them.
//!
//! The one design decision: a thread that has taken a trace does nothing else until its cells are
//! done, so that never more traces are in memory than there are threads. A thread that finds no
//! trace left is spare: whoever has cells left lends it some, before each cell of its own.
//!
//! ```text
//!   traces  1 2 3 4 5 ──┬─> thread A: trace 1, its cells; trace 3, its cells ...
//!                       └─> thread B: trace 2, its cells; no trace left ──> spare ──> A's cells
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Threads that nobody uses.
pub(super) struct Spare(AtomicUsize);

/// Calls `work` with each number below `count` on so many threads, each in its turn.
pub(super) fn each_trace(count: usize, threads: usize, work: impl Fn(usize, &Spare) + Sync) {
    let busy = threads.max(1).min(count);
    let spare = Spare(AtomicUsize::new(threads.saturating_sub(busy)));
    let next = AtomicUsize::new(0);
    let until_none_is_left = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                break;
            }
            work(at, &spare);
        }
        spare.give();
    };
    thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(until_none_is_left);
        }
    });
}

impl Spare {
    fn give(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn take(&self) -> bool {
        let fewer = |count: usize| count.checked_sub(1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_ok()
    }

    /// Calls `work` with each number below `count`, on this thread and on those that are spare now
    /// or become so.
    pub(super) fn each_cell(&self, count: usize, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        let one_more = || {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let is_there = at < count;
            if is_there {
                work(at);
            }
            is_there
        };
        let lent = || {
            while one_more() {}
            self.give();
        };
        thread::scope(|scope| {
            loop {
                // One of those left is for this thread.
                while next.load(Ordering::Relaxed) + 1 < count && self.take() {
                    scope.spawn(lent);
                }
                if !one_more() {
                    break;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;

    /// Most that were under way at once.
    #[derive(Default)]
    struct Gauge {
        now: AtomicUsize,
        most: AtomicUsize,
    }

    impl Gauge {
        fn during<T>(&self, work: impl FnOnce() -> T) -> T {
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            let result = work();
            self.now.fetch_sub(1, Ordering::SeqCst);
            result
        }

        fn most(&self) -> usize {
            self.most.load(Ordering::SeqCst)
        }
    }

    /// Does so many traces of so many cells; the most traces and cells under way at once.
    fn most(traces: usize, cells: usize, threads: usize) -> (usize, usize) {
        let (in_memory, working) = (Gauge::default(), Gauge::default());
        let done = Mutex::new(vec![0; traces * cells]);
        each_trace(traces, threads, |trace, spare| {
            in_memory.during(|| {
                spare.each_cell(cells, |cell| {
                    working.during(|| thread::sleep(Duration::from_millis(2)));
                    done.lock().unwrap()[trace * cells + cell] += 1;
                });
            });
        });
        assert!(done.into_inner().unwrap().iter().all(|&times| times == 1), "each cell once");
        (in_memory.most(), working.most())
    }

    #[test]
    fn never_more_traces_than_threads() {
        for (traces, threads) in [(20, 3), (20, 1), (2, 8), (0, 2)] {
            let (in_memory, working) = most(traces, 3, threads);
            assert!(in_memory <= threads.min(traces), "{traces} {threads}: {in_memory}");
            assert!(working <= threads, "{traces} {threads}: {working}");
        }
    }

    /// Two cells wait for each other: they end only if both are under way at once.
    #[test]
    fn cells_of_one_trace_run_at_once_on_threads_that_are_spare() {
        let meet = std::sync::Barrier::new(2);
        each_trace(1, 2, |_, spare| {
            spare.each_cell(2, |_| {
                meet.wait();
            });
        });
        // A thread that is done with its trace helps with that of another.
        let meet = std::sync::Barrier::new(2);
        let is_free = std::sync::Barrier::new(2);
        each_trace(2, 2, |trace, spare| match trace {
            0 => {
                is_free.wait();
                // The other thread gives itself up a moment later.
                while spare.0.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                spare.each_cell(2, |_| {
                    meet.wait();
                });
            }
            _ => {
                is_free.wait();
            }
        });
    }
}
