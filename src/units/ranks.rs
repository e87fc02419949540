//! Percentiles of a list, as values that are really in it.

/// The value of nearest rank: the smallest of which at least `percent` of a hundred are no larger.
/// The list is sorted; nothing of an empty one. 0 is the smallest, 100 the largest.
pub fn nearest_rank<T: Copy>(sorted: &[T], percent: u32) -> Option<T> {
    let rank = (sorted.len() as u64 * u64::from(percent.min(100))).div_ceil(100);
    sorted.get(rank.saturating_sub(1) as usize).copied()
}

#[cfg(test)]
mod tests {
    use super::nearest_rank;

    #[test]
    fn a_percentile_is_the_smallest_that_enough_are_no_larger_than() {
        for count in 1..=210usize {
            let sorted: Vec<usize> = (0..count).map(|at| at * at / 3).collect();
            for percent in [0, 1, 5, 50, 95, 99, 100] {
                let enough = |value: &&usize| {
                    let no_larger = sorted.iter().filter(|other| other <= value).count();
                    no_larger * 100 >= count * percent as usize
                };
                let expected = sorted.iter().find(enough).copied();
                assert_eq!(nearest_rank(&sorted, percent), expected, "{percent} of {count}");
            }
        }
        assert_eq!(nearest_rank::<u64>(&[], 50), None);
        // As textbooks have it.
        assert_eq!(nearest_rank(&[15, 20, 35, 40, 50], 30), Some(20));
        assert_eq!(nearest_rank(&[15, 20, 35, 40, 50], 50), Some(35));
    }
}
