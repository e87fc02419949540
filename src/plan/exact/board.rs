//! What does not change during a search: items by section of time, and who meets whom.
//!
//! ```text
//!   instants    0 1 2 3 4 5      A section is a maximal run of instants whose live sets lie in the
//!               a a a . . .      last one's: whatever fits at the last fits at all of them. So only
//!               . b b b b .      instants after which something ends are kept.
//!               . . . . c c
//!   sections    └─0─┘ └1┘ 2      0: {a, b}   1: {b, c}   2: {c}
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use crate::plan::core::{Core, Rect};

/// Most pairs of items that may be live together; more would be memory and time without an answer.
const PAIRS_MAX: usize = 1 << 22;

/// Sections and height of every rectangle of an item.
type Shape = Vec<(u32, u32, u64)>;

/// An item in the sections that it lives in.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// First section.
    pub(super) start: u32,
    /// First section after it.
    pub(super) end: u32,
    /// Units from its offset to its highest end.
    pub(super) size: u64,
    /// Its offset is a multiple of this.
    pub(super) align: u64,
    /// Index in the core.
    pub(super) item: u32,
    /// Pieces like it in everything have its kind.
    pub(super) kind: u32,
    /// The piece of its kind that is placed just before it; `u32::MAX` for the first.
    pub(super) before: u32,
    /// Its rectangles in [`Board::runs`].
    runs: (u32, u32),
    /// Offsets that what is fixed forbids, in [`Board::forbidden`].
    forbidden: (u32, u32),
}

/// A rectangle of an item: sections, and units above its offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) high: u64,
}

/// Another item that lives at the same time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meeting {
    /// The other.
    pub(super) piece: u32,
    /// Units from this one's offset that the other must be above, if above.
    pub(super) above: u64,
    /// Units from the other's offset that this one must be above, if above.
    pub(super) below: u64,
}

/// An item in a section.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) piece: u32,
    /// Units of the section that it takes from its offset.
    pub(super) high: u64,
}

/// The problem as the search sees it.
///
/// Every rectangle of every item begins at the item's offset: shapes that overhang are taken down
/// to it, which makes the problem harder (see [`Board::exact`]).
#[derive(Clone, Debug, Default)]
pub(super) struct Board {
    /// Sections.
    pub(super) sections: usize,
    /// Items by start.
    pub(super) pieces: Vec<Piece>,
    /// First piece that starts in or after a section, for every section and one past the last.
    pub(super) first_piece: Vec<u32>,
    /// No item has a gap in its life, so whoever crosses a section lies in it.
    pub(super) gapless: bool,
    /// Every packing of this board is one of the core's, and the other way round.
    pub(super) exact: bool,
    /// Every offset is allowed.
    pub(super) free: bool,
    runs: Vec<Run>,
    meetings: Vec<Meeting>,
    meetings_of: Vec<u32>,
    cells: Vec<Cell>,
    cells_of: Vec<u32>,
    forbidden: Vec<(u64, u64)>,
    /// What is fixed in every section, lowest first; empty if nothing is.
    fixed: Vec<Vec<(u64, u64)>>,
}

impl Board {
    /// The board of a core; nothing if too many items meet.
    pub(super) fn of(core: &Core) -> Option<Board> {
        let mut board = Board {
            gapless: true,
            exact: core.parts.iter().all(|part| part.low == 0),
            free: core.obstacles.is_empty() && core.items.iter().all(|item| item.align == 1),
            ..Board::default()
        };
        let section_at = sections(core);
        board.sections = section_at.last().map_or(0, |&last| last as usize);
        let span = |rect: &Rect| (section_at[rect.start as usize], section_at[rect.end as usize]);
        board.add_pieces(core, span);
        board.add_cells()?;
        board.add_meetings()?;
        if !core.obstacles.is_empty() {
            board.fixed = vec![Vec::new(); board.sections];
            for rect in &core.obstacles {
                let (start, end) = span(rect);
                for section in start..end {
                    board.fixed[section as usize].push((rect.low, rect.high));
                }
            }
            board.fixed.iter_mut().for_each(|fixed| fixed.sort_unstable());
        }
        Some(board)
    }

