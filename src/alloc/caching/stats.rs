//! PyTorch's own statistics, with PyTorch's definitions (spec 8).
//!
//! Each array statistic has `current`, `peak`, `allocated` (sum of increases) and `freed` (sum of
//! decreases), for `all` pools and for the small and the large ones. Hot statistics move together, so
//! they are kept as rows: what the flat names need is derived at the end.

/// Kind of pool: small or large. Also an index.
pub(super) type Kind = usize;
pub(super) const SMALL: Kind = 0;
pub(super) const LARGE: Kind = 1;

/// Values that move at every alloc and free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) allocation: u64,
    pub(super) allocated_bytes: u64,
    pub(super) active: u64,
    pub(super) active_bytes: u64,
    pub(super) requested_bytes: u64,
}

impl Row {
    #[inline]
    fn raise_to(&mut self, now: &Row) {
        // Branches, not maxima: peaks rise rarely, so these are predicted and nothing is written.
        let raise = |peak: &mut u64, now: u64| {
            if now > *peak {
                *peak = now;
            }
        };
        raise(&mut self.allocation, now.allocation);
        raise(&mut self.allocated_bytes, now.allocated_bytes);
        raise(&mut self.active, now.active);
        raise(&mut self.active_bytes, now.active_bytes);
        raise(&mut self.requested_bytes, now.requested_bytes);
    }
}

/// Sums of increases. Blocks become allocated and active together, so one count and one sum of bytes
/// serve both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Totals {
    count: u64,
    bytes: u64,
    requested_bytes: u64,
}

/// A statistic with all its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) current: i64,
    pub(super) peak: i64,
    pub(super) allocated: i64,
}

impl Stat {
    /// One change: an increase or a decrease.
    #[inline]
    fn change(&mut self, by: i64) {
        self.current += by;
        if by > 0 {
            self.allocated += by;
            self.peak = self.peak.max(self.current);
        }
    }

    fn freed(&self) -> i64 {
        self.allocated - self.current
    }
}

/// A statistic for small, large and all pools. Those of all pools are sums, but for the peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolStat {
    kinds: [Stat; 2],
    all_peak: i64,
}

impl PoolStat {
    #[inline]
    pub(super) fn change(&mut self, kind: Kind, by: i64) {
        self.kinds[kind].change(by);
        if by > 0 {
            let current = self.kinds[SMALL].current + self.kinds[LARGE].current;
            self.all_peak = self.all_peak.max(current);
        }
    }

    fn all(&self) -> Stat {
        let [small, large] = self.kinds;
        Stat {
            current: small.current + large.current,
            peak: self.all_peak,
            allocated: small.allocated + large.allocated,
        }
    }
}

/// All statistics of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stats {
    now: [Row; 2],
    /// Sum of both kinds, kept so that its peaks cost one comparison each.
    pub(super) all_now: Row,
    peak: [Row; 2],
    all_peak: Row,
    totals: [Totals; 2],
    pub(super) segment: PoolStat,
    pub(super) reserved_bytes: PoolStat,
    pub(super) inactive_split: PoolStat,
    pub(super) inactive_split_bytes: PoolStat,
    pub(super) oversize_allocations: StatOnly,
    pub(super) oversize_segments: StatOnly,
    pub(super) num_alloc_retries: u64,
    pub(super) num_ooms: u64,
    pub(super) num_sync_all_streams: u64,
    pub(super) num_device_alloc: u64,
    pub(super) num_device_free: u64,
}

/// A statistic without pool dimension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StatOnly(Stat);

impl StatOnly {
    pub(super) fn change(&mut self, by: i64) {
        self.0.change(by);
    }
}

impl Stats {
    /// A block of `size_bytes` was handed out for `request_bytes`.
    #[inline]
    pub(super) fn alloc(&mut self, kind: Kind, size_bytes: u64, request_bytes: u64) {
        for row in [&mut self.now[kind], &mut self.all_now] {
            row.allocation += 1;
            row.allocated_bytes += size_bytes;
            row.active += 1;
            row.active_bytes += size_bytes;
            row.requested_bytes += request_bytes;
        }
        let totals = &mut self.totals[kind];
        totals.count += 1;
        totals.bytes += size_bytes;
        totals.requested_bytes += request_bytes;
        self.peak[kind].raise_to(&self.now[kind]);
        self.all_peak.raise_to(&self.all_now);
    }

