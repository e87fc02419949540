//! Axes of numbers: which range, which ticks, what stands at them.

/// An axis of numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    /// Numbers that have a tick, with what stands there.
    pub(super) ticks: Vec<(f64, String)>,
}

/// What kind of axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleKind {
    /// From zero.
    FromZero,
    /// From the smallest number.
    Fitted,
    /// Logarithmic, ticks at powers of ten.
    Decades,
    /// Logarithmic, ticks at powers of two.
    Doublings,
}

impl Scale {
    /// An axis that holds all numbers with about so many ticks.
    pub(super) fn new(numbers: impl Iterator<Item = f64>, kind: ScaleKind, ticks: usize) -> Scale {
        let is_log = matches!(kind, ScaleKind::Decades | ScaleKind::Doublings);
        let numbers: Vec<f64> = numbers.filter(|number| !is_log || *number > 0.0).collect();
        let none = if is_log { 1.0 } else { 0.0 };
        let least = numbers.iter().copied().reduce(f64::min).unwrap_or(none);
        let most = numbers.iter().copied().reduce(f64::max).unwrap_or(1.0);
        match kind {
            ScaleKind::FromZero => Scale::linear(least.min(0.0), most.max(0.0), ticks),
            ScaleKind::Fitted => Scale::linear(least, most, ticks),
            ScaleKind::Decades => Scale::log(least, most, 10.0, ticks),
            ScaleKind::Doublings => Scale::log(least, most, 2.0, ticks),
        }
    }

    fn linear(least: f64, most: f64, count: usize) -> Scale {
        let span = if most > least { most - least } else { most.abs().max(1.0) };
        let step = nice_step(span / count.max(1) as f64);
        let (first, last) =
            ((least / step).floor(), (most / step).ceil().max((least / step).floor() + 1.0));
        let decimals = decimals(step);
        let tick = |at: f64| (at * step, format!("{:.decimals$}", at * step + 0.0));
        let ticks = (0..=(last - first) as usize).map(|at| tick(first + at as f64)).collect();
        Scale { low: first * step, high: last * step, is_log: false, ticks }
    }

    fn log(least: f64, most: f64, base: f64, count: usize) -> Scale {
        let (least, most) = (least.max(f64::MIN_POSITIVE), most.max(f64::MIN_POSITIVE));
        let (low, high) = (below(least, base), above(most.max(least * base), base));
        let power = |number: f64| number.log2() / base.log2();
        // A number that is a power already may be a hair beside it.
        let (first, last) = ((power(low) - 1e-9).ceil(), (power(high) + 1e-9).floor());
        let stride = ((last - first) / count.max(1) as f64).ceil().max(1.0);
        let steps = ((last - first) / stride) as usize;
        let tick = |at: usize| {
            let number = base.powf(first + at as f64 * stride);
            let decimals = if number < 1.0 { (-number.log10() - 1e-9).ceil() as usize } else { 0 };
            (number, format!("{number:.decimals$}"))
        };
        let ticks = (0..=steps).map(tick).collect();
        Scale { low, high, is_log: true, ticks }
    }

