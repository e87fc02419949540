//! Steps of one program with other sizes: how the first requests of a step tell all others.
//!
//! Where each batch has its own length, nearly every size of a step is another in the next step, but
//! the requests are the same and their sizes hang together. The first few, inputs and masks, tell
//! the shape: they are *features*. From two or more observed steps every other size is seen to be
//!
//! ```text
//!   fixed          the same in all of them: gradients, optimizer state
//!   in proportion  size = feature x p / q, exactly: activations
//!   affine         size = feature x p + c: the same with padding
//!   free           anything else: nothing is known before it is asked for
//! ```
//!
//! Rules are checked against every observed step and each later step that contradicts one makes it
//! free, so a rule that held by chance costs one step.

/// Features lie among so many first requests of a step.
const FEATURES_WITHIN: usize = 48;
/// Most features: a shape has few dimensions.
const FEATURES_MAX: usize = 6;

/// How a size follows from the features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// It is itself a feature.
    Feature,
    /// Always this many bytes.
    Fixed(u64),
    /// A feature's size times the first number, divided by the second.
    Ratio(u32, u64, u64),
    /// A feature's size times the first number, plus the second.
    Affine(u32, i64, i64),
    /// Not known.
    Free,
}

/// The rules of a template.
#[derive(Clone, Debug, Default)]
pub(super) struct Shapes {
    rules: Vec<Rule>,
    /// Positions of features that rules use, in order.
    features: Vec<u32>,
}

fn is_ratio(size: [u64; 2], feature: [u64; 2]) -> bool {
    u128::from(size[0]) * u128::from(feature[1]) == u128::from(size[1]) * u128::from(feature[0])
}

/// Padding adds no more than this: with more, a line through two points is there by chance.
const PADDING_BYTES_MAX: u64 = 4096;

/// Slope and offset of the line through two observations, if both are whole and the offset is
/// padding.
fn line(size: [u64; 2], feature: [u64; 2]) -> Option<(i64, i64)> {
    let difference = |pair: [u64; 2]| i128::from(pair[0]) - i128::from(pair[1]);
    let (rise, run) = (difference(size), difference(feature));
    if run == 0 || rise % run != 0 {
        return None;
    }
    let slope = rise / run;
    let offset = i128::from(size[0]) - slope * i128::from(feature[0]);
    let offset = i64::try_from(offset).ok().filter(|it| it.unsigned_abs() <= PADDING_BYTES_MAX)?;
    Some((i64::try_from(slope).ok()?, offset))
}

impl Shapes {
    /// Learns from observed steps: sizes by position, the same number in each.
    pub(super) fn learn(steps: &[Vec<u64>]) -> Shapes {
        let Some((first, others)) = steps.split_first() else { return Shapes::default() };
        let varies = |at: usize| others.iter().any(|other| other[at] != first[at]);
        let Some(other) = others.iter().find(|other| *other != first) else {
            let rules = first.iter().map(|&size| Rule::Fixed(size)).collect();
            return Shapes { rules, features: Vec::new() };
        };
        let pair = |at: usize| [first[at], other[at]];
        let candidates: Vec<u32> = (0..first.len().min(FEATURES_WITHIN))
            .filter(|&at| pair(at)[0] != pair(at)[1])
            .map(|at| at as u32)
            .collect();
        let mut features: Vec<u32> = Vec::new();
        let rule = |at: usize, features: &[u32]| {
            let before = || features.iter().copied().filter(|&feature| (feature as usize) < at);
            let ratio = before().find(|&it| is_ratio(pair(at), pair(it as usize)));
            if let Some(feature) = ratio {
                let [size, base] = [first[at], first[feature as usize]];
                return Rule::Ratio(feature, size, base);
            }
            let affine = before().find_map(|it| {
                line(pair(at), pair(it as usize)).map(|(slope, plus)| Rule::Affine(it, slope, plus))
            });
            affine.unwrap_or(Rule::Free)
        };
        for &at in &candidates {
            if rule(at as usize, &features) == Rule::Free && features.len() < FEATURES_MAX {
                features.push(at);
            }
        }
        let rules = (0..first.len()).map(|at| match at {
            _ if !varies(at) => Rule::Fixed(first[at]),
            _ if features.contains(&(at as u32)) => Rule::Feature,
            _ => rule(at, &features),
        });
        let mut shapes = Shapes { rules: rules.collect(), features: Vec::new() };
        shapes.features = features;
        for step in others {
            shapes.correct(step);
        }
        shapes.keep_used_features();
        shapes
    }

