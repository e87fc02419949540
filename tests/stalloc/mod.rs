//! STAlloc's tool chain: planners, files, trace log, synthesis.

mod literal;
mod planners;
mod synthesis;

use std::collections::HashMap;

use fraglab::plan::stalloc::files::ListedRequest;
use fraglab::plan::stalloc::size_classes::SteadyIteration;

/// The activations of iterations 0 and 1 of a log without layers, as the planner gets them, and the
/// bounds of iteration 1: read by hand, independent of the importer and the synthesis.
fn activations(log: &str) -> (Vec<ListedRequest>, SteadyIteration) {
    let mut live: HashMap<String, (u64, u64, i64)> = HashMap::new();
    let mut found = Vec::new();
    let mut bounds = SteadyIteration { start: u64::MAX, end: 0 };
    let (mut time, mut iteration) = (0, -1i64);
    for line in log.lines() {
        if let Some(index) = line.strip_prefix("Iteration Index : ") {
            iteration = index.parse().unwrap_or(i64::MAX);
            continue;
        }
        let fields: Vec<&str> = line.split(' ').collect();
        match fields[0] {
            "1" => {
                let size_bytes: u64 = fields[2].parse().expect("a size");
                live.insert(fields[1].to_owned(), (time, size_bytes, iteration));
            }
            "0" => {
                let (start, size_bytes, begun) = live.remove(fields[1]).expect("was allocated");
                let persistent = begun < 0 || (begun == 0 && iteration == i64::MAX);
                if (0..2).contains(&begun) && size_bytes > 512 && !persistent {
                    found.push(ListedRequest { start, end: time, size_bytes });
                    if begun == 1 {
                        bounds.start = bounds.start.min(start);
                    }
                    if iteration == 1 {
                        bounds.end = bounds.end.max(time);
                    }
                }
            }
            _ => continue,
        }
        time += 1;
    }
    found.sort_by_key(|request| request.start);
    (found, bounds)
}
