//! What changes during a search, and what follows from it.
//!
//! ```text
//!   units
//!     ^   cap ─ ─ ─ ─ ─ ─ ─ ─ ─
//!     │
//!     │      ┌────┐                what is placed, from the bottom up
//!     │  ┌───┤    ├─────┐
//!     │  │   ├────┘▒▒▒▒▒│          ▒ nothing that is left can begin here: the section's floor is
//!     │  └───┘          └──┐         above, and the space is lost
//!     └────────────────────┴──>  sections
//! ```
//!
//! The state is a lower bound of the offset of every piece that is left. All else follows: a
//! section's floor is the lowest of its pieces' bounds, and floor + units left must not pass the
//! cap.
//!
//! A bound is *firm* if the piece could be placed there now: it is where the piece comes to lie on
//! top of what is placed. Packings are sought in which every piece is at the lowest offset that is
//! allowed above those below it (every packing can be brought to that form by lowering pieces one
//! by one, which ends). So a piece whose bound is not firm is still to get something below it, and
//! its bound is at least the lowest end that a piece left could come to there.

use std::ops::Range;

use super::board::{Board, Cell};

/// Key of a piece that is placed.
const PLACED: u64 = u64::MAX;

/// Floor of a section in which nothing is left.
pub(super) const NOTHING: u64 = u64::MAX;

/// Bounds, floors and units left, with a trail to take steps back.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// No piece may reach above.
    cap: u64,
    /// By piece, twice the lower bound of its offset, plus one if the bound is not firm.
    keys: Vec<u64>,
    /// By piece, where it would come to lie on what is placed.
    rests: Vec<u64>,
    /// By section, the lowest bound of what is left.
    floors: Vec<u64>,
    /// By section, pieces that could be placed at its floor.
    choices: Vec<u32>,
    /// By section, units left to place.
    left: Vec<u64>,
    /// By section, pieces left that live before it and in or after it.
    crossing: Vec<u32>,
    /// By piece, where it was placed.
    pub(super) offsets: Vec<u64>,
    trail: Vec<Undo>,
    dirty: Vec<u32>,
    is_dirty: Vec<bool>,
    unsure: Vec<u32>,
    /// Section in which the last contradiction was seen.
    pub(super) conflict: usize,
    /// Items looked at.
    pub(super) units: u64,
}

#[derive(Clone, Copy, Debug)]
enum Undo {
    Piece { piece: u32, key: u64, rest: u64 },
    Section { section: u32, floor: u64, choices: u32 },
    Placed { piece: u32, key: u64 },
}

/// The cap cannot be met from here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contradiction;

impl State {
    /// Nothing placed.
    ///
    /// # Errors
    /// If it is seen at once that the cap cannot be met.
    pub(super) fn new(board: &Board, cap: u64) -> Result<State, Contradiction> {
        let count = board.pieces.len();
        let rests: Vec<u64> = (0..count).map(|piece| board.fit(piece, 0)).collect();
        let mut state = State {
            cap,
            keys: rests.iter().map(|rest| rest * 2).collect(),
            rests,
            floors: vec![0; board.sections],
            choices: vec![0; board.sections],
            left: vec![0; board.sections],
            crossing: vec![0; board.sections + 1],
            offsets: vec![0; count],
            trail: Vec::new(),
            dirty: (0..board.sections as u32).collect(),
            is_dirty: vec![true; board.sections],
            unsure: Vec::new(),
            conflict: 0,
            units: 0,
        };
        for (index, piece) in board.pieces.iter().enumerate() {
            for run in board.runs(index) {
                for section in run.start..run.end {
                    state.left[section as usize] += run.high;
                }
            }
            for section in piece.start + 1..piece.end {
                state.crossing[section as usize] += 1;
            }
            if state.rests[index] + piece.size > state.cap {
                return Err(Contradiction);
            }
        }
        if board.fixed_top() > state.cap {
            return Err(Contradiction);
        }
        state.propagate(board, Ok(()))?;
        Ok(state)
    }

    /// Length of the trail, to go back to.
    pub(super) fn mark(&self) -> usize {
        self.trail.len()
    }

    /// Takes back everything since a mark.
    pub(super) fn undo(&mut self, board: &Board, mark: usize) {
        while self.trail.len() > mark {
            let Some(undo) = self.trail.pop() else { break };
            match undo {
                Undo::Piece { piece, key, rest } => {
                    self.keys[piece as usize] = key;
                    self.rests[piece as usize] = rest;
                }
                Undo::Section { section, floor, choices } => {
                    self.floors[section as usize] = floor;
                    self.choices[section as usize] = choices;
                }
                Undo::Placed { piece, key } => {
                    self.keys[piece as usize] = key;
                    self.count(board, piece as usize, u64::wrapping_add, u32::wrapping_add);
                }
            }
        }
    }

