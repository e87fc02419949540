//! Who is live together with whom, without a list of pairs.

use super::super::core::Core;

/// Items by start, with the latest end of any run of them.
///
/// ```text
///   by start:  a b c d e f g h      those that meet a window [start, end):
///   latest end: a-h                   start inside it      a run of the items by start
///              a-d   e-h              start before it      found from the top: no run whose
///             a-b c-d e-f g-h                              latest end is too early is entered
/// ```
pub(super) struct Neighbours {
    /// Items by start.
    items: Vec<u32>,
    /// Their starts.
    starts: Vec<u32>,
    /// A tree: node `i` has children `2i` and `2i + 1`, leaf `leaves + at` is item `items[at]`.
    latest_end: Vec<u32>,
    leaves: usize,
}

impl Neighbours {
    pub(super) fn of(core: &Core) -> Neighbours {
        let mut items: Vec<u32> = (0..core.items.len() as u32).collect();
        items.sort_by_key(|&index| core.items[index as usize].start);
        let starts = items.iter().map(|&index| core.items[index as usize].start).collect();
        let leaves = items.len().next_power_of_two();
        let mut latest_end = vec![0; 2 * leaves];
        for (at, &index) in items.iter().enumerate() {
            latest_end[leaves + at] = core.items[index as usize].end;
        }
        for node in (1..leaves).rev() {
            latest_end[node] = latest_end[2 * node].max(latest_end[2 * node + 1]);
        }
        Neighbours { items, starts, latest_end, leaves }
    }

    /// Visits every item that is live at some instant of `start..end`.
    pub(super) fn visit(&self, start: u32, end: u32, mut visit: impl FnMut(usize)) {
        let first = self.starts.partition_point(|&other| other < start);
        let last = first + self.starts[first..].partition_point(|&other| other < end);
        self.visit_before(first, start, &mut visit);
        for &index in &self.items[first..last] {
            visit(index as usize);
        }
    }

    /// Visits the first `count` items as far as they end after `instant`.
    fn visit_before(&self, count: usize, instant: u32, visit: &mut impl FnMut(usize)) {
        // Depth first, from the left: the path to come is in the number of the node.
        let mut node = 1;
        let mut width = self.leaves;
        loop {
            let first = node * width - self.leaves;
            if first >= count {
                return;
            }
            let enter = self.latest_end[node] > instant;
            if enter && width > 1 {
                (node, width) = (2 * node, width / 2);
                continue;
            }
            if enter {
                visit(self.items[first] as usize);
            }
            // On to the next node: up as long as this is a right child, then across.
            while node & 1 == 1 {
                if node == 1 {
                    return;
                }
                (node, width) = (node / 2, width * 2);
            }
            node += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::portfolio::tests::random_core;
    use super::*;

    #[test]
    fn visits_whom_a_look_at_all_finds() {
        for seed in 0..300 {
            let core = random_core(seed);
            let neighbours = Neighbours::of(&core);
            for window in &core.items {
                let mut visited = Vec::new();
                neighbours.visit(window.start, window.end, |index| visited.push(index));
                visited.sort_unstable();
                let meets = |&index: &usize| {
                    core.items[index].start < window.end && window.start < core.items[index].end
                };
                let expected: Vec<usize> = (0..core.items.len()).filter(meets).collect();
                assert_eq!(visited, expected, "seed {seed}");
            }
        }
    }
}
