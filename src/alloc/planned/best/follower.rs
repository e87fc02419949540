//! Where the program is in the track that is expected of it.
//!
//! The design decision: a request that is not what is expected decides nothing by itself. It may be
//! one too many, one of another size, or the first after some that are left out; the requests after
//! it tell. Until then the follower is *lost*: it gives each request the likeliest position, by how
//! many requests in a row would then be as expected, and is found again when enough of them are.
//!
//! ```text
//!   expected   a  b  c  d  e  f       expected   a  b  c  d  e       expected   a  b  c  d  e  f
//!   asked      a  b  x  c  d  e       asked      a  b  x  d  e       asked      a  b  e  f
//!                    ╵  └ found                        ╵  └ found                    └ found
//!                 one too many                      another size                two left out
//! ```
//!
//! A wrong guess costs little: a place is taken only if it is free, and a request that finds its
//! place taken is placed on line.

use super::plan::{Place, Track};
use crate::units::StreamId;

/// Positions ahead of where the program should be that are looked at.
const AHEAD: usize = 256;
/// Positions behind.
const BEHIND: usize = 32;
/// Requests in a row that must be as expected for the program to be found.
const SURE: usize = 3;

/// A request as far as it is compared.
type Asked = (u64, StreamId);

/// Where a request seems to belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// At this position, as expected.
    Exact(u32),
    /// The program is lost, and this position expects just such a request.
    Guess(u32),
    /// Probably this position, which expects another size.
    Similar(u32),
    /// Nowhere.
    Nowhere,
}

/// Where the program is in its track.
#[derive(Clone, Debug)]
pub(super) struct Follower {
    /// The next position.
    cursor: u32,
    /// The next phase of the track.
    next_mark: usize,
    /// Requests since it was lost; 0 if it is not.
    lost: u32,
    /// How many of them are not even similar to what is expected, and so too many.
    extra: u32,
    /// The last requests, the latest first.
    recent: [Asked; SURE],
    /// How often it was found again.
    pub(super) resyncs: u64,
}

#[inline]
fn expects(place: &Place, asked: Asked) -> bool {
    let (size_bytes, stream) = asked;
    place.stream == stream && (place.size_bytes == size_bytes || place.may_be(size_bytes))
}

/// Whether a request may be one that is expected with another size: not below a quarter, not above
/// four times.
fn is_similar(place: &Place, asked: Asked) -> bool {
    let (size_bytes, stream) = asked;
    let within = place.size_bytes / 4 <= size_bytes && size_bytes / 4 <= place.size_bytes;
    place.stream == stream && within
}

impl Default for Follower {
    fn default() -> Self {
        Follower {
            cursor: 0,
            next_mark: 0,
            lost: 0,
            extra: 0,
            recent: [(0, StreamId::NONE); SURE],
            resyncs: 0,
        }
    }
}

impl Follower {
    /// At the beginning of a track.
    pub(super) fn start(&mut self) {
        self.go_to(0);
        self.next_mark = 0;
    }

    /// At a position of the track.
    pub(super) fn go_to(&mut self, position: u32) {
        self.cursor = position;
        self.lost = 0;
        self.extra = 0;
    }

    /// The next position, as far as it is known.
    pub(super) fn position(&self) -> u32 {
        self.cursor + self.lost - self.extra
    }

    /// Whether every request of the track has come.
    pub(super) fn is_at_end(&self, track: &Track) -> bool {
        self.lost == 0 && self.cursor as usize >= track.places.len()
    }

    /// A phase of the step begins, by its name in the step: the track may know at which position.
    pub(super) fn mark(&mut self, track: &Track, part: &str) {
        let later = track.marks.iter().enumerate().skip(self.next_mark);
        let Some((at, (_, position))) = later.into_iter().find(|(_, (name, _))| name == part)
        else {
            return;
        };
        self.next_mark = at + 1;
        if *position != self.cursor || self.lost > 0 {
            self.resyncs += u64::from(self.lost > 0);
            self.go_to(*position);
        }
    }

