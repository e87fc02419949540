//! Simulated time: a clock of the host and one of the GPU (spec patrickstar 5.11).
//!
//! ```text
//!   operation:      GPU  = max(GPU, host) + duration
//!   copy:           start = max(host, GPU); host = GPU = end            the default
//!   copy, async:    start = max(host, last use of the chunk); host = end   with_async_move
//! ```
//!
//! The host blocks until a copy ends in either case; what async saves is that operations already
//! launched go on meanwhile.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::trace::Direction;

/// What a copy costs by its size: points of (bytes, microseconds), bytes rising. Linear between the
/// points, flat below the first, straight on above the last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Line(pub Vec<(f64, f64)>);

impl Line {
    /// A start-up time and a rate.
    pub fn of_rate(latency_us: f64, bytes_per_s: f64) -> Line {
        let gib_us = latency_us + (1u64 << 30) as f64 / bytes_per_s * 1e6;
        Line(vec![(0.0, latency_us), ((1u64 << 30) as f64, gib_us)])
    }

    /// Nanoseconds for so many bytes; 0 without points.
    pub fn cost_ns(&self, size_bytes: u64) -> u64 {
        let size = size_bytes as f64;
        let points = &self.0;
        let Some(&(first, first_us)) = points.first() else { return 0 };
        let next = points.iter().position(|&(bytes, _)| bytes > size).unwrap_or(points.len());
        if points.len() == 1 || size <= first {
            return nanos(first_us);
        }
        let right = next.clamp(1, points.len() - 1);
        let ((x0, y0), (x1, y1)) = (points[right - 1], points[right]);
        // Never falling above the last point, whatever noise the last two show.
        let slope = if next == points.len() {
            ((y1 - y0) / (x1 - x0)).max(0.0)
        } else {
            (y1 - y0) / (x1 - x0)
        };
        let (x, y) = if next == points.len() { (x1, y1) } else { (x0, y0) };
        nanos(y + slope * (size - x))
    }

    fn is_usable(&self) -> bool {
        let numbers = self
            .0
            .iter()
            .all(|&(bytes, us)| bytes.is_finite() && bytes >= 0.0 && us.is_finite() && us >= 0.0);
        numbers && self.0.windows(2).all(|pair| pair[0].0 < pair[1].0)
    }
}

fn nanos(us: f64) -> u64 {
    (us * 1e3).round().max(0.0) as u64
}

/// Why costs cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkCostsError {
    /// Not the JSON of link costs.
    #[error("not link costs: {0}")]
    Json(#[from] serde_json::Error),
    /// No such costs ship.
    #[error("no link costs {name:?} ship with fraglab; there are: {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A number is negative, infinite, or a rate of 0; or sizes do not rise.
    #[error("link costs: {field} needs finite numbers, rates above 0, and rising sizes")]
    Number {
        /// The field.
        field: &'static str,
    },
}

/// What the link between host and GPU costs, and work on both sides of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkCosts {
    /// Where the numbers come from, and what each counts.
    #[serde(default)]
    pub source: String,
    /// Copies from page-locked memory to the GPU.
    pub pinned_h2d: Line,
    /// Copies from the GPU to page-locked memory.
    pub pinned_d2h: Line,
    /// Copies from pageable memory to the GPU.
    pub pageable_h2d: Line,
    /// Copies from the GPU to pageable memory.
    pub pageable_d2h: Line,
    /// Bytes a second of a copy on the GPU; each is counted once, though it is read and written.
    pub device_copy_bytes_per_s: f64,
    /// Bytes a second of filling memory on the GPU.
    pub memset_bytes_per_s: f64,
    /// Bytes a second that an elementwise operation on the GPU reads and writes together.
    pub gpu_elementwise_bytes_per_s: f64,
    /// Bytes a second that a rank's cores read and write on the host together.
    pub host_bytes_per_s: f64,
    /// Nanoseconds of ADAM on the host for a parameter: about 26 bytes of traffic (spec patrickstar
    /// 9).
    pub host_adam_ns_per_parameter: f64,
    /// An allocation on the GPU, as `cudaMalloc`.
    pub gpu_malloc_us: Line,
    /// Giving it back.
    #[serde(default)]
    pub gpu_free_us: Line,
    /// An allocation of page-locked memory.
    pub pinned_alloc_us: Line,
    /// Bus bandwidth of collectives, bytes a second.
    pub collective_bytes_per_s: f64,
    /// Start-up time of a collective, microseconds.
    pub collective_latency_us: f64,
}