    /// Counts a piece in or out of its sections.
    fn count(
        &mut self,
        board: &Board,
        piece: usize,
        units: fn(u64, u64) -> u64,
        pieces: fn(u32, u32) -> u32,
    ) {
        for run in board.runs(piece) {
            for left in &mut self.left[run.start as usize..run.end as usize] {
                *left = units(*left, run.high);
            }
        }
        let Range { start, end } =
            board.pieces[piece].start as usize..board.pieces[piece].end as usize;
        for crossing in &mut self.crossing[start + 1..end] {
            *crossing = pieces(*crossing, 1);
        }
    }

    /// Whether a piece is placed.
    pub(super) fn placed(&self, piece: usize) -> bool {
        self.keys[piece] == PLACED
    }

    /// The lower bound of a piece that is left, twice, plus one if it is not firm.
    pub(super) fn key(&self, piece: usize) -> u64 {
        self.keys[piece]
    }

    /// The lowest bound of what is left in a section, [`NOTHING`] if nothing is.
    pub(super) fn floor(&self, section: usize) -> u64 {
        self.floors[section]
    }

    /// Pieces that could be placed at a section's floor.
    pub(super) fn choices(&self, section: usize) -> u32 {
        self.choices[section]
    }

    /// Units that a section can still lose.
    pub(super) fn slack(&self, board: &Board, section: usize) -> u64 {
        board.room(section, self.floors[section], self.cap) - self.left[section]
    }

    /// Whether nothing that is left lives on both sides of the start of a section.
    pub(super) fn parted(&self, section: usize) -> bool {
        self.crossing[section] == 0
    }

    /// Places a piece at its bound, which must be firm.
    ///
    /// # Errors
    /// If it follows that the cap cannot be met.
    pub(super) fn place(&mut self, board: &Board, piece: usize) -> Result<(), Contradiction> {
        let key = self.keys[piece];
        debug_assert!(key.is_multiple_of(2) && key != PLACED);
        let offset = key / 2;
        self.offsets[piece] = offset;
        self.trail.push(Undo::Placed { piece: piece as u32, key });
        self.keys[piece] = PLACED;
        self.count(board, piece, u64::wrapping_sub, u32::wrapping_sub);
        for run in board.runs(piece) {
            (run.start..run.end).for_each(|section| self.soil(section as usize));
        }
        let result = self.cover(board, piece, offset);
        self.propagate(board, result)
    }

    /// Raises whoever meets a piece that was placed and would rest on it.
    fn cover(&mut self, board: &Board, piece: usize, offset: u64) -> Result<(), Contradiction> {
        let meetings = board.meetings(piece);
        self.units += meetings.len() as u64;
        for meeting in meetings {
            let other = meeting.piece as usize;
            let top = offset + meeting.above;
            let (key, rest) = (self.keys[other], self.rests[other]);
            if key == PLACED || rest >= top {
                continue;
            }
            let rest_now = board.fit(other, top);
            if rest_now == rest {
                continue;
            }
            self.trail.push(Undo::Piece { piece: meeting.piece, key, rest });
            self.rests[other] = rest_now;
            if rest_now >= key / 2 {
                self.set_key(board, other, rest_now * 2)?;
            }
        }
        Ok(())
    }

    /// Nothing begins at the floor of a section: whoever could must lie higher.
    ///
    /// # Errors
    /// If it follows that the cap cannot be met.
    pub(super) fn pass(&mut self, board: &Board, section: usize) -> Result<(), Contradiction> {
        let floor = self.floors[section];
        let at_floor = |cell: &&Cell| self.keys[cell.piece as usize] <= floor * 2 + 1;
        let pieces: Vec<u32> =
            board.cells(section).iter().filter(at_floor).map(|cell| cell.piece).collect();
        let raised =
            pieces.iter().try_for_each(|&piece| self.raise(board, piece as usize, floor + 1));
        self.propagate(board, raised)
    }

    /// Raises the bounds of pieces at the floor of a section that are not firm: something must
    /// come to lie below them.
    ///
    /// # Errors
    /// If it follows that the cap cannot be met.
    pub(super) fn settle(&mut self, board: &Board, section: usize) -> Result<(), Contradiction> {
        for cell in board.cells(section) {
            if self.keys[cell.piece as usize] == self.floors[section] * 2 + 1 {
                self.unsure.push(cell.piece);
            }
        }
        self.propagate(board, Ok(()))
    }

