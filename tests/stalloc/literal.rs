//! STAlloc's default planner written down literally from its description (2.4): heights in dense
//! arrays over time, every query made, nothing skipped. Slow and plain.

use fraglab::plan::stalloc::files::ListedRequest;
use fraglab::plan::stalloc::size_classes::SteadyIteration;

#[derive(Clone)]
struct Layer {
    offset: u64,
    height: u64,
    /// Occupied height at each time 0..=T.
    skyline: Vec<u64>,
}

pub(super) struct Plan {
    pub(super) offsets: Vec<u64>,
    pub(super) peak: u64,
    pub(super) layers: usize,
}

/// Requests sorted by start.
pub(super) fn plan(requests: &[ListedRequest], steady: SteadyIteration) -> Plan {
    let t_max = requests.iter().map(|r| r.end).max().unwrap_or(0);
    let rounded: Vec<u64> = requests.iter().map(|r| r.size_bytes.div_ceil(512) * 512).collect();
    let mut sizes = rounded.clone();
    sizes.sort_unstable();
    sizes.dedup();
    let mut layers: Vec<Layer> = Vec::new();
    let mut offsets = vec![u64::MAX; requests.len()];
    let mut top = 0;
    for &size in sizes.iter().rev() {
        let class: Vec<usize> = (0..requests.len()).filter(|&i| rounded[i] == size).collect();
        let by_layer: Vec<usize> = form(requests, &class, steady, t_max).concat();
        let count = by_layer.len();
        let mut order: Vec<usize> = (0..count).collect();
        if !layers.is_empty() {
            for _ in 0..6 {
                let mut copies = layers.clone();
                let mut placeable = vec![false; count];
                for layer in &mut copies {
                    for (position, &element) in order.iter().enumerate() {
                        if try_place(layer, &requests[by_layer[element]], size).is_some() {
                            placeable[position] = true;
                        }
                    }
                }
                let unplaceable: Vec<usize> = (0..count).filter(|&p| !placeable[p]).collect();
                let rest = order.iter().copied().filter(|element| !unplaceable.contains(element));
                order = unplaceable.iter().copied().chain(rest).collect();
            }
        }
        for layer in &mut layers {
            for &element in &order {
                let index = by_layer[element];
                if offsets[index] == u64::MAX
                    && let Some(height) = try_place(layer, &requests[index], size)
                {
                    offsets[index] = layer.offset + height;
                }
            }
        }
        let left: Vec<usize> = class.into_iter().filter(|&i| offsets[i] == u64::MAX).collect();
        for formed in form(requests, &left, steady, t_max) {
            let mut skyline = vec![0; t_max as usize + 1];
            for index in formed {
                offsets[index] = top;
                let request = &requests[index];
                for time in request.start.max(1) - 1..request.end {
                    skyline[time as usize] = size;
                }
            }
            layers.push(Layer { offset: top, height: size, skyline });
            top += size;
        }
    }
    Plan { offsets, peak: top, layers: layers.len() }
}

fn try_place(layer: &mut Layer, request: &ListedRequest, size: u64) -> Option<u64> {
    let times = &mut layer.skyline[request.start as usize..=request.end as usize];
    let height = *times.iter().max().expect("at least one time");
    if height + size > layer.height {
        return None;
    }
    times.fill(height + size);
    Some(height)
}

/// Paper Algorithm 1 with the steady-state rule.
fn form(
    requests: &[ListedRequest],
    order: &[usize],
    steady: SteadyIteration,
    t_max: u64,
) -> Vec<Vec<usize>> {
    struct Forming {
        members: Vec<usize>,
        tail: u64,
        intervals: Vec<(u64, u64)>,
    }
    let period = steady.end - steady.start;
    let mut layers: Vec<Forming> = Vec::new();
    for &index in order {
        let ListedRequest { start, end, .. } = requests[index];
        let mut candidates: Vec<usize> =
            (0..layers.len()).filter(|&l| layers[l].tail <= start).collect();
        candidates.sort_by_key(|&l| std::cmp::Reverse(layers[l].tail));
        let free = |l: &usize| layers[*l].intervals.iter().all(|&(s, e)| e <= start || end <= s);
        let chosen = candidates.into_iter().find(free);
        let chosen = chosen.unwrap_or_else(|| {
            layers.push(Forming { members: Vec::new(), tail: 0, intervals: Vec::new() });
            layers.len() - 1
        });
        let layer = &mut layers[chosen];
        layer.members.push(index);
        layer.tail = end;
        layer.intervals.push((start, end));
        if start >= steady.start && start + period <= t_max {
            layer.intervals.push((start + period, (end + period).min(t_max)));
        }
    }
    layers.into_iter().map(|layer| layer.members).collect()
}