/// Start-up time of a copy where none was measured.
const LINK_LATENCY_US: f64 = 10.0;
/// What of the link's rate pageable memory reaches, where it was not measured.
const PAGEABLE_SHARE: f64 = 0.25;

impl Default for LinkCosts {
    /// Round numbers, assumed and not measured: a link of 25 GB/s (PCIe 4.0 x16), a quarter of it
    /// pageable; 2 TB/s of the GPU's memory (half of it as a copy), 100 GB/s of the host's; NVLink
    /// at 200 GB/s. [`LinkCosts::shipped`] has measured ones.
    fn default() -> Self {
        LinkCosts {
            source: "assumed: PCIe 4.0 x16, HBM2e, NVLink 3".to_owned(),
            pinned_h2d: Line::of_rate(10.0, 25e9),
            pinned_d2h: Line::of_rate(10.0, 25e9),
            pageable_h2d: Line::of_rate(10.0, 6.25e9),
            pageable_d2h: Line::of_rate(10.0, 6.25e9),
            device_copy_bytes_per_s: 1e12,
            memset_bytes_per_s: 2e12,
            gpu_elementwise_bytes_per_s: 2e12,
            host_bytes_per_s: 100e9,
            host_adam_ns_per_parameter: 0.26,
            gpu_malloc_us: Line::of_rate(100.0, 1e12),
            gpu_free_us: Line::of_rate(100.0, 1e12),
            pinned_alloc_us: Line::of_rate(100.0, 5e9),
            collective_bytes_per_s: 200e9,
            collective_latency_us: 20.0,
        }
    }
}

/// Costs that ship: name and text.
const SHIPPED: [(&str, &str); 1] =
    [("link-h200", include_str!("../device/profiles/link-h200.json"))];

impl LinkCosts {
    /// Costs that ship with fraglab, measured on a machine.
    ///
    /// # Errors
    /// [`LinkCostsError::Unknown`] names those that exist.
    pub fn shipped(name: &str) -> Result<LinkCosts, LinkCostsError> {
        match SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
            Some((_, text)) => LinkCosts::from_json(text),
            None => Err(LinkCostsError::Unknown {
                name: name.to_owned(),
                known: SHIPPED.map(|(shipped, _)| shipped).join(", "),
            }),
        }
    }

    /// Sets the rate of copies between host and GPU, in bytes a second both ways, and a quarter of
    /// it for pageable memory.
    pub fn set_link(&mut self, bytes_per_s: f64) {
        let line = |share: f64| Line::of_rate(LINK_LATENCY_US, share * bytes_per_s);
        (self.pinned_h2d, self.pinned_d2h) = (line(1.0), line(1.0));
        (self.pageable_h2d, self.pageable_d2h) = (line(PAGEABLE_SHARE), line(PAGEABLE_SHARE));
    }

    /// Reads costs from their JSON text. Keys that are not fields here are left alone.
    ///
    /// # Errors
    /// If it is not their JSON, or a number makes no sense.
    pub fn from_json(text: &str) -> Result<LinkCosts, LinkCostsError> {
        let costs: LinkCosts = serde_json::from_str(text)?;
        let lines = [
            ("pinned_h2d", &costs.pinned_h2d),
            ("pinned_d2h", &costs.pinned_d2h),
            ("pageable_h2d", &costs.pageable_h2d),
            ("pageable_d2h", &costs.pageable_d2h),
            ("gpu_malloc_us", &costs.gpu_malloc_us),
            ("gpu_free_us", &costs.gpu_free_us),
            ("pinned_alloc_us", &costs.pinned_alloc_us),
        ];
        let rates = [
            ("device_copy_bytes_per_s", costs.device_copy_bytes_per_s),
            ("memset_bytes_per_s", costs.memset_bytes_per_s),
            ("gpu_elementwise_bytes_per_s", costs.gpu_elementwise_bytes_per_s),
            ("host_bytes_per_s", costs.host_bytes_per_s),
            ("collective_bytes_per_s", costs.collective_bytes_per_s),
        ];
        let times = [
            ("host_adam_ns_per_parameter", costs.host_adam_ns_per_parameter),
            ("collective_latency_us", costs.collective_latency_us),
        ];
        let bad_line = lines.iter().find(|(_, line)| !line.is_usable()).map(|&(field, _)| field);
        let bad_rate = rates.iter().find(|&&(_, rate)| !(rate.is_finite() && rate > 0.0));
        let bad_time = times.iter().find(|&&(_, time)| !(time.is_finite() && time >= 0.0));
        let bad = bad_line.or(bad_rate.or(bad_time).map(|&(field, _)| field));
        bad.map_or(Ok(costs), |field| Err(LinkCostsError::Number { field }))
    }
}

