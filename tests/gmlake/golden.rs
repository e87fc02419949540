//! The model against what the notes say that the shipped class gave (8.1, 2.8, 1.4, 8.2).

use std::collections::BTreeMap;

use fraglab::trace::{DeviceCall, Fault, FaultWhen};
use fraglab::units::{GIB, MIB};

use super::device::{SlowDevice, UNIT};
use super::model::Model;
use super::settings::Settings;
use crate::model::random::Random;

/// The first trace of 8.1; most others go on from it.
const G1: &str = "+1 400 +2 600 -1 -2 +3 200 +4 100 +5 300 +6 400";

/// The model with names for what it handed out.
struct Lab {
    model: Model,
    named: BTreeMap<String, u64>,
}

impl Lab {
    /// A device of 4000 MiB and `fragLimit` 2 MiB, as in 8.1.
    fn new() -> Lab {
        Lab::with(&golden_settings(), 4000, &[])
    }

    fn with(settings: &Settings, capacity_mib: u64, faults: &[Fault]) -> Lab {
        let device = SlowDevice::new(Some(capacity_mib * MIB), faults);
        Lab { model: Model::new(settings.clone(), device), named: BTreeMap::new() }
    }

    /// Runs a trace in the notation of 8.1: `+NAME MIB` asks on stream 0, `+NAME@1 MIB` on stream
    /// 1, `-NAME` frees. Gives whether every request was met.
    fn run(&mut self, trace: &str) -> bool {
        let mut all_met = true;
        let mut words = trace.split_whitespace();
        while let Some(word) = words.next() {
            if let Some(name) = word.strip_prefix('-') {
                let handle = self.named.remove(name).expect("live");
                self.model.free(handle);
            } else {
                let name = word.strip_prefix('+').expect("+ or -");
                let (name, stream) = name.split_once('@').unwrap_or((name, "0"));
                let mib: f64 = words.next().and_then(|mib| mib.parse().ok()).expect("a size");
                let stream = stream.parse().expect("a stream");
                match self.model.malloc((mib * MIB as f64) as u64, stream) {
                    Some(handle) => {
                        self.named.insert(name.to_owned(), handle);
                    }
                    None => all_met = false,
                }
            }
            self.model.check();
        }
        all_met
    }

    fn calls<const N: usize>(&self, kinds: [DeviceCall; N]) -> [u64; N] {
        kinds.map(|kind| self.model.device.calls(kind))
    }

    /// Calls of reserve, create, map, set-access, unmap, release and address-free: the columns of
    /// 2.8.
    fn table(&self) -> [u64; 7] {
        self.calls([
            DeviceCall::AddressReserve,
            DeviceCall::Create,
            DeviceCall::Map,
            DeviceCall::SetAccess,
            DeviceCall::Unmap,
            DeviceCall::Release,
            DeviceCall::AddressFree,
        ])
    }

    /// Allocated, active and reserved bytes in MiB.
    fn levels(&self) -> [u64; 3] {
        let levels = self.model.levels();
        [levels.allocated_bytes, levels.active_bytes, levels.reserved_bytes].map(|b| b / MIB)
    }

    /// Where the memory of a block lies: 2 MiB steps, with runs joined to `(address, MiB)`.
    fn runs(&self, name: &str) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for address in self.model.physical(self.named[name]) {
            match runs.last_mut() {
                Some((base, mib)) if *base + *mib * MIB == address => *mib += 2,
                _ => runs.push((address, 2)),
            }
        }
        runs
    }
}

fn golden_settings() -> Settings {
    Settings { frag_limit: 2 * MIB, ..Settings::shipped() }
}

/// Every call of the kind from this number on, so many of them, fails.
fn failing(call: DeviceCall, from: u64, count: u64) -> Vec<Fault> {
    (from..from + count).map(|nth| Fault { call, when: FaultWhen::Nth(nth) }).collect()
}