    /// Where a request belongs.
    #[inline]
    pub(super) fn next(&mut self, track: &Track, size_bytes: u64, stream: StreamId) -> Found {
        let asked = (size_bytes, stream);
        if self.lost == 0
            && let Some(place) = track.places.get(self.cursor as usize)
            && expects(place, asked)
        {
            self.cursor += 1;
            return Found::Exact(self.cursor - 1);
        }
        self.search(track, asked)
    }

    #[cold]
    fn search(&mut self, track: &Track, asked: Asked) -> Found {
        if self.lost == 0 {
            // What came before the cursor was as expected.
            for back in 0..SURE {
                let before = (self.cursor as usize).checked_sub(back + 1);
                let place = before.and_then(|at| track.places.get(at));
                self.recent[back] =
                    place.map_or((0, StreamId::NONE), |place| (place.size_bytes, place.stream));
            }
        }
        let straight = self.position() as usize;
        let from = (self.cursor as usize).saturating_sub(BEHIND);
        let to = (straight + AHEAD).min(track.places.len());
        // How many in a row, the straight way on counting one more; then the nearest.
        let score = |at: usize| {
            let row = self.in_a_row(track, at, asked);
            let sure = row + usize::from(at == straight);
            (row > 0).then_some((sure, usize::MAX - at.abs_diff(straight), at))
        };
        let best = (from..to).filter_map(score).max();
        self.recent.rotate_right(1);
        self.recent[0] = asked;
        self.lost += 1;
        if let Some((sure, _, at)) = best {
            if sure < SURE {
                return Found::Guess(at as u32);
            }
            self.go_to(at as u32 + 1);
            self.resyncs += 1;
            return Found::Exact(at as u32);
        }
        match track.places.get(straight) {
            Some(place) if is_similar(place, asked) => Found::Similar(straight as u32),
            _ => {
                self.extra += 1;
                Found::Nowhere
            }
        }
    }

    /// How many requests in a row up to this one would be as expected if it belonged to `at`.
    fn in_a_row(&self, track: &Track, at: usize, asked: Asked) -> usize {
        if !track.places.get(at).is_some_and(|place| expects(place, asked)) {
            return 0;
        }
        let before = self.recent.iter().enumerate().take(SURE - 1);
        let as_expected = before.take_while(|&(back, &recent)| {
            let place = at.checked_sub(back + 1).and_then(|at| track.places.get(at));
            place.is_some_and(|place| expects(place, recent))
        });
        1 + as_expected.count()
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::NOWHERE;
    use super::*;

    fn track(sizes: &[u64]) -> Track {
        let place = |&size_bytes| Place {
            size_bytes,
            stream: StreamId(0),
            room_bytes: size_bytes,
            offset: 0,
            other_offset: NOWHERE,
            freed_before: u32::MAX,
            any_size: false,
            group: u32::MAX,
        };
        Track { places: sizes.iter().map(place).collect(), ..Track::default() }
    }

    fn follow(asked: &[u64]) -> Vec<Found> {
        let track = track(&[10, 20, 30, 40, 50, 60, 70]);
        let mut follower = Follower::default();
        asked.iter().map(|&size| follower.next(&track, size, StreamId(0))).collect()
    }

    #[test]
    fn one_too_many_is_nowhere_and_the_others_keep_their_places() {
        use Found::{Exact, Guess, Nowhere};
        let found = follow(&[10, 20, 999, 30, 40, 50, 60]);
        assert_eq!(
            found,
            [Exact(0), Exact(1), Nowhere, Guess(2), Exact(3), Exact(4), Exact(5)],
            "two in a row, the straight way on, are enough"
        );
    }

    #[test]
    fn another_size_takes_its_position() {
        use Found::{Exact, Guess, Similar};
        let found = follow(&[10, 20, 31, 40, 50, 60]);
        assert_eq!(found, [Exact(0), Exact(1), Similar(2), Guess(3), Exact(4), Exact(5)]);
    }

    #[test]
    fn what_is_left_out_is_skipped() {
        use Found::{Exact, Guess};
        let found = follow(&[10, 20, 50, 60, 70]);
        assert_eq!(found[..3], [Exact(0), Exact(1), Guess(4)]);
        assert!(matches!(found[3], Guess(5) | Exact(5)));
        assert_eq!(found[4], Exact(6));
    }
}
