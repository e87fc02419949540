//! A wish to stop that long work looks at now and then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Asks long work to stop at its next good moment. Clones share one wish, which is never taken back.
///
/// Whoever works asks [`is_asked`](Stop::is_asked) between parts that are worth keeping, and every
/// few ten thousand steps inside a part that is not.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody asked.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::Stop;

    #[test]
    fn clones_share_the_wish() {
        let stop = Stop::default();
        let other = stop.clone();
        assert!(!other.is_asked());
        stop.ask();
        assert!(other.is_asked() && !Stop::default().is_asked());
    }
}
