use super::*;
use crate::plan::core::{Item, Rect};
use crate::plan::portfolio::{Placed, PortfolioOptions, portfolio};
use crate::plan::work::Incumbent;
use crate::units::random::mix;

/// Random numbers, the same ones every time.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// What a random core may have besides plain items.
#[derive(Clone, Copy, Debug, Default)]
struct Features {
    align: bool,
    fixed: bool,
    /// Shapes whose parts all begin at the offset.
    steps: bool,
    /// Shapes whose parts begin anywhere.
    overhangs: bool,
}

fn random_core(rng: &mut Rng, features: Features) -> Core {
    let instants = 1 + rng.below(6) as u32;
    let mut core = Core { instants, ..Core::default() };
    if features.fixed {
        for _ in 0..rng.below(4) {
            let (start, end) = random_span(rng, 0, instants);
            let low = rng.below(6);
            let rect = Rect { start, end, low, high: low + 1 + rng.below(2) };
            if core.obstacles.iter().all(|other| !overlap(other, &rect)) {
                core.obstacles.push(rect);
            }
        }
    }
    for _ in 0..1 + rng.below(6) {
        let (start, end) = random_span(rng, 0, instants);
        let mut item = Item {
            start,
            end,
            size: 1 + rng.below(4),
            align: if features.align && rng.chance(40) { 1 + rng.below(4) } else { 1 },
            hint: u64::MAX,
            parts: (0, 0),
        };
        if (features.steps || features.overhangs) && end - start > 1 && rng.chance(50) {
            shape(rng, &mut core, &mut item, features.overhangs);
        }
        core.items.push(item);
    }
    core
}

fn random_span(rng: &mut Rng, from: u32, to: u32) -> (u32, u32) {
    let start = from + rng.below(u64::from(to - from)) as u32;
    (start, start + 1 + rng.below(u64::from(to - start)) as u32)
}

/// Makes an item of two parts, with or without a gap between them.
fn shape(rng: &mut Rng, core: &mut Core, item: &mut Item, overhangs: bool) {
    let cut = item.start + 1 + rng.below(u64::from(item.end - item.start - 1)) as u32;
    let second = cut + rng.below(u64::from(item.end - cut)) as u32;
    let from = core.parts.len() as u32;
    for (start, end) in [(item.start, cut), (second, item.end)] {
        let low = if overhangs { rng.below(3) } else { 0 };
        core.parts.push(Rect { start, end, low, high: low + 1 + rng.below(3) });
    }
    item.parts = (from, from + 2);
    item.size = core.parts[from as usize..].iter().map(|part| part.high).max().unwrap();
}

fn overlap(a: &Rect, b: &Rect) -> bool {
    a.start < b.end && b.start < a.end && a.low < b.high && b.low < a.high
}

/// Whether a core fits below a cap: every offset of every item is tried.
fn fits(core: &Core, cap: u64) -> bool {
    fn place(core: &Core, cap: u64, index: usize, placed: &mut Vec<Rect>) -> bool {
        if index == core.items.len() {
            return true;
        }
        let item = &core.items[index];
        let mut offset = 0;
        while offset + item.size <= cap {
            let rects: Vec<Rect> = core
                .rects(index)
                .map(|rect| Rect { low: rect.low + offset, high: rect.high + offset, ..rect })
                .collect();
            if rects.iter().all(|rect| placed.iter().all(|other| !overlap(rect, other))) {
                let before = placed.len();
                placed.extend(rects);
                if place(core, cap, index + 1, placed) {
                    return true;
                }
                placed.truncate(before);
            }
            offset += item.align;
        }
        false
    }
    core.obstacles.iter().all(|fixed| fixed.high <= cap)
        && place(core, cap, 0, &mut core.obstacles.clone())
}

fn assert_valid(core: &Core, offsets: &[u64], cap: u64) {
    let mut rects = core.obstacles.clone();
    for (index, &offset) in offsets.iter().enumerate() {
        assert_eq!(offset % core.items[index].align, 0, "alignment of {index}");
        for rect in core.rects(index) {
            let rect = Rect { low: rect.low + offset, high: rect.high + offset, ..rect };
            assert!(rect.high <= cap, "item {index} above the cap");
            assert!(rects.iter().all(|other| !overlap(&rect, other)), "item {index} overlaps");
            rects.push(rect);
        }
    }
}

fn against_every_offset(features: Features, cores: usize) {
    let mut rng = Rng(7);
    for case in 0..cores {
        let core = random_core(&mut rng, features);
        let lowest = (0..).find(|&cap| fits(&core, cap)).unwrap();
        for cap in lowest.saturating_sub(3)..lowest + 4 {
            let outcome = search(&core, cap, case as u64, &mut Work::unlimited());
            match outcome {
                Outcome::Found(offsets) => assert_valid(&core, &offsets, cap),
                Outcome::Infeasible => assert!(cap < lowest, "case {case}: {cap} fits {core:?}"),
                Outcome::Unknown => panic!("case {case}: no answer without a limit"),
            }
        }
    }
}

#[test]
fn plain_cores_agree_with_every_offset() {
    against_every_offset(Features::default(), 4000);
}

#[test]
fn aligned_cores_agree_with_every_offset() {
    against_every_offset(Features { align: true, ..Features::default() }, 3000);
}

#[test]
fn cores_with_fixed_rectangles_agree_with_every_offset() {
    against_every_offset(Features { fixed: true, ..Features::default() }, 3000);
    against_every_offset(Features { fixed: true, align: true, ..Features::default() }, 3000);
}