#[test]
fn g1_stitches_three_hundred_and_one_hundred() {
    let mut lab = Lab::new();
    assert!(lab.run(G1));
    assert_eq!(lab.levels(), [1000, 1000, 1000]);
    assert_eq!(lab.table(), [3, 500, 700, 700, 0, 0, 0]);
    // VA: 1000 MiB of segments and 400 stitched.
    assert_eq!(lab.model.stitched_bytes(), 400 * MIB);
    // The rest of the 600 first, then the rest of the 400.
    let (five, four) = (lab.runs("5")[0].0, lab.runs("4")[0].0);
    assert_eq!(lab.runs("6"), [(five + 300 * MIB, 300), (four + 100 * MIB, 100)]);
}

#[test]
fn g1_with_the_shipped_limit_allocates_anew() {
    let mut lab = Lab::with(&Settings::shipped(), 4000, &[]);
    assert!(lab.run(G1));
    assert_eq!(lab.levels(), [1000, 1000, 1400]);
    assert_eq!(lab.table(), [3, 700, 700, 700, 0, 0, 0]);
}

/// R1 to R6 of the slides.
const G2: &str = "+R1 100 +R2 100 -R1 -R2 +R3 200 -R3 +R4 400 -R4 +R5 100 +R6 450";

#[test]
fn g2_as_shipped_reserves_600() {
    let mut lab = Lab::new();
    assert!(lab.run(G2));
    assert_eq!(lab.levels()[2], 600);
    // Segments 100, 100, 400; stitched 200 and 450.
    assert_eq!(lab.table(), [5, 300, 300 + 100 + 225, 625, 0, 0, 0]);
}

#[test]
fn g2_with_re_alloc_reserves_550() {
    let mut lab = Lab::with(&Settings { re_alloc: true, ..golden_settings() }, 4000, &[]);
    assert!(lab.run(G2));
    assert_eq!(lab.levels()[2], 550);
    assert_eq!(lab.table(), [7, 275, 800, 800, 0, 0, 0]);
}

#[test]
fn g2_without_the_feature_reserves_1250() {
    let mut lab = Lab::with(&Settings { vmm_defragment: false, ..golden_settings() }, 4000, &[]);
    assert!(lab.run(G2));
    assert_eq!(lab.levels()[2], 1250);
    assert_eq!(lab.table(), [0; 7]);
    // 100, 100, 200, 400, 450.
    assert_eq!(lab.calls([DeviceCall::Malloc]), [5]);
}

#[test]
fn g3_prefers_a_larger_primitive_to_an_exact_stitched_block() {
    let mut lab = Lab::new();
    assert!(lab.run(G1) && lab.run("+big 500 -6"));
    let big = lab.runs("big");
    assert!(lab.run("-big +7 400"));
    assert_eq!(lab.levels(), [1000, 1000, 1500]);
    assert_eq!(lab.runs("7"), [(big[0].0, 400)]);
    assert_eq!(lab.model.stitched_counts(), [(0, 200)], "the stitched block stays idle");
}

#[test]
fn g4_counts_used_and_free_chunks() {
    let mut lab = Lab::new();
    assert!(lab.run(G1) && lab.run("-6 +7 350"));
    assert_eq!(lab.model.stitched_counts(), [(175, 25)]);
    assert!(lab.run("+8 50"));
    assert_eq!(lab.model.stitched_counts(), [(175, 0)]);
    assert!(lab.run("-7"));
    assert_eq!(lab.model.stitched_counts(), [(0, 175)], "175 of 200: fragmented");
    assert!(lab.run("-8"));
    assert_eq!(lab.model.stitched_counts(), [(0, 200)], "free again");
    assert_eq!(lab.table(), [3, 500, 700, 700, 0, 0, 0], "reuse calls nothing");
}

#[test]
fn g6_streams_are_not_stitched_together() {
    let mut lab = Lab::new();
    assert!(lab.run("+A@1 100 +B@2 100 -A -B +S@1 200"));
    assert_eq!(lab.levels(), [200, 200, 400]);
    assert_eq!(lab.model.stitched_bytes(), 0);
}

#[test]
fn g7_sizes_at_the_small_border() {
    let mut lab = Lab::new();
    // 0.0001 MiB are 104 bytes.
    assert!(lab.run("+a 0.0001 +b 1 +c 1.0001"));
    assert_eq!(lab.levels()[2], 22);
    assert_eq!(lab.calls([DeviceCall::Malloc, DeviceCall::Create]), [1, 10]);
    let levels = lab.model.levels();
    assert_eq!(levels.allocated_bytes, 512 + MIB + 2 * MIB);
    assert_eq!(levels.active_bytes, levels.allocated_bytes);
}

