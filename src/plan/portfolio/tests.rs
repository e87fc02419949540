//! The decoder against one that looks at every pair, and the portfolio on any number of threads.

use super::super::core::{Item, Rect};
use super::online::{Direction, Fit};
use super::*;
use crate::units::random::Random;

/// A core with all features: shapes, alignment, obstacles and hints, each in some of the cores.
pub(in super::super) fn random_core(seed: u64) -> Core {
    let mut random = Random::new(seed);
    let instants = 1 + random.below(150) as u32;
    let [shaped, aligned, fixed, hinted] = [2, 3, 4, 4].map(|one_in| random.below(one_in) == 0);
    let mut core = Core { instants, ..Core::default() };
    for _ in 0..1 + random.below(80) {
        let start = random.below(u64::from(instants)) as u32;
        let longest = if random.below(2) == 0 { 4 } else { instants };
        let end = (start + 1 + random.below(u64::from(longest)) as u32).min(instants);
        let mut size = 1 + random.below(12);
        let from = core.parts.len() as u32;
        if shaped && end - start > 1 && random.below(2) == 0 {
            let middle = start + 1 + random.below(u64::from(end - start - 1)) as u32;
            let low = random.below(3);
            core.parts.push(Rect { start, end: middle, low, high: low + size });
            core.parts.push(Rect { start: middle, end, low: 1, high: 2 });
            size = (low + size).max(2);
        }
        let align = if aligned { 1 + random.below(4) } else { 1 };
        let hint = if hinted && random.below(2) == 0 { random.below(40) } else { u64::MAX };
        let parts = (from, core.parts.len() as u32);
        core.items.push(Item { start, end, size, align, hint, parts });
    }
    if fixed {
        for level in 0..3 {
            let start = random.below(u64::from(instants)) as u32;
            let end = start + 1 + random.below(u64::from(instants - start)) as u32;
            core.obstacles.push(Rect { start, end, low: 9 * level, high: 9 * level + 5 });
        }
    }
    core
}

fn meet(a: &Rect, b: &Rect) -> bool {
    a.start < b.end && b.start < a.end && a.low < b.high && b.low < a.high
}

fn moved(core: &Core, index: usize, offset: u64) -> Vec<Rect> {
    let up = |rect: Rect| Rect { low: rect.low + offset, high: rect.high + offset, ..rect };
    core.rects(index).map(up).collect()
}

/// First fit by trying one offset after another against everything placed.
fn plainly(core: &Core, order: Order) -> Vec<u64> {
    let mut placed = core.obstacles.clone();
    let mut offsets = vec![0; core.items.len()];
    for index in order.of(core) {
        let index = index as usize;
        let item = &core.items[index];
        let free = |offset: &u64| {
            let mine = moved(core, index, *offset);
            !mine.iter().any(|rect| placed.iter().any(|other| meet(rect, other)))
        };
        let wish = Some(item.hint).filter(|&hint| order.at_hint() && hint < 1000);
        let wish = wish.filter(|hint| hint % item.align == 0).filter(free);
        let lowest = (0..).step_by(item.align as usize).find(free);
        offsets[index] = wish.or(lowest).expect("there is room above everything");
        placed.extend(moved(core, index, offsets[index]));
    }
    offsets
}

/// Panics where two rectangles share memory, or an offset is not aligned.
pub(in super::super) fn assert_packing(core: &Core, offsets: &[u64]) {
    let mut placed = core.obstacles.clone();
    for (index, &offset) in offsets.iter().enumerate() {
        assert_eq!(offset % core.items[index].align, 0);
        let mine = moved(core, index, offset);
        assert!(!mine.iter().any(|rect| placed.iter().any(|other| meet(rect, other))), "{index}");
        placed.extend(mine);
    }
}

const FREE: Limits<'_> = Limits { below: &[], start: u64::MAX, target: 0, units: u64::MAX };

