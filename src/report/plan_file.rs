//! A packing as a JSON file that programs can use: `fraglab plan T -o plan.json`.

use std::io::{self, Write};

use serde::Serialize;

use crate::engine::PlanResult;
use crate::plan::{Packing, Problem};

/// Version of the file.
pub const PLAN_FILE_VERSION: u32 = 1;

/// What stands in a line.
const COLUMNS: [&str; 6] = ["start", "end", "size_bytes", "pool", "offset_bytes", "id"];

/// The head of the file: everything but the buffers.
#[derive(Debug, Serialize)]
struct Head<'a> {
    fraglab_plan: u32,
    problem_hash: String,
    #[serde(flatten)]
    result: Lasting<'a>,
}

/// What of a result does not depend on a clock.
#[derive(Debug, Serialize)]
struct Lasting<'a> {
    source: &'a crate::engine::PlanSource,
    planner: &'a str,
    granularity_bytes: u64,
    height_bytes: u64,
    lower_bound_bytes: u64,
    proven: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    partial: bool,
    pools: &'a [crate::plan::PoolPacking],
    columns: &'static [&'static str],
}

/// Writes a packing: the head, then a line a buffer, `[start, end, size_bytes, pool, offset_bytes]`,
/// in the order of the problem; and a sixth column with `names`, if there are as many.
///
/// # Errors
/// If the writer fails.
pub fn write_plan(
    result: &PlanResult,
    problem: &Problem,
    packing: &Packing,
    names: &[&str],
    writer: &mut impl Write,
) -> io::Result<()> {
    let head = Head {
        fraglab_plan: PLAN_FILE_VERSION,
        problem_hash: format!("{:016x}", problem_hash(problem)),
        result: Lasting {
            source: &result.source,
            planner: result.planner,
            granularity_bytes: result.granularity_bytes,
            height_bytes: result.height_bytes,
            lower_bound_bytes: result.lower_bound_bytes,
            proven: result.proven,
            partial: result.partial,
            pools: &result.pools,
            columns: if names.is_empty() { &COLUMNS[..5] } else { &COLUMNS },
        },
    };
    let mut head = serde_json::to_string_pretty(&head)?;
    head.truncate(head.trim_end_matches(['}', '\n']).len());
    write!(writer, "{head},\n  \"buffers\": [")?;
    let offsets = packing.offsets_bytes.iter();
    for (index, (buffer, offset)) in problem.buffers.iter().zip(offsets).enumerate() {
        let separator = if index == 0 { "\n" } else { ",\n" };
        let (start, end, size, pool) = (buffer.start, buffer.end, buffer.size_bytes, buffer.pool());
        write!(writer, "{separator}    [{start}, {end}, {size}, {pool}, {offset}")?;
        if let Some(name) = names.get(index) {
            write!(writer, ", {}", serde_json::to_string(name)?)?;
        }
        write!(writer, "]")?;
    }
    writeln!(writer, "\n  ]\n}}")
}

/// A number that two problems share only if their buffers agree in life, size and pool (FNV-1a): to
/// see that a plan belongs to a trace.
pub fn problem_hash(problem: &Problem) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let numbers = problem
        .buffers
        .iter()
        .flat_map(|buffer| [buffer.start, buffer.end, buffer.size_bytes, u64::from(buffer.pool())]);
    let bytes = numbers.flat_map(u64::to_le_bytes);
    bytes.fold(BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}
