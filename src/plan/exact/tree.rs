//! The search tree: which section is looked at next, and what may lie at its floor.
//!
//! ```text
//!      ───┐           ┌───       A valley: sections of one floor between higher ones. Whatever
//!         │   s       │          can begin at its floor lies within it, and rests on what is
//!         └───┬───────┘          placed. At section s of it: one of the choices, or nothing.
//! ```
//!
//! Every packing of the sought form agrees with exactly one branch of every choice, so no packing
//! is met twice, and when all branches fail there is none. Where nothing that is left crosses, the
//! sections before and after are searched one after the other, and if the one fails no time is
//! lost on other solutions of the other.

use super::board::{Board, Piece};
use super::nogood::{Nogoods, print};
use super::state::{Contradiction, NOTHING, State};
use crate::plan::work::Work;
use crate::units::random::mix;

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All pieces are placed.
    Found,
    /// There is no packing.
    None,
    /// Too many nodes.
    Limit,
}

/// In which order branches are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// What comes first.
    pub(super) first: First,
    pub(super) pick: Pick,
    pub(super) snug: Snug,
    /// How much chance has a say, in 1/16 of the range; and its seed.
    pub(super) chance: u32,
    pub(super) seed: u64,
}

/// Which section is looked at next, of those in valleys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pick {
    /// Few branches and many contradictions so far.
    Conflicts,
    /// The fewest branches; the lowest of several.
    Lowest,
}

/// What makes a choice fit well into its valley.
///
/// ```text
///   ──┐ ┌──────────    a begins where the valley begins, and ends as high as the wall beside it:
///     │a│              two sides, one corner
///     └─┴───────...
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Snug {
    /// Nothing: ranks alone count.
    No,
    /// How many walls it makes longer: beside them and as high.
    Corners,
    /// How many walls it touches, and how many it is as high as.
    Sides,
}

/// What comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// Large and wide.
    Area,
    /// Many sections.
    Width,
    /// Large.
    Size,
    /// Large and wide, size counting twice.
    SizeTwice,
    /// Narrow.
    Narrow,
    /// Small.
    Small,
}

/// A range of sections to be solved by itself.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: u32,
    end: u32,
    pieces: u32,
    print: u128,
}

#[derive(Clone, Copy, Debug)]
enum Frame {
    /// All parts from `next` on must succeed.
    All { parts_from: u32, next: u32 },
    /// One of the choices, or passing, must succeed.
    Any { part: Part, section: u32, choices_from: u32, next: u32, may_pass: bool, mark: usize },
}

/// A search for one cap.
pub(super) struct Tree<'a> {
    board: &'a Board,
    /// The state, all placed after [`End::Found`].
    pub(super) state: State,
    nogoods: Nogoods,
    ranks: Vec<f64>,
    pick: Pick,
    snug: Snug,
    weights: Vec<u32>,
    frames: Vec<Frame>,
    parts: Vec<Part>,
    choices: Vec<u32>,
    /// Nodes so far.
    pub(super) nodes: u64,
}