const G8: &str = "+A 400 +B 400 +C 100 -A -B +D 300 +E 300 +S 300";

/// Also the example of 4.2: two fragments of 100, 100 MiB of the device, 300 asked for.
#[test]
fn g8_a_shortfall_is_out_of_memory() {
    let mut lab = Lab::with(&golden_settings(), 1000, &[]);
    assert!(!lab.run(G8));
    assert!(!lab.named.contains_key("S"));
    assert_eq!(lab.levels(), [700, 700, 900]);
    assert_eq!((lab.model.counters.ooms, lab.model.counters.alloc_retries), (1, 1));
    // Twice (before and after the flush) the 50 chunks that are left are created and released.
    assert_eq!(lab.table(), [3, 450 + 100, 450, 450, 0, 100, 0]);
}

#[test]
fn g8_with_re_alloc_takes_the_shortfall_alone() {
    let mut lab = Lab::with(&Settings { re_alloc: true, ..golden_settings() }, 1000, &[]);
    assert!(lab.run(G8));
    assert_eq!(lab.levels(), [1000, 1000, 1000]);
    assert_eq!(lab.table(), [5, 500, 650, 650, 0, 0, 0]);
}

#[test]
fn g11_ties_go_to_the_highest_address_and_the_last_is_cut() {
    let mut lab = Lab::new();
    assert!(lab.run("+a 100 +b 100 +c 100"));
    let [b, c] = ["b", "c"].map(|name| lab.runs(name)[0].0);
    assert!(lab.run("-a -b -c +S 150"));
    assert_eq!(lab.runs("S"), [(c, 100), (b, 50)]);
    assert_eq!(lab.model.pooled_sizes(0), [50 * MIB, 100 * MIB]);
}

/// Example of 2.6: 100, 60 and 40 MiB free, 170 asked for.
#[test]
fn the_largest_come_first_and_whole() {
    let mut lab = Lab::new();
    assert!(lab.run("+a 60 +b 100 +c 40"));
    let [a, b, c] = ["a", "b", "c"].map(|name| lab.runs(name)[0].0);
    assert!(lab.run("-a -b -c +S 170"));
    assert_eq!(lab.runs("S"), [(b, 100), (a, 60), (c, 10)]);
}

/// The decision on B4: what an active stitched block maps is not released.
#[test]
fn g13_a_flush_keeps_what_an_active_stitched_block_maps() {
    let mut lab = Lab::new();
    assert!(lab.run("+A 200 +B 200 +C 200 -A -B -C +S 600 -S +T 400"));
    assert_eq!(lab.model.stitched_counts(), [(200, 100)]);
    assert!(!lab.run("+X 3500"), "the flush must not make room");
    assert_eq!(lab.levels(), [400, 400, 600], "bytes still mapped are still reserved");
    assert_eq!(lab.model.counters.alloc_retries, 1);
    assert!(lab.run("+U 200"), "what was kept is usable");
    assert!(lab.run("-T -U"));
    assert_eq!(lab.levels(), [0, 0, 600]);
    lab.model.empty_cache();
    lab.model.check();
    assert_eq!(lab.levels(), [0, 0, 0]);
    assert_eq!(lab.model.device.used_units(), 0);
}

/// B1 fixed: a stitch that cannot be mapped leaves no trace.
#[test]
fn g14_a_failed_stitch_is_rolled_back() {
    // Attempts at levels 0, 1 and 2 with 3 tries of 8 rounds each, and the new segment twice.
    let faults = failing(DeviceCall::Map, 501, 3 * 3 * 8 + 2 * 8);
    let mut lab = Lab::with(&golden_settings(), 4000, &faults);
    assert!(lab.run("+1 400 +2 600 -1 -2 +3 200 +4 100 +5 300"));
    let pooled = lab.model.pooled_sizes(0);
    assert!(!lab.run("+6 400"));
    assert_eq!(lab.levels(), [600, 600, 1000]);
    assert_eq!(lab.model.pooled_sizes(0), pooled);
    assert_eq!(lab.model.stitched_bytes(), 0);
    assert_eq!(lab.model.device.tries(DeviceCall::Map), 500 + 88);
    // 88 ranges given back, nothing unmapped; two segments of 200 chunks created and released.
    assert_eq!(lab.table(), [2 + 88, 500 + 400, 500, 500, 0, 400, 88]);
    assert!(lab.run("+6 400"), "maps work again");
    assert_eq!(lab.levels(), [1000, 1000, 1000]);
}

