//! How fast something grows, so that no single value can bend the answer.

/// Most points that slopes are taken between: 79,800 pairs.
const POINTS_MAX: usize = 400;

/// Bytes a step: the median of the slopes between all pairs of points (Theil and Sen). A point is a
/// step and the bytes then; steps rise. Of more than 400 points as many are taken, evenly spread,
/// the first and the last among them. 0 of fewer than two points.
pub(crate) fn median_slope(points: &[(u64, u64)]) -> f64 {
    let points = thinned(points);
    let mut slopes: Vec<f64> = Vec::with_capacity(points.len() * points.len() / 2);
    for (index, &(step, bytes)) in points.iter().enumerate() {
        slopes.extend(points[..index].iter().map(|&(step_before, bytes_before)| {
            // Subtracted before they are rounded: doubles hold no more than 2^53 exactly.
            let change = i128::from(bytes) - i128::from(bytes_before);
            change as f64 / step.saturating_sub(step_before).max(1) as f64
        }));
    }
    // Of an even number the lower one: half of the pairs must grow for a trend.
    let middle = slopes.len().saturating_sub(1) / 2;
    if slopes.is_empty() {
        return 0.0;
    }
    *slopes.select_nth_unstable_by(middle, f64::total_cmp).1
}

fn thinned(points: &[(u64, u64)]) -> Vec<(u64, u64)> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    let last = points.len() - 1;
    (0..POINTS_MAX).map(|index| points[index * last / (POINTS_MAX - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_all_pairs() {
        assert_eq!(median_slope(&[]), 0.0);
        assert_eq!(median_slope(&[(3, 7)]), 0.0);
        // Slopes 5, 1 and -3: one odd value bends nothing.
        assert_eq!(median_slope(&[(0, 0), (2, 10), (4, 4)]), 1.0);
        // Slopes 2, 5, 8, 4, 5 and 2: in order 2, 2, 4, 5, 5, 8, whose lower middle is 4.
        assert_eq!(median_slope(&[(0, 0), (1, 2), (2, 10), (3, 12)]), 4.0);
    }

    #[test]
    fn of_many_points_some_are_taken_evenly_and_both_ends() {
        let points: Vec<(u64, u64)> = (0..30_000).map(|step| (step, 5 + 3 * step)).collect();
        assert_eq!(median_slope(&points), 3.0);
        let taken = thinned(&points);
        assert_eq!((taken.len(), taken[0], taken[399]), (400, points[0], points[29_999]));
        // 29,999 steps in 399 strides: 75.19 each.
        let strides: Vec<u64> = taken.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
        assert!(strides.iter().all(|stride| (75..=76).contains(stride)), "{strides:?}");
        assert_eq!(thinned(&points[..400]), &points[..400]);
        assert_eq!(thinned(&points[..401]).len(), 400);
    }
}