impl<'a> Tree<'a> {
    pub(super) fn new(
        board: &'a Board,
        cap: u64,
        slots_max: usize,
    ) -> Result<Tree<'a>, Contradiction> {
        Ok(Tree {
            board,
            state: State::new(board, cap)?,
            nogoods: Nogoods::new(slots_max),
            ranks: Vec::new(),
            pick: Pick::Lowest,
            snug: Snug::No,
            weights: vec![1; board.sections],
            frames: Vec::new(),
            parts: Vec::new(),
            choices: Vec::new(),
            nodes: 0,
        })
    }

    /// Searches from the start in an order, for so many nodes.
    pub(super) fn run(&mut self, order: Order, nodes_max: u64, work: &mut Work<'_>) -> End {
        self.rank(order);
        self.pick = order.pick;
        self.snug = order.snug;
        let start = self.state.mark();
        let stop_at = self.nodes + nodes_max;
        self.frames.clear();
        self.parts.clear();
        self.choices.clear();
        let mut step = self.split(0, self.board.sections as u32);
        let mut units = self.state.units;
        loop {
            step = match step {
                Step::Enter(part) => self.enter(part),
                Step::Branch => {
                    let spent = self.state.units - units;
                    units = self.state.units;
                    if self.nodes >= stop_at || !work.spend(spent / 8 + 1) {
                        self.state.undo(self.board, start);
                        return End::Limit;
                    }
                    self.branch()
                }
                Step::Failed => self.failed(),
                Step::Solved => self.solved(),
                Step::End(end) => {
                    if end == End::None {
                        self.state.undo(self.board, start);
                    }
                    return end;
                }
            };
        }
    }

    /// Gives every piece its rank among choices.
    fn rank(&mut self, order: Order) {
        let board = self.board;
        let chance = |index: usize| {
            let draw = mix(order.seed ^ mix(index as u64 + 1)) >> 40;
            1.0 + f64::from(order.chance) / 16.0 * (draw as f64 / (1u64 << 24) as f64 - 0.5)
        };
        let largest = board.pieces.iter().map(|piece| piece.size).max().unwrap_or(1).max(1) as f64;
        let rank = |(index, piece): (usize, &Piece)| {
            let width = f64::from(piece.end - piece.start);
            let size = piece.size as f64 / largest;
            // Where one figure decides, the other parts ties.
            let rank = match order.first {
                First::Area => width * size,
                First::Width => width + 0.999 * size,
                First::Size => size + width * 1e-9,
                First::SizeTwice => width * size * size,
                First::Narrow => 1.0 / (width + 0.999 * size),
                First::Small => 1.0 / (size + width * 1e-9),
            };
            rank * chance(index)
        };
        self.ranks = board.pieces.iter().enumerate().map(rank).collect();
    }

    /// The parts that a range of sections falls into.
    fn split(&mut self, start: u32, end: u32) -> Step {
        let parts_from = self.parts.len();
        let mut section = start;
        while section < end {
            if self.state.floor(section as usize) == NOTHING {
                section += 1;
                continue;
            }
            let from = section;
            section += 1;
            while section < end && !self.state.parted(section as usize) {
                section += 1;
            }
            let part = self.part(from, section);
            if self.nogoods.has(part.print) {
                self.parts.truncate(parts_from);
                return Step::Failed;
            }
            self.parts.push(part);
        }
        let parts = &mut self.parts[parts_from..];
        if parts.is_empty() {
            return Step::Solved;
        }
        parts.sort_by_key(|part| part.pieces);
        let first = parts[0];
        self.frames.push(Frame::All { parts_from: parts_from as u32, next: parts_from as u32 + 1 });
        Step::Enter(first)
    }

    fn part(&mut self, start: u32, end: u32) -> Part {
        let mut part = Part { start, end, pieces: 0, print: 0 };
        let pieces = self.board.starting(start as usize..end as usize);
        self.state.units += pieces.len() as u64;
        for piece in pieces {
            if !self.state.placed(piece) {
                part.pieces += 1;
                let print = print(self.board.pieces[piece].kind, self.state.key(piece));
                part.print = part.print.wrapping_add(print);
            }
        }
        part
    }

    /// Begins with a part: picks the section to branch on.
    fn enter(&mut self, part: Part) -> Step {
        loop {
            let (section, settled) = self.pick(part);
            if settled {
                let slack = self.state.slack(self.board, section as usize);
                return self.open(part, section, slack > 0);
            }
            if self.state.settle(self.board, section as usize).is_err() {
                self.weights[self.state.conflict] += 1;
                self.nogoods.add(part.print);
                return Step::Failed;
            }
        }
    }

    fn open(&mut self, part: Part, section: u32, may_pass: bool) -> Step {
        let key = self.state.floor(section as usize) * 2;
        let choices_from = self.choices.len();
        for cell in self.board.cells(section as usize) {
            let piece = cell.piece as usize;
            let before = self.board.pieces[piece].before;
            let first = before == u32::MAX || self.state.placed(before as usize);
            if self.state.key(piece) == key && first {
                self.choices.push(cell.piece);
            }
        }
        self.sort_choices(part, section, choices_from);
        self.frames.push(Frame::Any {
            part,
            section,
            choices_from: choices_from as u32,
            next: choices_from as u32,
            may_pass,
            mark: self.state.mark(),
        });
        Step::Branch
    }

    /// Puts the best choices first: by how well they fit into the valley, then by rank.
    fn sort_choices(&mut self, part: Part, section: u32, choices_from: usize) {
        let (state, ranks, snug) = (&self.state, &self.ranks, self.snug);
        let floor = |section: u32| state.floor(section as usize);
        let level = floor(section);
        let (mut from, mut to) = (section, section + 1);
        while from > part.start && floor(from - 1) == level {
            from -= 1;
        }
        while to < part.end && floor(to) == level {
            to += 1;
        }
        let left = if from > part.start { floor(from - 1) } else { NOTHING };
        let right = if to < part.end { floor(to) } else { NOTHING };
        let fit = |piece: u32| {
            let piece = &self.board.pieces[piece as usize];
            let top = level + piece.size;
            let (at_left, at_right) = (piece.start == from, piece.end == to);
            let (to_left, to_right) = (top == left, top == right);
            match snug {
                Snug::No => 0,
                Snug::Corners => u8::from(at_left && to_left) + u8::from(at_right && to_right),
                Snug::Sides => [at_left, at_right, to_left, to_right].map(u8::from).iter().sum(),
            }
        };
        let best_first = |&one: &u32, &other: &u32| {
            let rank = |piece: u32| ranks[piece as usize];
            let by_rank = || rank(other).total_cmp(&rank(one));
            fit(other).cmp(&fit(one)).then_with(by_rank).then(one.cmp(&other))
        };
        self.choices[choices_from..].sort_by(best_first);
    }

    /// The section with the fewest branches in any valley; or one with a bound that is not firm.
    fn pick(&self, part: Part) -> (u32, bool) {
        let floor = |section: u32| self.state.floor(section as usize);
        let mut best = (u64::MAX, part.start);
        let mut from = part.start;
        let lowest = (part.start..part.end).map(floor).min().unwrap_or(0);
        while from < part.end {
            let level = floor(from);
            let mut to = from + 1;
            while to < part.end && floor(to) == level {
                to += 1;
            }
            let walled = (from == part.start || floor(from - 1) > level)
                && (to == part.end || floor(to) > level);
            if if self.board.gapless { walled } else { level == lowest } {
                for section in from..to {
                    let choices = self.state.choices(section as usize);
                    if choices == 0 {
                        return (section, false);
                    }
                    let slack = self.state.slack(self.board, section as usize);
                    let branches = u64::from(choices) + u64::from(slack > 0);
                    let weight = u64::from(self.weights[section as usize]);
                    let score = match self.pick {
                        Pick::Conflicts => (branches << 32) / weight,
                        Pick::Lowest => (branches << 32) + level.min(u64::from(u32::MAX)),
                    };
                    if score < best.0 {
                        best = (score, section);
                    }
                }
            }
            from = to;
        }
        (best.1, true)
    }

    /// Takes the next branch of the last frame.
    fn branch(&mut self) -> Step {
        let Some(Frame::Any { part, section, choices_from, next, may_pass, mark }) =
            self.frames.last_mut()
        else {
            return Step::Failed;
        };
        let (part, section, mark) = (*part, *section as usize, *mark);
        let result = if (*next as usize) < self.choices.len() {
            let piece = self.choices[*next as usize] as usize;
            *next += 1;
            self.nodes += 1;
            self.state.place(self.board, piece)
        } else if std::mem::replace(may_pass, false) {
            self.nodes += 1;
            self.state.pass(self.board, section)
        } else {
            self.nogoods.add(part.print);
            self.choices.truncate(*choices_from as usize);
            self.frames.pop();
            return Step::Failed;
        };
        if result.is_err() {
            self.weights[self.state.conflict] += 1;
            self.state.undo(self.board, mark);
            return Step::Branch;
        }
        self.split(part.start, part.end)
    }

    /// Goes back to the last choice that is left.
    fn failed(&mut self) -> Step {
        if let Some(Frame::All { parts_from, .. }) = self.frames.last() {
            self.parts.truncate(*parts_from as usize);
            self.frames.pop();
        }
        match self.frames.last() {
            Some(Frame::Any { mark, .. }) => {
                self.state.undo(self.board, *mark);
                Step::Branch
            }
            _ => Step::End(End::None),
        }
    }

    /// Goes on to the next part that is left.
    fn solved(&mut self) -> Step {
        while let Some(frame) = self.frames.last_mut() {
            match frame {
                Frame::All { next, .. } if (*next as usize) < self.parts.len() => {
                    *next += 1;
                    return Step::Enter(self.parts[*next as usize - 1]);
                }
                Frame::All { parts_from, .. } => self.parts.truncate(*parts_from as usize),
                Frame::Any { choices_from, .. } => self.choices.truncate(*choices_from as usize),
            }
            self.frames.pop();
        }
        Step::End(End::Found)
    }
}

/// What the search does next.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Begin with a part.
    Enter(Part),
    /// Take the next branch of the last frame.
    Branch,
    /// What was last begun has no solution.
    Failed,
    /// What was last begun has one.
    Solved,
    /// All done.
    End(End),
}
