//! The methods, cheapest first, and the orders in which items are placed.
//!
//! Those that win most often sort by a coarse class first and by *start* inside it: neighbours in
//! time then lie side by side, and the memory stays whole. Sorting by the exact lifetime or size
//! instead gives no lower packings and splinters the memory, which also makes it slow.

use std::cmp::Reverse;

use super::super::core::{Core, Item};
use super::online::{Direction, Fit};
use crate::units::random::Random;

/// How many classes of load there are.
const LOAD_CLASSES: u64 = 64;

/// How many orders are drawn.
const DRAWN: u64 = 16;

/// A way to find a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// In order of time, without knowing when anything ends.
    Online(Fit, Direction),
    /// First fit in an order, knowing all lifetimes.
    Decode(Order),
}

/// An order in which first fit places items. Classes are powers of two or, with `n`, of `2^n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Whoever has a wish first, by the offset wished for and start: at that offset if it is free.
    Hints,
    /// By start.
    Start,
    /// By end, latest first.
    End,
    /// Longest class of lifetime first, then by start.
    LifeStart(u32),
    /// Longest class of lifetime first, then by end, latest first.
    LifeEnd(u32),
    /// Longest class of lifetime first, with classes drawn at random; in each by start or by end,
    /// whichever is drawn.
    LifeDrawn(u64),
    /// The same with classes of size.
    SizeDrawn(u64),
    /// Largest class of size first, then by start.
    SizeStart(u32),
    /// Largest first, then earliest.
    Largest,
    /// Largest first, then longest.
    LargestLongest,
    /// Longest first, then largest.
    Longest,
    /// Largest product of size and lifetime first.
    Area,
    /// By the highest load in an item's life, then longest, then largest.
    Load,
    /// By classes of the highest load, then of lifetime, then by start.
    LoadLifeStart,
    /// Nearest to the instant of the highest load first, then longest.
    PeakOutwards,
    /// Whoever is live at the instant of the highest load first: they lie without a gap. Then by
    /// classes of lifetime as in `LifeDrawn`.
    PeakDrawn(u64),
}

impl Method {
    /// What it is called in results.
    pub(super) fn name(self) -> &'static str {
        match self {
            Method::Online(Fit::First, Direction::Forward) => "online first fit",
            Method::Online(Fit::Best, Direction::Forward) => "online best fit",
            Method::Online(Fit::First, Direction::Reversed) => "reversed online first fit",
            Method::Online(Fit::Best, Direction::Reversed) => "reversed online best fit",
            Method::Decode(order) => order.name(),
        }
    }
}

/// Methods for a core, by rank. There is at least one, and the seed does not change the first.
pub(super) fn methods(core: &Core, seed: u64) -> Vec<Method> {
    let mut methods = Vec::new();
    if core.items.iter().any(|item| item.hint != u64::MAX) {
        methods.push(Method::Decode(Order::Hints));
    }
    methods.push(Method::Decode(Order::LifeStart(2)));
    if core.simple() {
        for (fit, direction) in [
            (Fit::First, Direction::Forward),
            (Fit::Best, Direction::Forward),
            (Fit::First, Direction::Reversed),
            (Fit::Best, Direction::Reversed),
        ] {
            methods.push(Method::Online(fit, direction));
        }
    }
    methods.push(Method::Decode(Order::LifeEnd(2)));
    methods.extend((0..DRAWN).map(|at| Method::Decode(Order::LifeDrawn(seed.wrapping_add(at)))));
    let drawn = (0..DRAWN / 4).map(|at| Order::PeakDrawn(seed.wrapping_add(at)));
    methods.extend(drawn.map(Method::Decode));
    let orders = [
        Order::SizeStart(2),
        Order::SizeStart(1),
        Order::Largest,
        Order::LifeStart(1),
        Order::LifeEnd(1),
        Order::LifeStart(3),
        Order::LifeEnd(3),
        Order::LoadLifeStart,
        Order::Area,
        Order::Load,
        Order::LargestLongest,
        Order::Longest,
        Order::PeakOutwards,
    ];
    methods.extend(orders.map(Method::Decode));
    if !core.simple() {
        methods.extend([Order::Start, Order::End].map(Method::Decode));
    }
    methods
}

