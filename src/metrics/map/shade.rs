//! How much of each field of the map is covered by what is not kept exactly.
//!
//! Each field is a row of bytes of one lane × a column of events. What is stored is where covered
//! bytes begin and end, not what is covered, so that a long life costs no more than a short one:
//!
//! ```text
//!   events      │ column 0 │ column 1 │ column 2 │ column 3 │
//!   life                ▕██████████████████▏
//!   stored        +¼         +¾         −½         −½          of its height; sums from the left
//!   covered        ¼          1          ½          0          are the mean cover of each column
//! ```

use foldhash::{HashMap, HashMapExt};

use super::{Life, Spot};

/// Columns of the raster.
pub(super) const COLUMNS: u64 = 512;
/// Rows of the finished raster.
pub(super) const ROWS: u64 = 384;
/// Most fields that hold something before rows are joined in pairs.
const FIELDS_MAX: usize = 200_000;
/// Most rows that one life covers before rows are joined: far more than [`ROWS`], so that joining
/// them loses nothing that the raster would show.
const ROWS_OF_LIFE_MAX: u64 = 4096;
/// Height of a row in bytes to begin with.
const ROW_BYTES_MIN: u64 = 64 << 10;

/// A finished raster: how much of each field is covered, 0 to 255, row by row from the foot of the
/// map, each from the first event on. Empty if nothing is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shade {
    /// Fields in a row.
    pub columns: u64,
    /// Rows.
    pub rows: u64,
    /// The fields.
    pub cover: Vec<u8>,
}

/// Fields before the map's height is known.
#[derive(Clone, Debug)]
pub(super) struct Cells {
    events: u64,
    row_bytes: u64,
    /// Bytes × events that begin or end to be covered: by lane, row and column.
    steps: HashMap<(u32, u64, u64), i128>,
}

impl Cells {
    pub(super) fn new(events: u64) -> Cells {
        Cells { events: events.max(1), row_bytes: ROW_BYTES_MIN, steps: HashMap::new() }
    }

    /// Adds a life.
    pub(super) fn add(&mut self, life: &Life) {
        let Spot { lane, offset_bytes } = life.spot;
        let end = offset_bytes.saturating_add(life.size_bytes);
        while (end - offset_bytes) / self.row_bytes > ROWS_OF_LIFE_MAX {
            self.join_rows();
        }
        let mut at = offset_bytes;
        while at < end {
            let row = at / self.row_bytes;
            let row_end = (row + 1).saturating_mul(self.row_bytes).min(end);
            let bytes = i128::from(row_end - at);
            self.step(lane, row, life.from_event, bytes);
            self.step(lane, row, life.to_event, -bytes);
            at = row_end;
        }
        while self.steps.len() > FIELDS_MAX {
            self.join_rows();
        }
    }

    /// `bytes` more are covered from `event` on. Counted in parts of an event, [`COLUMNS`] of them,
    /// so that columns have whole widths.
    fn step(&mut self, lane: u32, row: u64, event: u64, bytes: i128) {
        let at = u128::from(event.min(self.events)) * u128::from(COLUMNS);
        let width = u128::from(self.events);
        let column = (at / width) as u64;
        let late = (at % width) as i128;
        let width = width as i128;
        for (column, parts) in [(column, width - late), (column + 1, late)] {
            if column < COLUMNS && parts > 0 {
                *self.steps.entry((lane, row, column)).or_insert(0) += bytes * parts;
            }
        }
    }

    fn join_rows(&mut self) {
        self.row_bytes = self.row_bytes.saturating_mul(2);
        let mut joined = HashMap::with_capacity(self.steps.len());
        // The order of the map reaches nothing: sums are exact.
        #[allow(clippy::iter_over_hash_type)]
        for (&(lane, row, column), &area) in &self.steps {
            *joined.entry((lane, row / 2, column)).or_insert(0) += area;
        }
        self.steps = joined;
    }