    /// Features that no rule uses are no features.
    fn keep_used_features(&mut self) {
        let mut used: Vec<u32> = self
            .rules
            .iter()
            .filter_map(|rule| match rule {
                Rule::Ratio(feature, ..) | Rule::Affine(feature, ..) => Some(*feature),
                _ => None,
            })
            .collect();
        used.sort_unstable();
        used.dedup();
        for &feature in self.features.iter().filter(|it| used.binary_search(it).is_err()) {
            self.rules[feature as usize] = Rule::Free;
        }
        self.features = used;
    }

    /// Rules that a step contradicts are none.
    pub(super) fn correct(&mut self, step: &[u64]) {
        for at in 0..self.rules.len().min(step.len()) {
            if self.size(at, step).is_some_and(|size| size != step[at]) {
                self.rules[at] = Rule::Free;
            }
        }
    }

    /// The last position of a feature: after it the shape is known. None if no size follows from
    /// features.
    pub(super) fn last_feature(&self) -> Option<u32> {
        self.features.last().copied()
    }

    /// Whether a position is a feature.
    pub(super) fn is_feature(&self, at: usize) -> bool {
        self.rules.get(at) == Some(&Rule::Feature)
    }

    /// Whether nothing is known of a position's size before it is asked for.
    pub(super) fn is_free(&self, at: usize) -> bool {
        self.rules.get(at) == Some(&Rule::Free)
    }

    /// The size at a position in a step whose first sizes are these; none if it does not follow
    /// from them.
    pub(super) fn size(&self, at: usize, first: &[u64]) -> Option<u64> {
        let feature = |it: u32| first.get(it as usize).copied();
        match *self.rules.get(at)? {
            Rule::Feature | Rule::Free => None,
            Rule::Fixed(size) => Some(size),
            Rule::Ratio(it, times, by) => {
                let product = u128::from(feature(it)?) * u128::from(times);
                // What is no whole number is no size of this rule.
                let exact = product % u128::from(by.max(1)) == 0;
                u64::try_from(product / u128::from(by.max(1))).ok().filter(|_| exact)
            }
            Rule::Affine(it, times, plus) => {
                let sum = i128::from(feature(it)?) * i128::from(times) + i128::from(plus);
                u64::try_from(sum).ok()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batch 4 and 8, length 10 and 30: tokens are 40 and 240, so that no two of them stand in
    /// proportion. A mask with 7 bytes of padding, a weight, and a size that is no function of them.
    #[test]
    fn every_size_follows_from_the_first_ones() {
        let step = |batch: u64, length: u64, odd: u64| {
            let tokens = batch * length;
            vec![tokens * 8, length * 8, batch * 2, tokens * 4096, length * 16 + 7, 512, odd]
        };
        let shapes = Shapes::learn(&[step(4, 10, 1000), step(8, 30, 1234)]);
        assert_eq!(shapes.last_feature(), Some(1), "nothing hangs on the batch alone");
        let next = step(6, 50, 0);
        let sizes: Vec<Option<u64>> = (0..7).map(|at| shapes.size(at, &next[..2])).collect();
        let known = [3, 4, 5].map(|at: usize| Some(next[at]));
        assert_eq!(sizes, [None, None, None, known[0], known[1], known[2], None]);
        assert!(shapes.is_feature(0) && shapes.is_feature(1) && shapes.is_free(6));
    }

    #[test]
    fn a_rule_that_a_step_contradicts_is_none() {
        let mut shapes = Shapes::learn(&[vec![8, 80, 5], vec![16, 160, 5]]);
        assert_eq!(shapes.size(1, &[24]), Some(240));
        shapes.correct(&[24, 999, 5]);
        assert_eq!((shapes.size(1, &[24]), shapes.size(2, &[24])), (None, Some(5)));
        assert!(Shapes::learn(&[]).last_feature().is_none());
    }
}
