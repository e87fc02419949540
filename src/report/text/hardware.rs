//! What a real GPU said beside the simulator: under the table of `run --device cuda`.
//!
//! A row an allocator: what a clock measured of its calls and what the cost profile says of the
//! same calls, its peak on the card and that of the simulated cell. A single allocator also shows
//! its calls by kind, and what the driver says is used.

use super::grid::{Align, Cell, Grid};
use super::{SizeUnit, Style, Tone, duration, grouped, printable, wrapped};
use crate::engine::{CallTimes, HardwareSummary, HardwareWall, MemorySample, Repeats, RunResult};
use crate::metrics::TouchMode;
use crate::units::Bytes;

/// Everything about the card; nothing if no result is of one.
pub(super) fn hardware(results: &[&RunResult], style: Style) -> String {
    let on_card = results.iter().filter_map(|result| Some((result.hardware.as_ref()?, *result)));
    let rows: Vec<(&HardwareSummary, &RunResult)> = on_card.collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut out = format!("\n{}", beside(&rows).render(style));
    out.push_str(&repeats_line(&rows));
    if let [(summary, result)] = &rows[..] {
        if let Some(wall) = &result.wall.hardware {
            out.push_str(&format!("\n{}", calls(wall).render(style)));
        }
        out.push_str(&memory_line(summary));
        out.push_str(&touch_line(summary));
    }
    out
}

/// Device time and reserved peak, on the card and simulated.
fn beside(rows: &[(&HardwareSummary, &RunResult)]) -> Grid {
    let peak = |(hardware, result): &(&HardwareSummary, &RunResult)| {
        let used = u64::try_from(hardware.memory.at_reserved_peak.used_bytes).unwrap_or(0);
        let reserved = result.peaks.reserved_bytes_peak;
        reserved.max(used).max(hardware.simulated.reserved_bytes_peak)
    };
    let unit = SizeUnit::fitting(rows.iter().map(peak).max().unwrap_or(0));
    use Align::{Left, Right};
    let mut grid = Grid::new(&[Left, Right, Right, Right, Right, Right, Right, Right, Right]);
    let of_peak = format!("peak {}", unit.name);
    grid.head(["", "calls", "calls", "", "reserved", "simulated", "used", "blocks", "mis-"]);
    grid.head([
        "on the card",
        "measured",
        "simulated",
        "ratio",
        &of_peak,
        &of_peak,
        unit.name,
        "checked",
        "matches",
    ]);
    for (hardware, result) in rows {
        let (measured, ratio) = match &result.wall.hardware {
            Some(wall) => {
                (duration(wall.allocator_device_ns_measured), ratio(wall.measured_over_simulated))
            }
            None => ("-".to_owned(), "-".to_owned()),
        };
        let touch = &hardware.touch;
        let (checked, mismatches) = match touch.mode {
            TouchMode::None => ("-".to_owned().into(), "-".to_owned().into()),
            _ => {
                let tone = if touch.mismatches == 0 { Tone::Good } else { Tone::Bad };
                let mismatches = Cell::toned(grouped(touch.mismatches), tone);
                (grouped(touch.blocks).into(), mismatches)
            }
        };
        let cells: [Cell; 9] = [
            printable(&result.allocator.name).into_owned().into(),
            measured.into(),
            duration(result.time.allocator_device_ns).into(),
            ratio.into(),
            unit.cell(result.peaks.reserved_bytes_peak).into(),
            unit.cell(hardware.simulated.reserved_bytes_peak).into(),
            unit.signed_cell(hardware.memory.at_reserved_peak.used_bytes).into(),
            checked,
            mismatches,
        ];
        grid.row(cells, String::new());
    }
    grid
}

/// How far the passes lie apart of which one is shown; nothing if there was but one of each.
fn repeats_line(rows: &[(&HardwareSummary, &RunResult)]) -> String {
    let repeated = rows.iter().filter_map(|(_, result)| {
        let repeats = result.wall.hardware.as_ref()?.repeats;
        let Repeats { count, least_ns, most_ns } = repeats;
        let name = printable(&result.allocator.name);
        let (least, most) = (duration(least_ns), duration(most_ns));
        (count > 1).then(|| format!("{name} {least} to {most} in {count} passes"))
    });
    let repeated: Vec<String> = repeated.collect();
    if repeated.is_empty() {
        return String::new();
    }
    let text = format!("measured is of the median pass: {}", repeated.join(", "));
    wrapped("  ", &text, "    ")
}

/// A row a kind of call.
fn calls(wall: &HardwareWall) -> Grid {
    let mut grid = Grid::of_columns(1, 6);
    grid.head(["", "", "", "measured", "simulated", "", "measured"]);
    grid.head(["device calls", "count", "refused", "in all", "in all", "ratio", "each"]);
    for (name, times) in &wall.device_calls {
        let CallTimes { calls, refused, measured_ns, simulated_ns } = *times;
        let share = (simulated_ns > 0).then(|| measured_ns as f64 / simulated_ns as f64);
        grid.row(
            [
                (*name).to_owned(),
                grouped(calls),
                grouped(refused),
                duration(measured_ns),
                duration(simulated_ns),
                ratio(share),
                duration(measured_ns / calls.max(1)),
            ],
            String::new(),
        );
    }
    grid
}