    /// The raster of a map of `height_bytes`, where `position` says where a spot lies in it.
    pub(super) fn raster(&self, height_bytes: u64, position: impl Fn(Spot) -> u64) -> Shade {
        if self.steps.is_empty() || height_bytes == 0 {
            return Shade::default();
        }
        let mut steps: Vec<((u32, u64, u64), i128)> =
            self.steps.iter().map(|(&field, &area)| (field, area)).collect();
        steps.sort_unstable_by_key(|(field, _)| *field);
        // Area covered in each field of the raster, in bytes × parts of an event.
        let mut areas = vec![0u128; (ROWS * COLUMNS) as usize];
        for row in steps.chunk_by(|(a, _), (b, _)| (a.0, a.1) == (b.0, b.1)) {
            let (lane, number, _) = row[0].0;
            let from = position(Spot { lane, offset_bytes: number * self.row_bytes });
            let to = position(Spot { lane, offset_bytes: (number + 1) * self.row_bytes });
            let shares = shares(from.min(height_bytes - 1), to.max(from + 1), height_bytes);
            let mut covered = 0i128;
            let mut next = row.iter().peekable();
            for column in 0..COLUMNS {
                while let Some((_, area)) = next.next_if(|(field, _)| field.2 == column) {
                    covered += area;
                }
                let area = covered.max(0) as u128;
                for &(row, share, whole) in &shares {
                    areas[(row * COLUMNS + column) as usize] +=
                        area * u128::from(share) / u128::from(whole);
                }
            }
        }
        let field_bytes = u128::from(height_bytes).div_ceil(u128::from(ROWS)).max(1);
        let full = field_bytes * u128::from(self.events);
        // What covers anything at all shows.
        let cover = |&area: &u128| match area {
            0 => 0,
            _ => (area * 255 / full).clamp(1, 255) as u8,
        };
        Shade { columns: COLUMNS, rows: ROWS, cover: areas.iter().map(cover).collect() }
    }
}

/// How the bytes `from..to` fall on the rows of a raster: row, bytes in it, bytes in all.
fn shares(from: u64, to: u64, height_bytes: u64) -> Vec<(u64, u64, u64)> {
    let row_of =
        |bytes: u64| (u128::from(bytes) * u128::from(ROWS) / u128::from(height_bytes)) as u64;
    let end_of = |row: u64| {
        (u128::from(row + 1) * u128::from(height_bytes)).div_ceil(u128::from(ROWS)) as u64
    };
    let whole = to - from;
    let mut shares = Vec::new();
    let mut at = from;
    while at < to {
        let row = row_of(at).min(ROWS - 1);
        let end = if row == ROWS - 1 { to } else { end_of(row).clamp(at + 1, to) };
        shares.push((row, end - at, whole));
        at = end;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::BlockId;

    fn life(from_event: u64, to_event: u64, offset_bytes: u64, size_bytes: u64) -> Life {
        let spot = Spot { lane: 0, offset_bytes };
        Life { block: BlockId(0), from_event, freed_event: to_event, to_event, spot, size_bytes }
    }

    #[test]
    fn half_covered_fields_are_half_shaded() {
        // 1024 events: two a column. 384 rows of 128 KiB.
        let height_bytes = ROWS * 2 * ROW_BYTES_MIN;
        let mut cells = Cells::new(2 * COLUMNS);
        cells.add(&life(4, 9, 0, ROW_BYTES_MIN));
        let shade = cells.raster(height_bytes, |spot| spot.offset_bytes);
        let first = &shade.cover[..COLUMNS as usize];
        // Half of the row's height; the last column also only half of its width.
        assert_eq!(first[..6], [0, 0, 127, 127, 63, 0]);
        assert!(shade.cover[COLUMNS as usize..].iter().all(|&cover| cover == 0));
    }

    /// In rows of 64 KiB, 64 TiB are 2^30 of them.
    #[test]
    fn large_lives_are_as_quick_as_small_ones() {
        let size_bytes = 64 << 40;
        let mut cells = Cells::new(1000);
        for from in 0..500 {
            cells.add(&life(from, from + 500, 0, size_bytes));
        }
        assert!(cells.steps.len() <= FIELDS_MAX);
        let shade = cells.raster(size_bytes, |spot| spot.offset_bytes);
        // Of 1000 events, 500 lives cover the middle; all rows are alike.
        assert!(shade.cover.chunks(COLUMNS as usize).all(|row| row == &shade.cover[..512]));
        assert_eq!(shade.cover[COLUMNS as usize / 2], 255);
    }

    #[test]
    fn joined_rows_cover_the_same() {
        let height_bytes = 1 << 30;
        let mut cells = Cells::new(1000);
        for n in 0..300_000u64 {
            cells.add(&life(n % 900, n % 900 + 50, (n * 7919 % 16_384) << 16, 1 << 15));
        }
        assert!(cells.row_bytes > ROW_BYTES_MIN, "the fields did not fit: {}", cells.row_bytes);
        let total: i128 = cells.steps.values().sum();
        assert_eq!(total, 0, "all that begins ends");
        let shade = cells.raster(height_bytes, |spot| spot.offset_bytes);
        assert!(shade.cover.iter().filter(|&&cover| cover > 0).count() > 100_000);
    }
}