#[test]
fn cores_with_steps_and_gaps_agree_with_every_offset() {
    against_every_offset(Features { steps: true, ..Features::default() }, 3000);
    let all = Features { steps: true, align: true, fixed: true, overhangs: false };
    against_every_offset(all, 3000);
}

#[test]
fn cores_with_overhangs_agree_with_every_offset() {
    against_every_offset(Features { overhangs: true, ..Features::default() }, 2000);
    let all = Features { steps: true, align: true, fixed: true, overhangs: true };
    against_every_offset(all, 2000);
}

fn first_packing(core: &Core) -> Placed {
    let options = PortfolioOptions { target: 0, seed: 0, threads: 1 };
    portfolio(core, &options, &Incumbent::default(), &mut Work::unlimited())
}

#[test]
fn minimize_proves_the_lowest_height_on_any_number_of_threads() {
    let mut rng = Rng(11);
    for case in 0..2000 {
        let features = Features {
            align: case % 2 == 1,
            fixed: case % 3 == 1,
            steps: case % 5 == 1,
            overhangs: case % 7 == 1,
        };
        let core = random_core(&mut rng, features);
        let lowest = (0..).find(|&cap| fits(&core, cap)).unwrap();
        let mut packings = Vec::new();
        for threads in [1, 2] {
            let mut placed = first_packing(&core);
            let bound = minimize(&core, &mut placed, 0, 3, threads, &mut Work::unlimited());
            assert_eq!((bound, placed.height), (lowest, lowest), "case {case}: {core:?}");
            assert_valid(&core, &placed.offsets, lowest);
            packings.push(placed);
        }
        assert_eq!(packings[0], packings[1], "case {case}");
    }
}

/// A rectangle of `instants` by `height` cut at random into about `count` pieces, some of them
/// around a middle piece so that no straight cut parts them: a packing without any loss exists.
fn cut_rectangle(rng: &mut Rng, instants: u32, height: u64, count: usize) -> Core {
    let mut open = vec![Rect { start: 0, end: instants, low: 0, high: height }];
    let mut done = Vec::new();
    while open.len() + done.len() < count {
        let area = |rect: &Rect| u64::from(rect.end - rect.start) * (rect.high - rect.low);
        let Some(at) = (0..open.len()).max_by_key(|&at| area(&open[at]) * (1 + rng.below(8)))
        else {
            break;
        };
        let rect = open.swap_remove(at);
        let (width, units) = (rect.end - rect.start, rect.high - rect.low);
        let cut = |rng: &mut Rng, size: u64| 1 + rng.below(size - 1);
        if width > 2 && units > 2 && rng.chance(35) {
            let left = 1 + rng.below(u64::from(width) - 2) as u32;
            let right = left + 1 + rng.below(u64::from(width - left - 1)) as u32;
            let lower = 1 + rng.below(units - 2);
            let upper = lower + 1 + rng.below(units - lower - 1);
            let (left, right) = (rect.start + left, rect.start + right);
            let (lower, upper) = (rect.low + lower, rect.low + upper);
            open.extend([
                Rect { end: right, high: lower, ..rect },
                Rect { start: right, high: upper, ..rect },
                Rect { start: left, low: upper, ..rect },
                Rect { end: left, low: lower, ..rect },
                Rect { start: left, end: right, low: lower, high: upper },
            ]);
        } else if width > 1 && (units == 1 || rng.chance(50)) {
            let at = rect.start + cut(rng, u64::from(width)) as u32;
            open.extend([Rect { end: at, ..rect }, Rect { start: at, ..rect }]);
        } else if units > 1 {
            let at = rect.low + cut(rng, units);
            open.extend([Rect { high: at, ..rect }, Rect { low: at, ..rect }]);
        } else {
            done.push(rect);
        }
    }
    let item = |rect: Rect| Item {
        start: rect.start,
        end: rect.end,
        size: rect.high - rect.low,
        align: 1,
        hint: u64::MAX,
        parts: (0, 0),
    };
    Core { instants, items: open.into_iter().chain(done).map(item).collect(), ..Core::default() }
}

#[test]
fn cut_rectangles_are_put_together_again() {
    let mut rng = Rng(5);
    for case in 0..40 {
        let core = cut_rectangle(&mut rng, 30, 200, 60);
        let mut work = Work::new(20_000_000, None);
        match search(&core, 200, case, &mut work) {
            Outcome::Found(offsets) => assert_valid(&core, &offsets, 200),
            other => panic!("case {case}: {other:?}"),
        }
        assert_eq!(search(&core, 199, case, &mut Work::unlimited()), Outcome::Infeasible);
    }
}

#[test]
fn a_limit_in_units_is_kept_and_gives_the_same_result_every_time() {
    let core = cut_rectangle(&mut Rng(9), 100, 5000, 300);
    let mut packings = Vec::new();
    for threads in [1, 2, 1] {
        let mut placed = first_packing(&core);
        let mut work = Work::new(3_000_000, None);
        let bound = minimize(&core, &mut placed, 5000, 1, threads, &mut work);
        assert_valid(&core, &placed.offsets, placed.height);
        assert!(work.spent_units() < 3_200_000, "{} units", work.spent_units());
        packings.push((placed, bound, work.spent_units()));
    }
    assert!(packings.windows(2).all(|two| two[0] == two[1]));
}