/// Where the time of a step went, in nanoseconds. The parts overlap where the clocks do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepTimes {
    /// The program's own operations.
    pub compute_ns: u64,
    /// Chunks and the program's transfers over the link.
    pub transfer_ns: u64,
    /// ADAM, with its copies over the link.
    pub adam_ns: u64,
    /// Collectives.
    pub collective_ns: u64,
    /// Allocations of payloads and filling of cached ones.
    pub allocation_ns: u64,
    /// From the start of the step to its end.
    pub step_ns: u64,
}

/// Both clocks.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    costs: LinkCosts,
    overlaps: bool,
    host_ns: u64,
    gpu_ns: u64,
    step_started_ns: u64,
    /// Page-locked memory that was freed, by size.
    idle_pinned: BTreeMap<u64, u64>,
    pub(super) times: StepTimes,
}

/// Bytes that a pass of ADAM on the GPU moves for an element: two fp32 numbers read, one written.
const ADAM_PASS_BYTES: f64 = 12.0;
/// Passes of ADAM on the GPU, operator by operator (spec patrickstar 9).
const ADAM_PASSES: f64 = 10.0;

impl Clock {
    /// `overlaps`: copies wait for their chunk only.
    pub(super) fn new(costs: LinkCosts, overlaps: bool) -> Clock {
        Clock {
            costs,
            overlaps,
            host_ns: 0,
            gpu_ns: 0,
            step_started_ns: 0,
            idle_pinned: BTreeMap::new(),
            times: StepTimes::default(),
        }
    }

    /// The later of the clocks.
    pub(super) fn now_ns(&self) -> u64 {
        self.host_ns.max(self.gpu_ns)
    }

    /// The GPU's clock: when what was launched so far ends.
    pub(super) fn launched_ns(&self) -> u64 {
        self.gpu_ns
    }

    /// Ends a step: its times.
    pub(super) fn end_step(&mut self) -> StepTimes {
        let mut times = std::mem::take(&mut self.times);
        times.step_ns = self.now_ns() - self.step_started_ns;
        self.step_started_ns = self.now_ns();
        times
    }

    /// Operations of the program.
    pub(super) fn compute(&mut self, duration_ns: u64) {
        self.launch(duration_ns);
        self.times.compute_ns = self.times.compute_ns.saturating_add(duration_ns);
    }

    /// The host waits until all that was launched has ended.
    pub(super) fn synchronize(&mut self) {
        self.host_ns = self.now_ns();
    }

    /// A chunk moves; its last operation ends at `last_use_ns`.
    pub(super) fn move_chunk(&mut self, bytes: u64, direction: Direction, last_use_ns: u64) {
        let cost_ns = self.pinned_ns(bytes, direction);
        if self.overlaps {
            self.host_ns = self.host_ns.max(last_use_ns).saturating_add(cost_ns);
        } else {
            self.wait(cost_ns);
        }
        self.times.transfer_ns = self.times.transfer_ns.saturating_add(cost_ns);
    }

    /// A transfer of the program's, from or to pageable memory; says how long it takes.
    pub(super) fn transfer(&mut self, bytes: u64, direction: Direction) -> u64 {
        let line = match direction {
            Direction::HostToDevice => &self.costs.pageable_h2d,
            Direction::DeviceToHost => &self.costs.pageable_d2h,
        };
        let cost_ns = line.cost_ns(bytes);
        self.wait(cost_ns);
        self.times.transfer_ns = self.times.transfer_ns.saturating_add(cost_ns);
        cost_ns
    }