/// B2 fixed: one transient failure costs one more round, not a collection.
#[test]
fn a_transient_map_failure_costs_one_round() {
    let faults = failing(DeviceCall::Map, 601, 1);
    let mut lab = Lab::with(&golden_settings(), 4000, &faults);
    assert!(lab.run(G1));
    assert_eq!(lab.table(), [4, 500, 500 + 100 + 200, 800, 1, 0, 1]);
}

/// The second try of a stitch comes after a collection at level 0, which takes fragmented blocks.
#[test]
fn a_stitch_that_cannot_be_mapped_collects_fragmented_blocks() {
    // The 700 maps of G1, then one whole try fails.
    let faults = failing(DeviceCall::Map, 701, 8);
    let mut lab = Lab::with(&golden_settings(), 4000, &faults);
    // 6 goes and its block is fragmented by 7; 300 and 40 are left for 8.
    assert!(lab.run(G1) && lab.run("-6 +7 60"));
    assert_eq!(lab.model.stitched_counts(), [(0, 170)]);
    assert!(lab.run("+8 340"));
    assert_eq!(lab.model.counters.stitch_evictions, 1);
    assert_eq!(lab.model.stitched_bytes(), 340 * MIB);
    assert_eq!(lab.table(), [3 + 8 + 1, 500, 700 + 170, 870, 1, 0, 8 + 1]);
}

#[test]
fn the_call_table_holds() {
    let mut lab = Lab::new();
    assert!(lab.run("+a 100 +b 100"));
    assert_eq!(lab.table(), [2, 100, 100, 100, 0, 0, 0], "two new segments of 50 chunks");
    assert!(lab.run("-a -b +s 150"));
    assert_eq!(lab.table(), [3, 100, 175, 175, 0, 0, 0], "a stitch of 75 chunks");
    assert!(lab.run("-s +t 40 -t +u 150 -u"));
    assert_eq!(lab.table(), [3, 100, 175, 175, 0, 0, 0], "split, merge, reuse, free");
    lab.model.empty_cache();
    assert_eq!(lab.table(), [3, 100, 175, 175, 3, 100, 3], "one stitched block, two segments");
    assert_eq!(lab.model.device.used_units(), 0);
}

#[test]
fn a_new_segment_that_fails_at_a_chunk_gives_the_others_back() {
    // The sixth chunk of the second segment, and again after the flush.
    let mut faults = failing(DeviceCall::Create, 56, 1);
    faults.extend(failing(DeviceCall::Create, 57, 1));
    let mut lab = Lab::with(&golden_settings(), 4000, &faults);
    assert!(!lab.run("+a 100 +b 100"));
    assert_eq!(lab.model.device.tries(DeviceCall::Create), 57);
    assert_eq!(lab.table(), [1, 55, 50, 50, 0, 5, 0]);
}

#[test]
fn a_new_segment_that_cannot_be_mapped_leaves_nothing() {
    // All rounds before and after the flush fail at the third access.
    let faults: Vec<Fault> =
        (0..16).flat_map(|round| failing(DeviceCall::SetAccess, 3 + 3 * round, 1)).collect();
    let mut lab = Lab::with(&golden_settings(), 4000, &faults);
    assert!(!lab.run("+a 100"));
    // A chunk whose access failed was mapped: three of each round are unmapped in one call.
    assert_eq!(lab.table(), [16, 100, 48, 32, 16, 100, 16]);
    assert_eq!(lab.model.device.used_units(), 0);
}

