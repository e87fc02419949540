//! PyTorch's own statistics, with PyTorch's definitions (spec 8).
//!
//! Each array statistic has `current`, `peak`, `allocated` (sum of increases) and `freed` (sum of
//! decreases), for `all` pools and for the small and the large ones. Those that move at every alloc
//! and free are kept as few numbers as carry them all; the flat names are derived at the end.

/// Kind of pool: small or large. Also an index.
pub(super) type Kind = usize;
pub(super) const SMALL: Kind = 0;
pub(super) const LARGE: Kind = 1;

/// Values that move at every alloc and free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Row {
    allocation: u64,
    allocated_bytes: u64,
    /// Falls at completion, not at the free request.
    requested_bytes: u64,
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
        raise(&mut self.requested_bytes, now.requested_bytes);
    }
}

/// Number and bytes of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amount {
    count: u64,
    bytes: u64,
}

impl Amount {
    fn raise_to(&mut self, count: u64, bytes: u64) {
        self.count = self.count.max(count);
        self.bytes = self.bytes.max(bytes);
    }
}

/// The hot statistics of one kind of pool, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hot {
    now: Row,
    peak: Row,
    /// Sums of increases. Blocks become allocated and active together, so that one count and one
    /// sum of bytes serve both.
    total: Row,
    /// Freed by the program, not completed: active is allocated plus these.
    pending: Amount,
    /// Peak of active while anything was pending. At any other time active is what allocated is,
    /// and where allocated has its peak, active is no less; so the peak of active is the larger of
    /// both.
    active_peak: Amount,
}

impl Hot {
    #[inline]
    fn alloc(&mut self, size_bytes: u64, request_bytes: u64) {
        self.now.allocation += 1;
        self.now.allocated_bytes += size_bytes;
        self.now.requested_bytes += request_bytes;
        self.peak.raise_to(&self.now);
        if self.pending.count > 0 {
            self.active_peak.raise_to(
                self.now.allocation + self.pending.count,
                self.now.allocated_bytes + self.pending.bytes,
            );
        }
    }

    #[inline]
    fn free_requested(&mut self, size_bytes: u64) {
        self.now.allocation -= 1;
        self.now.allocated_bytes -= size_bytes;
    }

    fn defer(&mut self, size_bytes: u64) {
        self.pending.count += 1;
        self.pending.bytes += size_bytes;
    }

    fn end_defer(&mut self, size_bytes: u64) {
        self.pending.count -= 1;
        self.pending.bytes -= size_bytes;
    }
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
    kinds: [Hot; 2],
    /// Both kinds together, kept so that its peaks cost one comparison each.
    all: Hot,
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
    /// Bytes of blocks in the program's hands.
    #[inline]
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.all.now.allocated_bytes
    }

    /// Allocated bytes, and those of blocks that wait for another stream.
    #[inline]
    pub(super) fn active_bytes(&self) -> u64 {
        self.all.now.allocated_bytes + self.all.pending.bytes
    }

    /// A block of `size_bytes` was handed out for `request_bytes`.
    #[inline]
    pub(super) fn alloc(&mut self, kind: Kind, size_bytes: u64, request_bytes: u64) {
        let hot = &mut self.kinds[kind];
        hot.alloc(size_bytes, request_bytes);
        hot.total.allocation += 1;
        hot.total.allocated_bytes += size_bytes;
        hot.total.requested_bytes += request_bytes;
        self.all.alloc(size_bytes, request_bytes);
    }

    /// The program freed a block.
    #[inline]
    pub(super) fn free_requested(&mut self, kind: Kind, size_bytes: u64) {
        self.kinds[kind].free_requested(size_bytes);
        self.all.free_requested(size_bytes);
    }

    /// A freed block waits for another stream.
    pub(super) fn defer(&mut self, kind: Kind, size_bytes: u64) {
        self.kinds[kind].defer(size_bytes);
        self.all.defer(size_bytes);
    }

    /// A block waits no longer; its completion follows.
    pub(super) fn end_defer(&mut self, kind: Kind, size_bytes: u64) {
        self.kinds[kind].end_defer(size_bytes);
        self.all.end_defer(size_bytes);
    }

    /// A freed block became reusable.
    #[inline]
    pub(super) fn free_completed(&mut self, kind: Kind, request_bytes: u64) {
        self.kinds[kind].now.requested_bytes -= request_bytes;
        self.all.now.requested_bytes -= request_bytes;
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

    /// Pages were mapped (spec 5.5: no segment counts).
    pub(super) fn mapped(&mut self, kind: Kind, size_bytes: u64) {
        self.reserved_bytes.change(kind, size_bytes as i64);
        self.num_device_alloc += 1;
    }

    /// Pages were unmapped.
    pub(super) fn unmapped(&mut self, kind: Kind, size_bytes: u64) {
        self.reserved_bytes.change(kind, -(size_bytes as i64));
        self.num_device_free += 1;
    }

    /// Every statistic under PyTorch's flat name. `max_split_size` is −1 when unlimited.
    pub(super) fn flat(&self, max_split_size: i64) -> Vec<(String, i64)> {
        let mut flat = Vec::with_capacity(140);
        let all = Hot { total: self.all_total(), ..self.all };
        let pools =
            [("all", &all), ("small_pool", &self.kinds[SMALL]), ("large_pool", &self.kinds[LARGE])];
        for (pool, hot) in pools {
            let Hot { now, peak, total, pending, active_peak } = hot;
            let mut one = |name: &str, current: u64, peak: u64, allocated: u64| {
                let [current, peak, allocated] = [current, peak, allocated].map(|n| n as i64);
                push(&mut flat, &format!("{name}.{pool}"), &Stat { current, peak, allocated });
            };
            let (count, bytes) = (now.allocation, now.allocated_bytes);
            let active_count_peak = peak.allocation.max(active_peak.count);
            let active_bytes_peak = peak.allocated_bytes.max(active_peak.bytes);
            one("allocation", count, peak.allocation, total.allocation);
            one("allocated_bytes", bytes, peak.allocated_bytes, total.allocated_bytes);
            one("active", count + pending.count, active_count_peak, total.allocation);
            let active_bytes = bytes + pending.bytes;
            one("active_bytes", active_bytes, active_bytes_peak, total.allocated_bytes);
            let requested_bytes = now.requested_bytes;
            one("requested_bytes", requested_bytes, peak.requested_bytes, total.requested_bytes);
        }
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

impl Stats {
    fn all_total(&self) -> Row {
        let [small, large] = [&self.kinds[SMALL].total, &self.kinds[LARGE].total];
        Row {
            allocation: small.allocation + large.allocation,
            allocated_bytes: small.allocated_bytes + large.allocated_bytes,
            requested_bytes: small.requested_bytes + large.requested_bytes,
        }
    }
}

fn push(flat: &mut Vec<(String, i64)>, name: &str, stat: &Stat) {
    flat.push((format!("{name}.current"), stat.current));
    flat.push((format!("{name}.peak"), stat.peak));
    flat.push((format!("{name}.allocated"), stat.allocated));
    flat.push((format!("{name}.freed"), stat.freed()));
}