    /// ADAM's copy over the link.
    pub(super) fn adam_copy(&mut self, bytes: u64, direction: Direction) {
        let cost_ns = self.pinned_ns(bytes, direction);
        self.wait(cost_ns);
        self.times.adam_ns = self.times.adam_ns.saturating_add(cost_ns);
    }

    /// ADAM's copy on one side of the link: `bytes` are read and written.
    pub(super) fn adam_local_copy(&mut self, bytes: u64, on_gpu: bool) {
        let cost_ns = if on_gpu {
            seconds_ns(bytes as f64 / self.costs.device_copy_bytes_per_s)
        } else {
            seconds_ns(2.0 * bytes as f64 / self.costs.host_bytes_per_s)
        };
        if on_gpu {
            self.launch(cost_ns);
        } else {
            self.wait(cost_ns);
        }
        self.times.adam_ns = self.times.adam_ns.saturating_add(cost_ns);
    }

    /// ADAM of so many elements.
    pub(super) fn adam(&mut self, elements: u64, on_gpu: bool) {
        let elements = elements as f64;
        let cost_ns = if on_gpu {
            let bytes = elements * ADAM_PASS_BYTES * ADAM_PASSES;
            seconds_ns(bytes / self.costs.gpu_elementwise_bytes_per_s)
        } else {
            (elements * self.costs.host_adam_ns_per_parameter) as u64
        };
        if on_gpu {
            self.launch(cost_ns);
        } else {
            self.wait(cost_ns);
        }
        self.times.adam_ns = self.times.adam_ns.saturating_add(cost_ns);
    }

    /// A collective over `ranks` that hands each rank `bytes` (spec patrickstar 4.4): of a group,
    /// all but the rank's own part crosses the bus; of a broadcast or reduce, all of it.
    pub(super) fn collective(&mut self, bytes: u64, of_group: bool, ranks: u32) {
        let ranks = f64::from(ranks.max(1));
        let share = if of_group { (ranks - 1.0) / ranks } else { 1.0 };
        let bus_ns = seconds_ns(bytes as f64 * share / self.costs.collective_bytes_per_s);
        let cost_ns = nanos(self.costs.collective_latency_us).saturating_add(bus_ns);
        self.wait(cost_ns);
        self.times.collective_ns = self.times.collective_ns.saturating_add(cost_ns);
    }

    /// A payload is allocated. Page-locked memory of the size that was freed before is had for
    /// nothing: PyTorch keeps it.
    pub(super) fn allocate(&mut self, bytes: u64, on_gpu: bool) {
        if on_gpu {
            return self.allocation(self.costs.gpu_malloc_us.cost_ns(bytes));
        }
        match self.idle_pinned.get_mut(&bytes).filter(|idle| **idle > 0) {
            Some(idle) => *idle -= 1,
            None => self.allocation(self.costs.pinned_alloc_us.cost_ns(bytes)),
        }
    }

    /// A payload is freed.
    pub(super) fn release(&mut self, bytes: u64, on_gpu: bool) {
        if on_gpu {
            self.allocation(self.costs.gpu_free_us.cost_ns(bytes));
        } else {
            *self.idle_pinned.entry(bytes).or_default() += 1;
        }
    }

    fn allocation(&mut self, cost_ns: u64) {
        self.host_ns = self.host_ns.saturating_add(cost_ns);
        self.times.allocation_ns = self.times.allocation_ns.saturating_add(cost_ns);
    }

    /// A payload is filled with zeros before it is kept.
    pub(super) fn fill(&mut self, bytes: u64, on_gpu: bool) {
        let rate = if on_gpu { self.costs.memset_bytes_per_s } else { self.costs.host_bytes_per_s };
        let cost_ns = seconds_ns(bytes as f64 / rate);
        if on_gpu {
            self.launch(cost_ns);
        } else {
            self.host_ns = self.host_ns.saturating_add(cost_ns);
        }
        self.times.allocation_ns = self.times.allocation_ns.saturating_add(cost_ns);
    }

    fn pinned_ns(&self, bytes: u64, direction: Direction) -> u64 {
        match direction {
            Direction::HostToDevice => self.costs.pinned_h2d.cost_ns(bytes),
            Direction::DeviceToHost => self.costs.pinned_d2h.cost_ns(bytes),
        }
    }