/// Invariants of 1.4 after each operation, with flushes and waits for other streams in between.
#[test]
fn invariants_hold_after_random_operations() {
    for seed in 0..3 {
        let mut random = Random::new(seed);
        let settings =
            Settings { frag_limit: [2, 8, 32][seed as usize] * MIB, ..golden_settings() };
        let mut model = Model::new(settings, SlowDevice::new(Some(700 * MIB), &[]));
        let (mut live, mut waiting): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
        for _ in 0..3000 {
            match random.range(0..=99) {
                0..=49 => {
                    let bytes = random.range(1..=60 * MIB);
                    live.extend(model.malloc(bytes, random.range(0..=1)));
                }
                50..=89 if !live.is_empty() => {
                    model.free(live.swap_remove(random.range(0..=live.len() as u64 - 1) as usize));
                }
                90..=94 if !live.is_empty() => {
                    let handle = live.swap_remove(random.range(0..=live.len() as u64 - 1) as usize);
                    model.defer(handle);
                    waiting.push(handle);
                }
                95..=98 if !waiting.is_empty() => model.complete(waiting.remove(0)),
                99 => model.empty_cache(),
                _ => {}
            }
            model.check();
        }
        assert!(model.counters.stitches > 20 && model.counters.ooms > 0, "{:?}", model.counters);
        for handle in live {
            model.free(handle);
        }
        model.empty_cache();
        model.check();
        assert_eq!(model.device.used_units(), 0);
    }
}

/// One iteration of a job: allocs and frees in an order that is the same every time, and ends with
/// nothing live. Sizes of tensors, `None` frees the block of the index.
fn iteration(random: &mut Random, allocs: usize) -> Vec<(usize, Option<u64>)> {
    let sizes: Vec<u64> = (0..12).map(|_| random.range(MIB..=120 * MIB)).collect();
    let mut steps = Vec::new();
    let mut live: Vec<usize> = Vec::new();
    let mut next = 0;
    while next < allocs || !live.is_empty() {
        let grow = next < allocs && (live.is_empty() || live.len() < 24 && random.percent(55));
        if grow {
            let size = if random.percent(70) {
                random.pick(&sizes)
            } else {
                random.range(MIB..=120 * MIB)
            };
            steps.push((next, Some(size)));
            live.push(next);
            next += 1;
        } else {
            let block = live.swap_remove(random.range(0..=live.len() as u64 - 1) as usize);
            steps.push((block, None));
        }
    }
    steps
}

/// Map calls of each iteration.
fn maps_by_iteration(
    settings: &Settings,
    steps: &[(usize, Option<u64>)],
    count: usize,
) -> Vec<u64> {
    let mut model = Model::new(settings.clone(), SlowDevice::new(None, &[]));
    let mut before = 0;
    (0..count)
        .map(|_| {
            let mut live = BTreeMap::new();
            for &(block, size) in steps {
                match size {
                    Some(bytes) => {
                        live.insert(block, model.malloc(bytes, 0).expect("there is no end to it"));
                    }
                    None => model.free(live.remove(&block).expect("live")),
                }
            }
            let maps = model.device.calls(DeviceCall::Map);
            maps - std::mem::replace(&mut before, maps)
        })
        .collect()
}

/// 8.2: eight periodic traces of 60 or 300 allocations settle; so the paper says, within four
/// iterations.
#[test]
fn periodic_traces_settle() {
    let settings = Settings { frag_limit: 32 * MIB, ..Settings::shipped() };
    for seed in 0..8 {
        let steps = iteration(&mut Random::new(seed), if seed < 4 { 60 } else { 300 });
        let maps = maps_by_iteration(&settings, &steps, 6);
        assert!(maps[0] > 0);
        assert_eq!(maps[3..], [0, 0, 0], "seed {seed}: {maps:?}");
    }
}

/// 8.2: below the stitched working set they never do.
#[test]
fn periodic_traces_never_settle_below_their_working_set() {
    let steps = iteration(&mut Random::new(4), 300);
    let settings = |auto_gc| Settings { frag_limit: 32 * MIB, auto_gc, ..Settings::shipped() };
    let maps = maps_by_iteration(&settings(GIB), &steps, 6);
    assert!(maps.iter().all(|&count| count > 0), "{maps:?}");
    // Every stitch maps each of its chunks, so the sum is also what the trace needs at least.
    assert!(maps_by_iteration(&settings(1000 * GIB), &steps, 6)[5] == 0);
    assert!(maps.iter().sum::<u64>() * UNIT > 4 * GIB);
}