/// `0.83`; `-` where there is none.
fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
}

/// What the driver says is used, beside what the allocator says it holds.
fn memory_line(hardware: &HardwareSummary) -> String {
    let memory = &hardware.memory;
    let sample = |sample: MemorySample| {
        let used = match u64::try_from(sample.used_bytes) {
            Ok(bytes) => Bytes(bytes).to_string(),
            Err(_) => format!("-{}", Bytes(sample.used_bytes.unsigned_abs())),
        };
        let event = grouped(sample.event_index);
        format!("{used} used and {} reserved after event {event}", Bytes(sample.reserved_bytes))
    };
    let text = format!(
        "cuMemGetInfo: {} of {} free before, {}, {}",
        Bytes(memory.free_bytes),
        Bytes(memory.total_bytes),
        sample(memory.at_reserved_peak),
        sample(memory.at_end),
    );
    wrapped("  ", &text, "    ")
}

/// What was written and checked; nothing if nothing was.
fn touch_line(hardware: &HardwareSummary) -> String {
    let touch = &hardware.touch;
    let what = match touch.mode {
        TouchMode::None => return String::new(),
        TouchMode::Edges => "at their edges",
        TouchMode::Full => "whole",
    };
    let text = format!(
        "{} blocks written and checked {what}, {} in all: {}",
        grouped(touch.blocks),
        Bytes(touch.bytes),
        match touch.mismatches {
            0 => "every one held what was written there".to_owned(),
            count => format!("{} did not hold what was written there", grouped(count)),
        }
    );
    wrapped("  ", &text, "    ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use expect_test::expect;

    use super::super::run::tests::sample;
    use super::*;
    use crate::engine::{CardMemory, SimulatedCell, Status};
    use crate::metrics::TouchReport;
    use crate::report::text::WIDTH;
    use crate::units::{GIB, MIB};

    fn on_card(name: &str, mode: TouchMode) -> RunResult {
        let mut result = sample(name, 50 * GIB);
        let at = |event_index, bytes: u64| MemorySample {
            event_index,
            reserved_bytes: bytes,
            used_bytes: bytes as i64 + MIB as i64,
        };
        result.hardware = Some(HardwareSummary {
            memory: CardMemory {
                total_bytes: 140 * GIB,
                free_bytes: 139 * GIB,
                at_reserved_peak: at(7, 50 * GIB),
                at_end: at(231_790, 20 * GIB),
            },
            touch: TouchReport { mode, blocks: 115_000, bytes: 9 << 40, ..TouchReport::default() },
            simulated: SimulatedCell {
                status: Status::Ok,
                reserved_bytes_peak: 49 * GIB,
                allocator_device_ns: 1_000_000_000,
                calls: result.calls,
            },
        });
        let malloc = CallTimes {
            calls: 1200,
            refused: 1,
            measured_ns: 600_000_000,
            simulated_ns: 1_200_000_000,
        };
        result.wall.hardware = Some(HardwareWall {
            device_calls: BTreeMap::from([("malloc", malloc)]),
            allocator_device_ns_measured: 600_000_000,
            measured_over_simulated: Some(0.486),
            repeats: Repeats { count: 1, least_ns: 600_000_000, most_ns: 600_000_000 },
            touch_seconds: 1.0,
        });
        result
    }

    #[test]
    fn one_allocator_shows_its_calls() {
        let result = on_card("caching", TouchMode::Full);
        let text = hardware(&[&result], Style::default());
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        expect![[r#"

                           calls     calls       reserved simulated  used  blocks    mis-
            on the card measured simulated ratio peak GiB  peak GiB   GiB checked matches
            caching       600 ms    1.23 s  0.49    50.00     49.00 50.00 115,000       0

                                          measured  simulated         measured
            device calls  count  refused    in all     in all  ratio      each
            malloc        1,200        1    600 ms     1.20 s   0.50    500 µs
              cuMemGetInfo: 139 GiB of 140 GiB free before, 50.00 GiB used and 50 GiB
                reserved after event 7, 20.00 GiB used and 20 GiB reserved after event
                231,790
              115,000 blocks written and checked whole, 9 TiB in all: every one held what
                was written there
        "#]]
        .assert_eq(&text);
    }

    #[test]
    fn several_share_a_table() {
        let results = [on_card("caching", TouchMode::None), on_card("native", TouchMode::Edges)];
        let text = hardware(&[&results[0], &results[1]], Style::default());
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(!text.contains("cuMemGetInfo"), "{text}");
    }

    #[test]
    fn passes_are_told_apart() {
        let mut repeated = on_card("caching", TouchMode::None);
        if let Some(wall) = &mut repeated.wall.hardware {
            wall.repeats = Repeats { count: 5, least_ns: 550_000_000, most_ns: 910_000_000 };
        }
        let once = on_card("native", TouchMode::None);
        let text = hardware(&[&repeated, &once], Style::default());
        let told = "  measured is of the median pass: caching 550 ms to 910 ms in 5 passes\n";
        assert!(text.ends_with(told), "{text}");
    }

    #[test]
    fn simulated_runs_say_nothing() {
        assert_eq!(hardware(&[&sample("caching", GIB)], Style::default()), "");
    }
}