    fn launch(&mut self, duration_ns: u64) {
        self.gpu_ns = self.gpu_ns.max(self.host_ns).saturating_add(duration_ns);
    }

    /// The host drains the GPU's queue and works, or waits for a copy, that long.
    fn wait(&mut self, duration_ns: u64) {
        self.host_ns = self.now_ns().saturating_add(duration_ns);
        self.gpu_ns = self.host_ns;
    }
}

fn seconds_ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_flat_below_linear_between_and_straight_on_above() {
        let line = Line(vec![(100.0, 1.0), (200.0, 2.0), (400.0, 6.0)]);
        assert_eq!(line.cost_ns(1), 1000);
        assert_eq!(line.cost_ns(150), 1500);
        assert_eq!(line.cost_ns(400), 6000);
        assert_eq!(line.cost_ns(500), 8000);
        let falling = Line(vec![(100.0, 3.0), (200.0, 2.0)]);
        assert_eq!(falling.cost_ns(1000), 2000, "no copy is faster for being larger");
        assert_eq!(Line(vec![]).cost_ns(5), 0);
        assert_eq!(Line(vec![(7.0, 2.0)]).cost_ns(500), 2000);
        assert_eq!(Line::of_rate(10.0, 1e9).cost_ns(1_000_000), 1_010_000);
    }

    #[test]
    fn a_copy_drains_the_queue_unless_it_waits_for_its_chunk_only() {
        let costs = LinkCosts { pinned_h2d: Line(vec![(0.0, 2.0)]), ..LinkCosts::default() };
        let mut sync = Clock::new(costs.clone(), false);
        sync.compute(5_000);
        sync.move_chunk(1, Direction::HostToDevice, 0);
        sync.compute(1_000);
        assert_eq!(sync.now_ns(), 8_000, "5 + 2 + 1 µs");
        let mut overlapped = Clock::new(costs, true);
        overlapped.compute(5_000);
        overlapped.move_chunk(1, Direction::HostToDevice, 0);
        assert_eq!(overlapped.now_ns(), 5_000, "the copy ran beside the operation");
        overlapped.compute(1_000);
        assert_eq!(overlapped.end_step().step_ns, 6_000);
    }

    #[test]
    fn page_locked_memory_costs_its_allocation_once() {
        let mut clock = Clock::new(LinkCosts::default(), false);
        clock.allocate(5_000_000, false);
        assert_eq!(clock.times.allocation_ns, 1_100_000, "100 µs, and 5 GB/s");
        clock.release(5_000_000, false);
        clock.allocate(5_000_000, false);
        assert_eq!(clock.times.allocation_ns, 1_100_000);
        clock.allocate(5_000_000, false);
        assert_eq!(clock.times.allocation_ns, 2_200_000, "the first is in use");
    }

    #[test]
    fn costs_that_make_no_sense_are_refused_by_name() {
        let mut costs = LinkCosts { memset_bytes_per_s: 0.0, ..LinkCosts::default() };
        let read = |costs: &LinkCosts| {
            LinkCosts::from_json(&serde_json::to_string(costs).expect("plain numbers"))
        };
        let error = read(&costs).expect_err("no rate").to_string();
        assert!(error.contains("memset_bytes_per_s"), "{error}");
        costs.memset_bytes_per_s = 1.0;
        costs.pinned_d2h = Line(vec![(2.0, 1.0), (1.0, 1.0)]);
        let error = read(&costs).expect_err("falling sizes").to_string();
        assert!(error.contains("pinned_d2h"), "{error}");
        let known = read(&LinkCosts::default()).expect("fine");
        let measured = LinkCosts::shipped("link-h200").expect("ships");
        let gib_per_s = 1e9 / measured.pinned_h2d.cost_ns(1 << 30) as f64;
        assert!((50.0..56.0).contains(&gib_per_s), "PCIe 5.0 x16: {gib_per_s}");
        assert!(LinkCosts::shipped("h100").is_err());
        assert_eq!(known.pinned_d2h.cost_ns(25_000_000), 1_010_000, "10 µs and 25 GB/s");
    }
}