    /// Where a number stands: 0 at the beginning, 1 at the end.
    pub(super) fn place(&self, number: f64) -> f64 {
        let share = if self.is_log {
            (number.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (number - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }

    /// Where bars stand.
    pub(super) fn base(&self) -> f64 {
        if self.is_log { self.low } else { 0.0f64.clamp(self.low, self.high) }
    }
}

/// Numbers at which a logarithmic axis may end, as multiples of a power of its base.
fn ends(base: f64) -> &'static [f64] {
    if base == 10.0 { &[1.0, 2.0, 5.0, 10.0] } else { &[1.0, 2.0] }
}

/// The largest end of an axis that is not above a number.
fn below(number: f64, base: f64) -> f64 {
    let power = base.powf((number.log2() / base.log2() + 1e-9).floor());
    let fits = |times: &&f64| *times * power <= number * (1.0 + 1e-9);
    ends(base).iter().rev().find(fits).unwrap_or(&1.0) * power
}

/// The smallest end of an axis that is not below a number.
fn above(number: f64, base: f64) -> f64 {
    let power = base.powf((number.log2() / base.log2() + 1e-9).floor());
    let fits = |times: &&f64| *times * power >= number * (1.0 - 1e-9);
    ends(base).iter().find(fits).unwrap_or(&base) * power
}

/// 1, 2 or 5 times a power of ten, not below.
pub(in crate::report) fn nice_step(step: f64) -> f64 {
    let step = step.max(f64::MIN_POSITIVE);
    let power = 10f64.powf(step.log10().floor());
    let times = [1.0, 2.0, 5.0].into_iter().find(|times| times * power >= step * (1.0 - 1e-9));
    times.unwrap_or(10.0) * power
}

/// Round numbers from 0 to `end`, about so many.
pub(in crate::report) fn round_marks(end: f64, count: f64) -> Vec<f64> {
    let step = nice_step(end / count);
    // By whole steps, rounded to what is meant: 0.3, not 0.30000000000000004.
    let digits = 10f64.powi(decimals(step).try_into().unwrap_or(i32::MAX));
    let marks = (0..=(end / step) as u64).map(|index| index as f64 * step);
    marks.map(|mark| (mark * digits).round() / digits).collect()
}

/// Decimals that a multiple of a step needs.
fn decimals(step: f64) -> usize {
    if step >= 1.0 { 0 } else { (-step.log10() - 1e-9).ceil() as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_and_enclose_the_numbers() {
        let scale = Scale::new([3.0, 72.69].into_iter(), ScaleKind::FromZero, 5);
        assert_eq!(labels(&scale), ["0", "20", "40", "60", "80"]);
        assert_eq!((scale.place(0.0), scale.place(80.0), scale.place(20.0)), (0.0, 1.0, 0.25));
        let small = Scale::new([0.01, 0.04].into_iter(), ScaleKind::FromZero, 4);
        assert_eq!(labels(&small), ["0.00", "0.01", "0.02", "0.03", "0.04"]);
        let below = Scale::new([-3.0, 4.0].into_iter(), ScaleKind::FromZero, 4);
        assert_eq!(labels(&below), ["-4", "-2", "0", "2", "4"]);
        assert_eq!(below.base(), 0.0);
    }

    #[test]
    fn marks_are_round() {
        assert_eq!(round_marks(80.0, 4.0), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(round_marks(1.0, 4.0), [0.0, 0.5, 1.0]);
        assert_eq!(round_marks(0.35, 4.0), [0.0, 0.1, 0.2, 0.3]);
    }

    #[test]
    fn one_number_and_none_still_make_an_axis() {
        for numbers in [vec![], vec![0.0], vec![7.0]] {
            for kind in [ScaleKind::FromZero, ScaleKind::Fitted, ScaleKind::Decades] {
                let scale = Scale::new(numbers.iter().copied(), kind, 5);
                assert!(scale.ticks.len() >= 2, "{numbers:?} {kind:?}: {scale:?}");
                assert!(scale.ticks.iter().all(|(at, _)| at.is_finite()));
            }
        }
    }

    #[test]
    fn logarithmic_axes_have_powers() {
        let decades = Scale::new([0.9, 900.0].into_iter(), ScaleKind::Decades, 6);
        assert_eq!(labels(&decades), ["1", "10", "100", "1000"]);
        // From 0.5 to 1000: 3.3 decades, of which 1 stands 0.3 above the beginning.
        assert!((decades.place(1.0) - 2f64.log10() / 2000f64.log10()).abs() < 1e-12);
        let part = Scale::new([30.0, 1275.0].into_iter(), ScaleKind::Decades, 6);
        assert_eq!(labels(&part), ["100", "1000"]);
        assert_eq!((part.place(20.0), part.place(2000.0)), (0.0, 1.0));
        let doublings = Scale::new([2.0, 4096.0].into_iter(), ScaleKind::Doublings, 6);
        assert_eq!(labels(&doublings), ["2", "8", "32", "128", "512", "2048"]);
        assert!((doublings.place(2.0), doublings.place(4096.0)) == (0.0, 1.0));
    }
}