    /// The program freed a block.
    #[inline]
    pub(super) fn free_requested(&mut self, kind: Kind, size_bytes: u64) {
        for row in [&mut self.now[kind], &mut self.all_now] {
            row.allocation -= 1;
            row.allocated_bytes -= size_bytes;
        }
    }

    /// A freed block became reusable.
    #[inline]
    pub(super) fn free_completed(&mut self, kind: Kind, size_bytes: u64, request_bytes: u64) {
        for row in [&mut self.now[kind], &mut self.all_now] {
            row.active -= 1;
            row.active_bytes -= size_bytes;
            row.requested_bytes -= request_bytes;
        }
    }

    /// Device memory obtained (`by` > 0) or returned.
    pub(super) fn segment(&mut self, kind: Kind, by: i64, size_bytes: u64) {
        self.segment.change(kind, by);
        self.reserved_bytes.change(kind, by * size_bytes as i64);
        if by > 0 {
            self.num_device_alloc += 1;
        } else {
            self.num_device_free += 1;
        }
    }

    /// Every statistic under PyTorch's flat name. `max_split_size` is −1 when unlimited.
    pub(super) fn flat(&self, max_split_size: i64) -> Vec<(String, i64)> {
        let mut flat = Vec::with_capacity(140);
        let counts = |at: usize| (self.totals[at].count, self.totals[at].bytes);
        let requested = |at: usize| self.totals[at].requested_bytes;
        let mut hot = |name: &str, of: fn(&Row) -> u64, total: &dyn Fn(usize) -> u64| {
            let rows = [
                ("all", &self.all_now, &self.all_peak, total(SMALL) + total(LARGE)),
                ("small_pool", &self.now[SMALL], &self.peak[SMALL], total(SMALL)),
                ("large_pool", &self.now[LARGE], &self.peak[LARGE], total(LARGE)),
            ];
            for (pool, now, peak, allocated) in rows {
                let stat = Stat {
                    current: of(now) as i64,
                    peak: of(peak) as i64,
                    allocated: allocated as i64,
                };
                push(&mut flat, &format!("{name}.{pool}"), &stat);
            }
        };
        hot("allocation", |row| row.allocation, &|at| counts(at).0);
        hot("allocated_bytes", |row| row.allocated_bytes, &|at| counts(at).1);
        hot("active", |row| row.active, &|at| counts(at).0);
        hot("active_bytes", |row| row.active_bytes, &|at| counts(at).1);
        hot("requested_bytes", |row| row.requested_bytes, &requested);
        let pools = [
            ("segment", &self.segment),
            ("reserved_bytes", &self.reserved_bytes),
            ("inactive_split", &self.inactive_split),
            ("inactive_split_bytes", &self.inactive_split_bytes),
        ];
        for (name, stat) in pools {
            push(&mut flat, &format!("{name}.all"), &stat.all());
            push(&mut flat, &format!("{name}.small_pool"), &stat.kinds[SMALL]);
            push(&mut flat, &format!("{name}.large_pool"), &stat.kinds[LARGE]);
        }
        push(&mut flat, "oversize_allocations", &self.oversize_allocations.0);
        push(&mut flat, "oversize_segments", &self.oversize_segments.0);
        let counters = [
            ("num_alloc_retries", self.num_alloc_retries as i64),
            ("num_ooms", self.num_ooms as i64),
            ("num_sync_all_streams", self.num_sync_all_streams as i64),
            ("num_device_alloc", self.num_device_alloc as i64),
            ("num_device_free", self.num_device_free as i64),
            ("max_split_size", max_split_size),
        ];
        flat.extend(counters.map(|(name, value)| (name.to_owned(), value)));
        flat
    }
}

fn push(flat: &mut Vec<(String, i64)>, name: &str, stat: &Stat) {
    flat.push((format!("{name}.current"), stat.current));
    flat.push((format!("{name}.peak"), stat.peak));
    flat.push((format!("{name}.allocated"), stat.allocated));
    flat.push((format!("{name}.freed"), stat.freed()));
}
