//! PyTorch's statistics under PyTorch's flat names (8).

use std::collections::BTreeMap;

/// The kind of pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Small = 0,
    Large = 1,
}

/// A statistic that is kept for each kind of pool and for both together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stat {
    Allocation,
    AllocatedBytes,
    Active,
    ActiveBytes,
    RequestedBytes,
    Segment,
    ReservedBytes,
    InactiveSplit,
    InactiveSplitBytes,
}

impl Stat {
    const ALL: [(Stat, &str); 9] = [
        (Stat::Allocation, "allocation"),
        (Stat::AllocatedBytes, "allocated_bytes"),
        (Stat::Active, "active"),
        (Stat::ActiveBytes, "active_bytes"),
        (Stat::RequestedBytes, "requested_bytes"),
        (Stat::Segment, "segment"),
        (Stat::ReservedBytes, "reserved_bytes"),
        (Stat::InactiveSplit, "inactive_split"),
        (Stat::InactiveSplitBytes, "inactive_split_bytes"),
    ];
}

/// One number with its history.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gauge {
    current: i64,
    peak: i64,
    allocated: i64,
    freed: i64,
}

impl Gauge {
    pub(super) fn change(&mut self, by: i64) {
        self.current += by;
        self.peak = self.peak.max(self.current);
        if by > 0 {
            self.allocated += by;
        } else {
            self.freed -= by;
        }
        assert!(self.current >= 0, "a statistic fell below 0");
    }

    fn flat(&self, name: &str, out: &mut Vec<(String, i64)>) {
        out.push((format!("{name}.current"), self.current));
        out.push((format!("{name}.peak"), self.peak));
        out.push((format!("{name}.allocated"), self.allocated));
        out.push((format!("{name}.freed"), self.freed));
    }
}

/// All statistics.
#[derive(Clone, Debug, Default)]
pub(super) struct Statistics {
    /// Small pool, large pool, all.
    gauges: BTreeMap<Stat, [Gauge; 3]>,
    pub(super) oversize_allocations: Gauge,
    pub(super) oversize_segments: Gauge,
    pub(super) num_alloc_retries: i64,
    pub(super) num_ooms: i64,
    pub(super) num_sync_all_streams: i64,
    pub(super) num_device_alloc: i64,
    pub(super) num_device_free: i64,
}

impl Statistics {
    pub(super) fn change(&mut self, stat: Stat, kind: Kind, by: i64) {
        let gauges = self.gauges.entry(stat).or_default();
        gauges[kind as usize].change(by);
        gauges[2].change(by);
    }

    pub(super) fn flat(&self, max_split_size: i64) -> Vec<(String, i64)> {
        let mut out = Vec::new();
        for (stat, name) in Stat::ALL {
            let gauges = self.gauges.get(&stat).copied().unwrap_or_default();
            for (gauge, pool) in gauges.iter().zip(["small_pool", "large_pool", "all"]) {
                gauge.flat(&format!("{name}.{pool}"), &mut out);
            }
        }
        self.oversize_allocations.flat("oversize_allocations", &mut out);
        self.oversize_segments.flat("oversize_segments", &mut out);
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("max_split_size", max_split_size),
        ] {
            out.push((name.to_owned(), value));
        }
        out
    }
}
