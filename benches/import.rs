//! How fast snapshots are read: bytes a second of the decompressed pickle, from memory.
//!
//! `cargo bench --bench import` measures with criterion. `cargo bench --bench import -- --once
//! FILE` reads one decompressed pickle once and prints seconds, MB/s and the peak of resident
//! memory: that is what `benches/import_vs_cpython.sh` puts beside CPython.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

use criterion::{Criterion, Throughput};
use flate2::read::MultiGzDecoder;
use fraglab::import::{ReadOptions, import_snapshot, read_torch_snapshot};

const RECORDINGS: [&str; 3] = ["tiny", "llama-1b-varlen", "llama-1b-varlen.s4.stacks"];

fn decompressed(name: &str) -> Option<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/recordings");
    let file = File::open(dir.join(format!("{name}.pickle.gz"))).ok()?;
    let mut pickle = Vec::new();
    MultiGzDecoder::new(file).read_to_end(&mut pickle).ok()?;
    Some(pickle)
}

fn measure(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("import");
    group.sample_size(20);
    for name in RECORDINGS {
        let Some(pickle) = decompressed(name) else {
            eprintln!("skipped: no recording {name} beside the repository");
            continue;
        };
        group.throughput(Throughput::Bytes(pickle.len() as u64));
        group.bench_function(format!("{name}/read"), |bencher| {
            bencher.iter(|| read_torch_snapshot(pickle.as_slice()).is_ok());
        });
        group.bench_function(format!("{name}/trace"), |bencher| {
            let options = ReadOptions::default();
            bencher.iter(|| import_snapshot(Path::new("-"), pickle.as_slice(), &options).is_ok());
        });
    }
    group.finish();
}

/// Peak of resident memory in bytes, where the system tells.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn once(path: &str) -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let file = File::open(path)?;
    let file_bytes = file.metadata()?.len();
    let imported = import_snapshot(Path::new("-"), file, &ReadOptions::default())?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "fraglab  {seconds:.3} s  {:.0} MB/s  peak RSS {:.0} MB ({:.2} x file)  {} events",
        file_bytes as f64 / seconds / 1e6,
        peak_rss_bytes() as f64 / 1e6,
        peak_rss_bytes() as f64 / file_bytes as f64,
        imported.trace.events.len(),
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--once").skip(1);
    if let Some(path) = arguments.next() {
        return once(&path);
    }
    let mut criterion = Criterion::default().configure_from_args();
    measure(&mut criterion);
    criterion.final_summary();
    Ok(())
}
