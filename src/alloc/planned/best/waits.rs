//! When to wait for the device, so that streams can share memory.
//!
//! Freed memory serves only its stream until the allocator has waited for the device. A program with
//! side streams then needs the sum of their peaks, though one may be low while another is high. A
//! few planned waits in each step cut time into windows; memory changes its stream only between two:
//!
//! ```text
//!   main  ▁▂▃▄▅▆▇██▇▆▅▄▃▂▁          sum of the peaks      without waits
//!   side  ▁▁▁▁▁▁▁▁▁▂▃▄▅▆▇▇
//!         └─ window ┴ window ┘       highest sum of the two peaks inside one window
//! ```
//!
//! The main stream, whose peak is the highest, keeps its lives. A block of a side stream takes the
//! windows that it touches whole; those that lie inside one window share a block that does.

use std::ops::Range;

/// A block as far as its stream's load is concerned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Ticks of its life.
    pub(super) start: u64,
    /// First tick after it.
    pub(super) end: u64,
    /// Bytes.
    pub(super) size_bytes: u64,
    /// Number of its stream.
    pub(super) stream: usize,
}

/// Waits are planned if they lower the sum of peaks by more than one part in so many.
const WORTH_ONE_IN: u64 = 400;
/// Fewer waits are taken if they reach all but one part in so many of what the most reach.
const ENOUGH_ONE_IN: u64 = 20;

/// Whether waits save enough: what is needed without and with them.
pub(super) fn are_worth(without_bytes: u64, with_bytes: u64) -> bool {
    without_bytes.saturating_sub(with_bytes) > without_bytes / WORTH_ONE_IN
}

/// Bytes of each stream that are live at every tick.
struct Levels {
    by_stream: Vec<Vec<u64>>,
}

impl Levels {
    fn of(loads: &[Load], streams: usize, ticks: u64) -> Levels {
        let mut by_stream = vec![vec![0u64; ticks as usize + 1]; streams];
        // Differences first; sums wrap around until they are whole.
        for load in loads {
            let levels = &mut by_stream[load.stream];
            let (start, end) = (load.start as usize, load.end as usize);
            levels[start] = levels[start].wrapping_add(load.size_bytes);
            levels[end] = levels[end].wrapping_sub(load.size_bytes);
        }
        for levels in &mut by_stream {
            let mut live = 0u64;
            for level in levels {
                live = live.wrapping_add(*level);
                *level = live;
            }
        }
        Levels { by_stream }
    }

    fn sum_of_peaks(&self) -> u64 {
        self.by_stream.iter().map(|levels| levels.iter().copied().max().unwrap_or(0)).sum()
    }

    fn peak_of_sum(&self) -> u64 {
        let ticks = self.by_stream.first().map_or(0, Vec::len);
        let sum = |tick: usize| self.by_stream.iter().map(|levels| levels[tick]).sum();
        (0..ticks).map(sum).max().unwrap_or(0)
    }

    /// The ticks at which a section must be cut, its beginning included, so that no window needs
    /// more than `height_bytes`; none if there would be more than `most`, or no cut helps.
    fn cut(&self, section: &Range<u64>, height_bytes: u64, most: usize) -> Option<Vec<u64>> {
        let mut cuts = vec![section.start];
        let mut peaks = vec![0u64; self.by_stream.len()];
        let raise = |peaks: &mut Vec<u64>, tick: u64| {
            for (peak, levels) in peaks.iter_mut().zip(&self.by_stream) {
                *peak = (*peak).max(levels[tick as usize]);
            }
            peaks.iter().sum::<u64>() <= height_bytes
        };
        for tick in section.clone() {
            if raise(&mut peaks, tick) {
                continue;
            }
            if cuts.len() == most {
                return None;
            }
            cuts.push(tick);
            peaks.fill(0);
            if !raise(&mut peaks, tick) {
                return None;
            }
        }
        Some(cuts)
    }

    fn cut_all(&self, sections: &[Range<u64>], height_bytes: u64, most: usize) -> Option<Vec<u64>> {
        let cuts = sections.iter().map(|section| self.cut(section, height_bytes, most));
        Some(cuts.collect::<Option<Vec<_>>>()?.concat())
    }

    /// The lowest height that so many waits a section allow, to one part in 4096, and the waits.
    fn lowest(&self, sections: &[Range<u64>], most: usize) -> (u64, Vec<u64>) {
        let (mut low, mut high) = (self.peak_of_sum(), self.sum_of_peaks());
        let mut best = sections.iter().map(|section| section.start).collect();
        let fine = (high / 4096).max(1);
        if let Some(cuts) = self.cut_all(sections, low, most) {
            return (low, cuts);
        }
        while high - low > fine {
            let middle = low + (high - low) / 2;
            match self.cut_all(sections, middle, most) {
                Some(cuts) => (high, best) = (middle, cuts),
                None => low = middle,
            }
        }
        (high, best)
    }
}

/// Ticks at which to wait for the device, at most `most` in each of the sections, which cover all
/// ticks in order; the beginning of a section is one of them. Nothing if waits save little.
pub(super) fn choose(
    loads: &[Load],
    streams: usize,
    sections: &[Range<u64>],
    most: usize,
) -> Option<Vec<u64>> {
    let ticks = sections.last()?.end;
    let levels = Levels::of(loads, streams, ticks);
    let apart = levels.sum_of_peaks();
    if streams < 2 || most == 0 || !are_worth(apart, levels.peak_of_sum()) {
        return None;
    }
    let (lowest, _) = levels.lowest(sections, most);
    if !are_worth(apart, lowest) {
        return None;
    }
    let enough = lowest + (apart - lowest) / ENOUGH_ONE_IN;
    let fewest = (1..=most).map(|most| levels.lowest(sections, most));
    fewest.into_iter().find(|(height, _)| *height <= enough).map(|(_, cuts)| cuts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ```text
    ///   tick   0    10    20
    ///   main   │ 900 │ 100 │       apart 900 + 800; together 900
    ///   side   │     │ 800 │
    /// ```
    #[test]
    fn one_cut_where_the_side_stream_begins() {
        let step = std::slice::from_ref(&(0..20));
        let load = |start, end, size_bytes, stream| Load { start, end, size_bytes, stream };
        let loads = [load(0, 20, 100, 0), load(0, 10, 800, 0), load(10, 20, 800, 1)];
        assert_eq!(choose(&loads, 2, step, 8), Some(vec![0, 10]));
        assert_eq!(choose(&loads, 2, step, 1), None, "one window is as good as none");
        assert_eq!(choose(&loads, 2, step, 0), None);
        let flat = [load(0, 20, 900, 0), load(0, 20, 800, 1)];
        assert_eq!(choose(&flat, 2, step, 8), None, "both at once need the sum in any case");
    }
}