#[test]
fn decoder_places_as_one_that_looks_at_everything() {
    let orders = [
        Order::Hints,
        Order::LifeStart(2),
        Order::LifeEnd(1),
        Order::LifeDrawn(5),
        Order::SizeDrawn(6),
    ];
    let more = [
        Order::SizeStart(2),
        Order::Start,
        Order::End,
        Order::Longest,
        Order::Largest,
        Order::PeakOutwards,
        Order::PeakDrawn(7),
    ];
    for seed in 0..400 {
        let core = random_core(seed);
        for order in orders.into_iter().chain(more) {
            let expected = plainly(&core, order);
            let narrow = decode::<u32>(&core, order, &FREE, &mut Work::unlimited());
            let wide = decode::<u64>(&core, order, &FREE, &mut Work::unlimited());
            assert_eq!(narrow.offsets.as_ref(), Some(&expected), "seed {seed}, {order:?}");
            assert_eq!(wide.offsets.as_ref(), Some(&expected), "seed {seed}, {order:?}");
            assert_eq!(narrow.height, core.height(&expected));
        }
    }
}

#[test]
fn online_first_fit_places_as_the_decoder_by_start() {
    for seed in 0..400 {
        let mut core = random_core(seed);
        if !core.simple() {
            continue;
        }
        // The sweep takes items that start together by index, the order by size.
        core.items.sort_by_key(|item| (item.start, std::cmp::Reverse(item.size)));
        let run = online::place::<u32>(
            &core,
            Fit::First,
            Direction::Forward,
            &FREE,
            &mut Work::unlimited(),
        );
        assert_eq!(run.offsets, Some(plainly(&core, Order::Start)), "seed {seed}");
    }
}

#[test]
fn every_method_gives_a_packing() {
    for seed in 0..300 {
        let core = random_core(seed);
        for method in orders::methods(&core, 0) {
            let run = method.run(&core, &FREE, &mut Work::unlimited());
            let offsets = run.offsets.expect("nothing limits it");
            assert_packing(&core, &offsets);
            assert_eq!(run.height, core.height(&offsets), "seed {seed}, {}", method.name());
        }
    }
}

/// The lowest of all methods run to their ends, of equals that of the lowest rank.
fn exhaustively(core: &Core) -> Placed {
    let mut best = Placed { height: u64::MAX, ..Placed::default() };
    for method in orders::methods(core, 0) {
        let run = method.run(core, &FREE, &mut Work::unlimited());
        if run.height < best.height {
            let offsets = run.offsets.expect("nothing limits it");
            best = Placed { offsets, height: run.height, found_by: method.name() };
        }
    }
    best
}

fn with_threads(core: &Core, threads: usize, units: u64) -> (Placed, u64) {
    let mut work = Work::new(units, None);
    let options = PortfolioOptions { target: 0, seed: 0, threads };
    let placed = portfolio(core, &options, &Incumbent::default(), &mut work);
    (placed, work.spent_units())
}

#[test]
fn giving_up_changes_no_winner_on_any_number_of_threads() {
    for seed in 0..200 {
        let core = random_core(seed);
        let expected = exhaustively(&core);
        let alone = with_threads(&core, 1, u64::MAX);
        assert_eq!(alone.0, expected, "seed {seed}");
        assert_eq!(with_threads(&core, 2, u64::MAX), alone, "seed {seed}");
        assert_eq!(with_threads(&core, 4, u64::MAX), alone, "seed {seed}");
    }
}

#[test]
fn a_budget_means_the_same_on_any_number_of_threads() {
    for seed in 0..60 {
        let core = random_core(seed);
        for units in [0, 100, 1000, 3000, 10_000] {
            let (alone, _) = with_threads(&core, 1, units);
            assert_packing(&core, &alone.offsets);
            assert_eq!(with_threads(&core, 2, units).0, alone, "seed {seed}");
            assert_eq!(with_threads(&core, 4, units).0, alone, "seed {seed}");
        }
    }
}

#[test]
fn heights_beyond_32_bits_are_counted_in_64() {
    let item =
        |start, end, size| Item { start, end, size, align: 1, hint: u64::MAX, parts: (0, 0) };
    let size = 1 << 40;
    let core = Core {
        instants: 3,
        items: vec![item(0, 2, size), item(1, 3, size + 1), item(2, 3, size)],
        ..Core::default()
    };
    let (placed, _) = with_threads(&core, 1, u64::MAX);
    assert_eq!(placed.height, 2 * size + 1);
}