    fn add_pieces(&mut self, core: &Core, span: impl Fn(&Rect) -> (u32, u32)) {
        let mut order: Vec<usize> = (0..core.items.len()).collect();
        let start_of = |index: usize| {
            let whole = Rect {
                start: core.items[index].start,
                end: core.items[index].end,
                low: 0,
                high: 0,
            };
            span(&whole)
        };
        order.sort_by_key(|&index| (start_of(index), core.items[index].size, index));
        let mut kinds: BTreeMap<(Shape, u64), (u32, u32)> = BTreeMap::new();
        for index in order {
            let item = &core.items[index];
            let (start, end) = start_of(index);
            let mut runs: Vec<Run> = Vec::new();
            for rect in core.rects(index) {
                let (start, end) = span(&rect);
                runs.push(Run { start, end, high: rect.high });
            }
            runs.sort_unstable_by_key(|run| run.start);
            self.gapless &= runs.windows(2).all(|two| two[0].end == two[1].start);
            let shape = runs.iter().map(|run| (run.start, run.end, run.high)).collect();
            let piece = self.pieces.len() as u32;
            let kinds_before = kinds.len() as u32;
            let (kind, latest) =
                kinds.entry((shape, item.align)).or_insert((kinds_before, u32::MAX));
            let before = std::mem::replace(latest, piece);
            let forbidden = forbidden(core, index);
            let forbidden_from = self.forbidden.len() as u32;
            self.forbidden.extend(forbidden);
            let runs_from = self.runs.len() as u32;
            self.runs.extend(runs);
            self.pieces.push(Piece {
                start,
                end,
                size: item.size,
                align: item.align,
                item: index as u32,
                kind: *kind,
                before,
                runs: (runs_from, self.runs.len() as u32),
                forbidden: (forbidden_from, self.forbidden.len() as u32),
            });
        }
        self.first_piece = (0..=self.sections as u32)
            .map(|section| self.pieces.partition_point(|piece| piece.start < section) as u32)
            .collect();
    }

    fn add_cells(&mut self) -> Option<()> {
        let mut by_section: Vec<Vec<Cell>> = vec![Vec::new(); self.sections];
        let mut count = 0;
        for (index, piece) in self.pieces.iter().enumerate() {
            for run in &self.runs[piece.runs.0 as usize..piece.runs.1 as usize] {
                count += (run.end - run.start) as usize;
                if count > PAIRS_MAX {
                    return None;
                }
                for section in run.start..run.end {
                    by_section[section as usize].push(Cell { piece: index as u32, high: run.high });
                }
            }
        }
        self.cells_of.push(0);
        for cells in by_section {
            self.cells.extend(cells);
            self.cells_of.push(self.cells.len() as u32);
        }
        Some(())
    }

    fn add_meetings(&mut self) -> Option<()> {
        self.meetings_of.push(0);
        let plain = self.runs.len() == self.pieces.len();
        for (index, piece) in self.pieces.iter().enumerate() {
            for (other, against) in self.pieces.iter().enumerate() {
                if against.start >= piece.end {
                    break;
                }
                if other == index || against.end <= piece.start {
                    continue;
                }
                let (above, below) =
                    if plain { (piece.size, against.size) } else { self.meet(piece, against) };
                if above > 0 {
                    self.meetings.push(Meeting { piece: other as u32, above, below });
                }
            }
            if self.meetings.len() > PAIRS_MAX {
                return None;
            }
            self.meetings_of.push(self.meetings.len() as u32);
        }
        Some(())
    }