/// So many further methods by chance, none of which need be tried before the others.
pub(super) fn drawn(count: u64, seed: u64) -> Vec<Method> {
    let mut random = Random::new(seed);
    let draw = |at| {
        let seed = random.bits();
        match at % 4 {
            0 | 1 => Order::LifeDrawn(seed),
            2 => Order::PeakDrawn(seed),
            _ => Order::SizeDrawn(seed),
        }
    };
    (0..count).map(draw).map(Method::Decode).collect()
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Order::Hints => "hints",
            Order::Start => "earliest first",
            Order::End => "latest first",
            Order::LifeStart(1) => "lifetime/2, start",
            Order::LifeStart(2) => "lifetime/4, start",
            Order::LifeStart(_) => "lifetime/8, start",
            Order::LifeEnd(1) => "lifetime/2, end",
            Order::LifeEnd(2) => "lifetime/4, end",
            Order::LifeEnd(_) => "lifetime/8, end",
            Order::LifeDrawn(_) => "lifetime drawn",
            Order::SizeDrawn(_) => "size drawn",
            Order::SizeStart(1) => "size/2, start",
            Order::SizeStart(_) => "size/4, start",
            Order::Largest => "largest first",
            Order::LargestLongest => "size, lifetime",
            Order::Longest => "longest first",
            Order::Area => "area",
            Order::Load => "load",
            Order::LoadLifeStart => "load, lifetime/4, start",
            Order::PeakOutwards => "peak outwards",
            Order::PeakDrawn(_) => "peak, lifetime drawn",
        }
    }

    /// Whether whoever is placed earlier always contains the first or last instant of whom it
    /// meets: it is longer than that, or starts no later, or ends no earlier.
    pub(super) fn ends_tell(self) -> bool {
        match self {
            Order::Start | Order::End | Order::LifeStart(_) | Order::LifeEnd(_) => true,
            Order::LifeDrawn(_) | Order::Longest => true,
            Order::SizeDrawn(_) => false,
            Order::Hints | Order::SizeStart(_) | Order::Largest | Order::LargestLongest => false,
            Order::Area | Order::Load | Order::LoadLifeStart => false,
            Order::PeakOutwards | Order::PeakDrawn(_) => false,
        }
    }

    /// Whether items are placed where they wish to be, if they can.
    pub(super) fn at_hint(self) -> bool {
        self == Order::Hints
    }

    /// The items in this order. Ties go by index.
    pub(super) fn of(self, core: &Core) -> Vec<u32> {
        let items = &core.items;
        let life = |index: usize| items[index].end - items[index].start;
        let start = |index: usize| items[index].start;
        let size = |index: usize| items[index].size;
        let life_class = |index: usize, width| class(u64::from(life(index)), width);
        let down = |number: u64| u64::MAX - number;
        match self {
            Order::Hints => {
                sorted(core, |index| (items[index].hint, down(life_class(index, 2)), start(index)))
            }
            Order::Start => sorted(core, |index| (start(index), Reverse(size(index)))),
            Order::End => sorted(core, |index| (Reverse(items[index].end), Reverse(size(index)))),
            Order::LifeStart(width) => sorted(core, |index| {
                (down(life_class(index, width)) << 32 | u64::from(start(index)), down(size(index)))
            }),
            Order::LifeEnd(width) => sorted(core, |index| {
                let end = u64::from(u32::MAX - items[index].end);
                (down(life_class(index, width)) << 32 | end, down(size(index)))
            }),
            Order::LifeDrawn(seed) => {
                let drawn = DrawnClasses::of(seed);
                sorted(core, |index| {
                    (drawn.key(u64::from(life(index)), &items[index]), down(size(index)))
                })
            }
            Order::SizeDrawn(seed) => {
                let drawn = DrawnClasses::of(seed);
                sorted(core, |index| (drawn.key(size(index), &items[index]), Reverse(life(index))))
            }
            Order::SizeStart(width) => sorted(core, |index| {
                let class = down(class(size(index), width)) << 32;
                (class | u64::from(start(index)), Reverse(life(index)))
            }),
            Order::Largest => {
                sorted(core, |index| (down(size(index)), start(index), Reverse(life(index))))
            }
            Order::LargestLongest => {
                sorted(core, |index| (down(size(index)), Reverse(life(index)), start(index)))
            }
            Order::Longest => {
                sorted(core, |index| (Reverse(life(index)), start(index), down(size(index))))
            }
            Order::Area => sorted(core, |index| {
                (down(size(index).saturating_mul(u64::from(life(index)))), start(index))
            }),
            Order::Load => {
                let load = Loads::of(core);
                sorted(core, |index| {
                    (down(load.highest(index)), Reverse(life(index)), down(size(index)))
                })
            }
            Order::LoadLifeStart => {
                let load = Loads::of(core);
                let load_class = |index| load.highest(index) * LOAD_CLASSES / load.peak.max(1);
                sorted(core, |index| {
                    (down(load_class(index)), down(life_class(index, 2)), start(index))
                })
            }
            Order::PeakOutwards => {
                let at = Loads::of(core).peak_at;
                let distance = |index: usize| {
                    start(index).saturating_sub(at).max((at + 1).saturating_sub(items[index].end))
                };
                sorted(core, |index| (distance(index), Reverse(life(index)), down(size(index))))
            }
            Order::PeakDrawn(seed) => {
                let drawn = DrawnClasses::of(seed);
                let at = Loads::of(core).peak_at;
                let away = |index: usize| !(start(index)..items[index].end).contains(&at);
                sorted(core, |index| {
                    let key = drawn.key(u64::from(life(index)), &items[index]);
                    (away(index), key, down(size(index)))
                })
            }
        }
    }
}

