//! Tables of `memory_summary()`.

use fraglab::import::{MemoryText, SummaryClass};

use super::screen;

const MI: u64 = 1 << 20;

/// vissl#514, the first rows made up, since they were cut off: 7,900 of 8,184 MB allocated.
const VISSL: &str = "\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 3                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 0            |        cudaMalloc retries: 2         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |    7900 MB |    8000 MB |   15628 MB |    7444 MB |
| Active memory         |    7900 MB |    8000 MB |   15628 MB |    7444 MB |
| GPU reserved memory   |    8184 MB |    9330 MB |   15628 MB |    7444 MB |
|       from large pool |    8162 MB |    9308 MB |   15606 MB |    7444 MB |
|       from small pool |      22 MB |      22 MB |      22 MB |       0 MB |
|---------------------------------------------------------------------------|
| Non-releasable memory |  202300 KB |    1563 MB |   10613 MB |   10415 MB |
|       from large pool |  199936 KB |    1559 MB |   10597 MB |   10401 MB |
|---------------------------------------------------------------------------|
| Allocations           |     545    |     545    |     662    |     117    |
| GPU reserved segments |      32    |      33    |      37    |       5    |
|===========================================================================|
";

/// In the layout of PyTorch 2.1 and later: binary units and a row of requested sizes.
fn table(requested: u64, allocated: u64, active: u64, reserved: u64, hard: u64) -> String {
    let row =
        |name: &str, mib: u64| format!("| {name:21} | {mib:6} MiB | {mib:6} MiB | 0 B | 0 B |\n");
    [
        ("Allocated memory", allocated),
        ("Active memory", active),
        ("Requested memory", requested),
        ("GPU reserved memory", reserved),
        ("Non-releasable memory", hard),
    ]
    .iter()
    .map(|(name, mib)| row(name, *mib))
    .collect()
}

#[test]
fn a_real_layout_is_read_row_by_row() {
    let found = MemoryText::read(VISSL);
    let [summary] = &found.summaries[..] else { panic!("{found:?}") };
    assert_eq!((summary.device_index, summary.ooms, summary.retries), (Some(3), Some(0), Some(2)));
    assert_eq!((summary.allocations, summary.segments), (Some(545), Some(32)));
    let diagnosis = summary.diagnose();
    // 8184 - 7900 = 284 MB are free, 202,300 KB of them beside live blocks.
    assert_eq!(diagnosis.hard_bytes, Some(202_300 << 10));
    assert_eq!(diagnosis.soft_bytes, Some(284 * MI - (202_300 << 10)));
    assert_eq!(diagnosis.class, SummaryClass::Hard);
    // Reserved never 9,330 MB while more than 8,000 MB were allocated.
    assert_eq!(diagnosis.unallocated_bytes_at_peak_min, Some(1330 * MI));
}

#[test]
fn the_largest_part_names_the_class() {
    let cases = [
        ((100, 100, 100, 101, 1), SummaryClass::NotFragmentation),
        ((100, 100, 100, 140, 30), SummaryClass::Hard),
        ((100, 100, 100, 140, 10), SummaryClass::Soft),
        ((100, 100, 150, 160, 5), SummaryClass::Deferred),
        ((60, 100, 100, 110, 5), SummaryClass::Internal),
    ];
    for ((requested, allocated, active, reserved, hard), expected) in cases {
        let text = table(requested, allocated, active, reserved, hard);
        let found = MemoryText::read(&text);
        let diagnosis = found.summaries[0].diagnose();
        assert_eq!(diagnosis.class, expected, "{text}");
        let parts = [
            diagnosis.internal_bytes,
            diagnosis.deferred_bytes,
            diagnosis.hard_bytes,
            diagnosis.soft_bytes,
        ];
        // The split adds up: requested and the four parts are what is reserved.
        let sum: u64 = parts.iter().map(|part| part.expect("all rows are there")).sum();
        assert_eq!(sum + requested * MI, reserved * MI, "{text}");
        let screen = screen(&text, false);
        assert!(screen.lines().count() <= 25, "{screen}");
    }
}

#[test]
fn a_message_with_its_table_is_one_answer() {
    let message = "CUDA out of memory. Tried to allocate 10.84 GiB (GPU 0; 23.65 GiB total \
                   capacity; 1.06 GiB already allocated; 10.26 GiB free; 12.53 GiB reserved in \
                   total by PyTorch)\n";
    let screen = screen(&format!("{message}{VISSL}"), false);
    assert!(screen.starts_with("-, line 1: CUDA out of memory"), "{screen}");
    assert!(screen.contains("memory_summary() of GPU 3"), "{screen}");
    assert!(screen.lines().count() <= 25, "{screen}");
}