    /// Highest ends of two pieces where the other lives too; 0 if they do not meet.
    fn meet(&self, one: &Piece, other: &Piece) -> (u64, u64) {
        let mut highest = (0, 0);
        for a in &self.runs[one.runs.0 as usize..one.runs.1 as usize] {
            for b in &self.runs[other.runs.0 as usize..other.runs.1 as usize] {
                if a.start < b.end && b.start < a.end {
                    highest = (highest.0.max(a.high), highest.1.max(b.high));
                }
            }
        }
        highest
    }

    /// The rectangles of a piece.
    pub(super) fn runs(&self, piece: usize) -> &[Run] {
        let (from, to) = self.pieces[piece].runs;
        &self.runs[from as usize..to as usize]
    }

    /// Who lives when a piece lives.
    pub(super) fn meetings(&self, piece: usize) -> &[Meeting] {
        &self.meetings[self.meetings_of[piece] as usize..self.meetings_of[piece + 1] as usize]
    }

    /// Who lives in a section.
    pub(super) fn cells(&self, section: usize) -> &[Cell] {
        &self.cells[self.cells_of[section] as usize..self.cells_of[section + 1] as usize]
    }

    /// Pieces that start in a range of sections.
    pub(super) fn starting(&self, sections: Range<usize>) -> Range<usize> {
        self.first_piece[sections.start] as usize..self.first_piece[sections.end] as usize
    }

    /// The lowest offset of at least `from` that alignment and what is fixed allow a piece.
    #[inline]
    pub(super) fn fit(&self, piece: usize, from: u64) -> u64 {
        if self.free { from } else { self.fit_between(piece, from) }
    }

    fn fit_between(&self, piece: usize, from: u64) -> u64 {
        let Piece { align, forbidden, .. } = self.pieces[piece];
        let forbidden = &self.forbidden[forbidden.0 as usize..forbidden.1 as usize];
        let mut offset = from.div_ceil(align) * align;
        let next = forbidden.partition_point(|&(_, end)| end <= offset);
        for &(start, end) in &forbidden[next..] {
            if offset < start {
                break;
            }
            if offset < end {
                offset = end.div_ceil(align) * align;
            }
        }
        offset
    }

    /// Units of a section from `from` up to `cap` that nothing fixed takes.
    #[inline]
    pub(super) fn room(&self, section: usize, from: u64, cap: u64) -> u64 {
        let room = cap.saturating_sub(from);
        if self.fixed.is_empty() {
            return room;
        }
        let above = |&(low, high): &(u64, u64)| high.saturating_sub(low.max(from));
        room.saturating_sub(self.fixed[section].iter().map(above).sum())
    }

    /// Highest end of what is fixed.
    pub(super) fn fixed_top(&self) -> u64 {
        self.fixed.iter().flatten().map(|&(_, high)| high).max().unwrap_or(0)
    }
}

/// Number of the section that every instant falls into, and of sections for the instant past the
/// last.
fn sections(core: &Core) -> Vec<u32> {
    let mut ends = vec![false; core.instants as usize + 1];
    for index in 0..core.items.len() {
        core.rects(index).for_each(|rect| ends[rect.end as usize] = true);
    }
    core.obstacles.iter().for_each(|rect| ends[rect.end as usize] = true);
    let mut section_at = Vec::with_capacity(ends.len());
    let mut section = 0;
    for (instant, &ends_here) in ends.iter().enumerate() {
        section += u32::from(ends_here && instant > 0);
        section_at.push(section);
    }
    section_at
}

/// Offsets that what is fixed forbids an item: half-open ranges, ascending and disjoint.
fn forbidden(core: &Core, index: usize) -> Vec<(u64, u64)> {
    if core.obstacles.is_empty() {
        return Vec::new();
    }
    let mut ranges = Vec::new();
    for rect in core.rects(index) {
        let meets = |fixed: &&Rect| fixed.start < rect.end && rect.start < fixed.end;
        for fixed in core.obstacles.iter().filter(meets) {
            ranges.push(((fixed.low + 1).saturating_sub(rect.high), fixed.high));
        }
    }
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}