/// Items by a key, those of one key by index.
fn sorted<K: Ord>(core: &Core, key: impl Fn(usize) -> K) -> Vec<u32> {
    let mut keys: Vec<(K, u32)> =
        (0..core.items.len()).map(|index| (key(index), index as u32)).collect();
    keys.sort_unstable();
    keys.into_iter().map(|(_, index)| index).collect()
}

/// Class of a number among powers of `2^width`.
fn class(number: u64, width: u32) -> u64 {
    u64::from(number.max(1).ilog2() / width)
}

/// Classes of one to three octaves each, and the side by which each is sorted.
struct DrawnClasses {
    /// Quarters of an octave that the classes are wide, and that the first is cut short by.
    width: u64,
    shift: u64,
    /// A bit for each class.
    by_end: u64,
}

impl DrawnClasses {
    fn of(seed: u64) -> DrawnClasses {
        let mut random = Random::new(seed);
        let width = 4 + random.below(9);
        DrawnClasses { width, shift: random.below(width), by_end: random.bits() }
    }

    /// Sorts an item by the class of a number, highest first, and in it by start, or by end and
    /// latest first.
    fn key(&self, number: u64, item: &Item) -> u64 {
        let octave = number.max(1).ilog2();
        // The two bits after the highest tell the quarter.
        let quarter = (u128::from(number.max(1)) << 2 >> octave) as u64 & 3;
        let class = (u64::from(octave) * 4 + quarter + self.shift) / self.width;
        let by_end = self.by_end >> (class & 63) & 1 == 1;
        let time = if by_end { u32::MAX - item.end } else { item.start };
        (u64::MAX - class) << 32 | u64::from(time)
    }
}

/// The load at every instant and the highest of any interval.
struct Loads<'a> {
    core: &'a Core,
    /// A tree of maxima: node `i` has children `2i` and `2i + 1`, leaves are instants.
    highest: Vec<u64>,
    /// The highest load at all, and the first instant of it.
    peak: u64,
    peak_at: u32,
}

impl Loads<'_> {
    fn of(core: &Core) -> Loads<'_> {
        let instants = core.instants as usize;
        let mut highest = vec![0; instants];
        highest.extend(core.loads());
        let mut peak = (0, 0);
        for (at, &load) in highest[instants..].iter().enumerate() {
            if load > peak.0 {
                peak = (load, at as u32);
            }
        }
        for node in (1..instants).rev() {
            highest[node] = highest[2 * node].max(highest[2 * node + 1]);
        }
        Loads { core, highest, peak: peak.0, peak_at: peak.1 }
    }

    /// The highest load in an item's life.
    fn highest(&self, index: usize) -> u64 {
        let (item, instants) = (&self.core.items[index], self.core.instants as usize);
        let (mut from, mut to) = (item.start as usize + instants, item.end as usize + instants);
        let mut highest = 0;
        while from < to {
            if from & 1 == 1 {
                highest = highest.max(self.highest[from]);
                from += 1;
            }
            if to & 1 == 1 {
                to -= 1;
                highest = highest.max(self.highest[to]);
            }
            (from, to) = (from >> 1, to >> 1);
        }
        highest
    }
}