    /// Raises a bound to what its piece allows from there.
    fn raise(&mut self, board: &Board, piece: usize, bound: u64) -> Result<(), Contradiction> {
        let (key, rest) = (self.keys[piece], self.rests[piece]);
        let bound = board.fit(piece, bound);
        if key / 2 >= bound {
            return Ok(());
        }
        self.trail.push(Undo::Piece { piece: piece as u32, key, rest });
        self.unsure.push(piece as u32);
        self.set_key(board, piece, bound * 2 + 1)
    }

    /// Changes a key that is already on the trail.
    fn set_key(&mut self, board: &Board, piece: usize, key: u64) -> Result<(), Contradiction> {
        let old = self.keys[piece] / 2;
        self.keys[piece] = key;
        if key / 2 + board.pieces[piece].size > self.cap {
            self.conflict = board.pieces[piece].start as usize;
            return Err(Contradiction);
        }
        for run in board.runs(piece) {
            for section in run.start as usize..run.end as usize {
                if old == self.floors[section] || self.could_be_floor(board, section, old) {
                    self.soil(section);
                }
            }
        }
        Ok(())
    }

    /// Whether a section's floor could rise to a bound.
    fn could_be_floor(&self, board: &Board, section: usize, bound: u64) -> bool {
        board.room(section, bound, self.cap) >= self.left[section]
    }

    fn soil(&mut self, section: usize) {
        if !std::mem::replace(&mut self.is_dirty[section], true) {
            self.dirty.push(section as u32);
        }
    }

    /// Draws conclusions until there are none, if there is no contradiction yet.
    fn propagate(
        &mut self,
        board: &Board,
        so_far: Result<(), Contradiction>,
    ) -> Result<(), Contradiction> {
        let result = so_far.and_then(|()| self.conclude(board));
        if result.is_err() {
            while let Some(section) = self.dirty.pop() {
                self.is_dirty[section as usize] = false;
            }
            self.unsure.clear();
        }
        result
    }

    fn conclude(&mut self, board: &Board) -> Result<(), Contradiction> {
        loop {
            if let Some(section) = self.dirty.pop() {
                self.is_dirty[section as usize] = false;
                self.look_at(board, section as usize)?;
            } else if let Some(piece) = self.unsure.pop() {
                self.support(board, piece as usize)?;
            } else {
                return Ok(());
            }
        }
    }

    /// A piece whose bound is not firm will lie on something that is left.
    fn support(&mut self, board: &Board, piece: usize) -> Result<(), Contradiction> {
        let key = self.keys[piece];
        if key == PLACED || key.is_multiple_of(2) {
            return Ok(());
        }
        let meetings = board.meetings(piece);
        self.units += meetings.len() as u64;
        let mut lowest = self.cap;
        for meeting in meetings {
            let other = self.keys[meeting.piece as usize];
            if other != PLACED {
                lowest = lowest.min(other / 2 + meeting.below);
            }
        }
        if lowest > key / 2 { self.raise(board, piece, lowest) } else { Ok(()) }
    }

    /// The floor of a section, and what follows from it.
    ///
    /// ```text
    ///     ─ ─ ─ ─ ─  lowest end of any of those below: whoever is not among them begins above it
    ///       ┌───┐
    ///     ──┤   ├──  floor + slack: the lowest piece begins at most here
    ///       └───┘
    ///     ─────────  floor
    /// ```
    fn look_at(&mut self, board: &Board, section: usize) -> Result<(), Contradiction> {
        let cells = board.cells(section);
        self.units += cells.len() as u64;
        let lowest = cells.iter().map(|cell| self.keys[cell.piece as usize]).min();
        let floor = match lowest {
            None | Some(PLACED) => NOTHING,
            Some(key) => key / 2,
        };
        let room = board.room(section, floor, self.cap);
        if room < self.left[section] {
            self.conflict = section;
            return Err(Contradiction);
        }
        let mut choices = 0;
        if floor != NOTHING {
            // What is fixed may lie between: the cap counts.
            let latest = self.cap - self.left[section];
            let mut end = u64::MAX;
            for cell in cells {
                let key = self.keys[cell.piece as usize];
                choices += u32::from(key == floor * 2);
                if key / 2 <= latest {
                    end = end.min(key / 2 + cell.high);
                }
            }
            if end > latest + 1 {
                for cell in cells {
                    let key = self.keys[cell.piece as usize];
                    if key != PLACED && key / 2 > latest && key / 2 < end {
                        self.raise(board, cell.piece as usize, end)?;
                    }
                }
            }
        }
        if floor != self.floors[section] || choices != self.choices[section] {
            self.trail.push(Undo::Section {
                section: section as u32,
                floor: self.floors[section],
                choices: self.choices[section],
            });
            self.floors[section] = floor;
            self.choices[section] = choices;
        }
        Ok(())
    }
}
