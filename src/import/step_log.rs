//! Memory lines in the logs of training frameworks, as curves over steps.
//!
//! The one design decision: a line is recognised by its own words alone, wherever it stands, so
//! that a log may be cut, mixed with other output and prefixed by a launcher.
//!
//! | framework | line |
//! |---|---|
//! | DeepSpeed | `MA 4.96 GB  Max_MA 5.09 GB  CA 6.39 GB  Max_CA 6 GB`, after a line with a label |
//! | DeepSpeed | `global_step=110, ... MemAllocated=17.94GB, MaxMemAllocated=54.06GB` |
//! | Megatron | `(after 3 iterations) memory (MB) \| allocated: .. \| max allocated: .. \| ...` |
//! | torchtune | `Step 1 \| ... peak_memory_active:.. peak_memory_alloc:.. ...` |
//! | torchtune | `GPU peak memory allocation: 14.41 GiB` and the lines for `reserved`, `active` |
//! | llama-recipes | `Max CUDA memory allocated was 18 GB` and the lines for `reserved`, `active` |
//! | STAlloc | `dev0, iter3 : max_reserved:9.13, max_allocated:8.97, utilization:98.28%` |
//! | Liger | `'step_peak_memory_allocated_MB': .., 'step_peak_memory_reserved_MB': ..` |
//!
//! All of them count in powers of 1024, whatever they call it.

mod growth;

use serde::Serialize;

pub use growth::{CurveClass, CurveDiagnosis, CurveGrowth};

use super::oom_text::{Amount, amount, plain, rank_of, split_number};
use crate::units::{GIB, MIB};

/// Whose lines they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Framework {
    /// DeepSpeed's `see_memory_usage`.
    Deepspeed,
    /// DeepSpeed's step timer.
    DeepspeedTimer,
    /// Megatron-LM.
    Megatron,
    /// torchtune's metrics of a step.
    Torchtune,
    /// torchtune's memory statistics.
    TorchtuneStats,
    /// llama-recipes.
    LlamaRecipes,
    /// STAlloc.
    Stalloc,
    /// Liger-Kernel's benchmark callback.
    Liger,
}

impl Framework {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Framework::Deepspeed | Framework::DeepspeedTimer => "DeepSpeed",
            Framework::Megatron => "Megatron",
            Framework::Torchtune | Framework::TorchtuneStats => "torchtune",
            Framework::LlamaRecipes => "llama-recipes",
            Framework::Stalloc => "STAlloc",
            Framework::Liger => "Liger",
        }
    }
}

/// One report of a log. Figures that it does not tell are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CurveRow {
    /// Line of the text, from 1.
    pub line: u32,
    /// The step that the line names.
    pub step: Option<u64>,
    /// What the framework was about to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Allocated now.
    pub allocated: Option<Amount>,
    /// Reserved now.
    pub reserved: Option<Amount>,
    /// Most allocated, since the framework last reset it.
    pub allocated_peak: Option<Amount>,
    /// Most active, since the framework last reset it.
    pub active_peak: Option<Amount>,
    /// Most reserved, since the framework last reset it.
    pub reserved_peak: Option<Amount>,
}

/// The reports of one framework about one rank, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReferenceCurve {
    /// Whose lines they are.
    pub framework: Framework,
    /// The rank or device that the lines name.
    pub rank: Option<u32>,
    /// At least one.
    pub rows: Vec<CurveRow>,
}

/// Most curves that are kept of a text.
const CURVES_MAX: usize = 256;

/// Every curve of a text, in the order of their first lines.
pub(super) fn read_step_logs(text: &str) -> Vec<ReferenceCurve> {
    let mut reader = Reader::default();
    for (index, line) in text.split('\n').enumerate() {
        reader.line(u32::try_from(index + 1).unwrap_or(u32::MAX), line);
    }
    reader.curves
}

#[derive(Default)]
struct Reader {
    curves: Vec<ReferenceCurve>,
    /// What DeepSpeed said it was about to do.
    label: Option<String>,
}

impl Reader {
    fn line(&mut self, number: u32, line: &str) {
        // Most lines of a log are about something else.
        const WORDS: [&str; 6] =
            ["see_memory_usage", "emAllocated=", "allocated", "Max_MA", "memory", "max_reserved:"];
        if !WORDS.iter().any(|word| line.contains(word)) {
            return;
        }
        let line = plain(line);
        let line = line.trim_end();
        let mut row = CurveRow { line: number, ..CurveRow::default() };
        let rank = rank_of(line);
        if let Some(at) = line.find("Max_MA") {
            if deepspeed(&mut row, line, at) {
                row.label = self.label.take();
                self.push(Framework::Deepspeed, rank, row);
            }
        } else if let Some((_, label)) = line.split_once("see_memory_usage]") {
            const LABEL_CHARS_MAX: usize = 80;
            self.label = Some(label.trim().chars().take(LABEL_CHARS_MAX).collect());
        } else if line.contains("memory (MB) |") {
            if megatron(&mut row, line) {
                self.push(Framework::Megatron, rank, row);
            }
        } else if line.contains("max_reserved:") {
            let device = number_after(line, "dev").and_then(|device| u32::try_from(device).ok());
            if device.is_some() && stalloc(&mut row, line) {
                self.push(Framework::Stalloc, device, row);
            }
        } else {
            self.keyed(rank, row, line);
        }
    }

    /// Lines of `key: value` pairs, or of one such pair.
    fn keyed(&mut self, rank: Option<u32>, mut row: CurveRow, line: &str) {
        let size = |key: &str, unit| field(line, key, unit);
        row.active_peak = size("peak_memory_active", GIB);
        row.allocated_peak = size("peak_memory_alloc", GIB);
        row.reserved_peak = size("peak_memory_reserved", GIB);
        if row.allocated_peak.is_some() {
            row.step = number_after(line, "Step ");
            return self.push(Framework::Torchtune, rank, row);
        }
        row.allocated_peak = size("step_peak_memory_allocated_MB", MIB);
        row.reserved_peak = size("step_peak_memory_reserved_MB", MIB);
        if row.allocated_peak.is_some() {
            return self.push(Framework::Liger, rank, row);
        }
        row.allocated = size("MemAllocated", GIB);
        row.allocated_peak = size("MaxMemAllocated", GIB);
        if row.allocated_peak.is_some() {
            row.step = number_after(line, "global_step=");
            return self.push(Framework::DeepspeedTimer, rank, row);
        }
        let line_of = |framework: Framework, keys: [&str; 3]| {
            let sizes = keys.map(|key| size(key, GIB));
            sizes.iter().any(Option::is_some).then_some((framework, sizes))
        };
        let found = line_of(
            Framework::TorchtuneStats,
            ["GPU peak memory allocation", "GPU peak memory reserved", "GPU peak memory active"],
        )
        .or_else(|| {
            let keys = [
                "Max CUDA memory allocated was",
                "Max CUDA memory reserved was",
                "Peak active CUDA memory was",
            ];
            line_of(Framework::LlamaRecipes, keys)
        });
        if let Some((framework, sizes)) = found {
            // llama-recipes cuts the fraction off.
            let sizes = sizes.map(|size| match framework {
                Framework::LlamaRecipes => size.map(|size| Amount { error_bytes: GIB, ..size }),
                _ => size,
            });
            self.merge(framework, rank, &row, sizes);
        }
    }

    /// Adds a figure that stands in a line of its own to the newest report, or opens the next one
    /// if that has it already.
    fn merge(
        &mut self,
        framework: Framework,
        rank: Option<u32>,
        row: &CurveRow,
        [allocated, reserved, active]: [Option<Amount>; 3],
    ) {
        let newest = self.curve(framework, rank).and_then(|curve| curve.rows.last_mut());
        if let Some(newest) = newest {
            let is_taken = (allocated.is_some() && newest.allocated_peak.is_some())
                || (reserved.is_some() && newest.reserved_peak.is_some())
                || (active.is_some() && newest.active_peak.is_some());
            if !is_taken {
                newest.allocated_peak = newest.allocated_peak.or(allocated);
                newest.reserved_peak = newest.reserved_peak.or(reserved);
                newest.active_peak = newest.active_peak.or(active);
                return;
            }
        }
        let row = CurveRow {
            allocated_peak: allocated,
            reserved_peak: reserved,
            active_peak: active,
            ..row.clone()
        };
        self.push(framework, rank, row);
    }

    fn curve(&mut self, framework: Framework, rank: Option<u32>) -> Option<&mut ReferenceCurve> {
        self.curves.iter_mut().find(|curve| curve.framework == framework && curve.rank == rank)
    }

    fn push(&mut self, framework: Framework, rank: Option<u32>, row: CurveRow) {
        if let Some(curve) = self.curve(framework, rank) {
            curve.rows.push(row);
        } else if self.curves.len() < CURVES_MAX {
            self.curves.push(ReferenceCurve { framework, rank, rows: vec![row] });
        }
    }
}

/// `MA 4.96 GB         Max_MA 5.09 GB         CA 6.39 GB         Max_CA 6 GB`
fn deepspeed(row: &mut CurveRow, line: &str, max_ma: usize) -> bool {
    row.allocated = field(&line[..max_ma], "MA", GIB);
    row.allocated_peak = field(line, "Max_MA", GIB);
    row.reserved = field(line, "CA", GIB);
    row.reserved_peak = field(line, "Max_CA", GIB);
    row.allocated.is_some() && row.reserved.is_some()
}

/// `(after 3 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.0 | reserved: ...`
fn megatron(row: &mut CurveRow, line: &str) -> bool {
    row.step = number_after(line, "after ");
    for cell in line.split('|') {
        let Some((key, value)) = cell.split_once(':') else { continue };
        let value = || sized(value, MIB);
        match key.trim() {
            "allocated" => row.allocated = value(),
            "max allocated" => row.allocated_peak = value(),
            "reserved" => row.reserved = value(),
            "max reserved" => row.reserved_peak = value(),
            _ => {}
        }
    }
    row.allocated.is_some() && row.reserved.is_some()
}

/// `dev0, iter3 : max_reserved:9.13, max_allocated:8.97, utilization:98.28%`
fn stalloc(row: &mut CurveRow, line: &str) -> bool {
    row.step = number_after(line, "iter");
    row.reserved_peak = field(line, "max_reserved", GIB);
    row.allocated_peak = field(line, "max_allocated", GIB);
    row.reserved_peak.is_some() && row.allocated_peak.is_some()
}

/// The size behind a key that stands as a word of its own; in `unit_bytes` if no unit follows.
fn field(line: &str, key: &str, unit_bytes: u64) -> Option<Amount> {
    line.match_indices(key).find_map(|(at, _)| {
        let is_word = !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let value = line[at + key.len()..].trim_start_matches([' ', ':', '=', '\'', '"']);
        // `MA` is no key in `MAX 3`, nor is one that its value touches.
        let is_apart = value.len() < line.len() - at - key.len();
        if is_word && is_apart { sized(value, unit_bytes) } else { None }
    })
}

/// The size that a text begins with.
fn sized(text: &str, unit_bytes: u64) -> Option<Amount> {
    let (number, _) = split_number(text.trim_start())?;
    amount(number.trim_end_matches('.'), unit_bytes)?.size()
}

/// The whole number behind the first of some words that one follows.
fn number_after(line: &str, words: &str) -> Option<u64> {
    line.match_indices(words).find_map(|(at, _)| {
        let rest = line[at + words.len()..].trim_start();
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(amount: Option<Amount>) -> u64 {
        amount.expect("told").bytes
    }

    #[test]
    fn one_line_of_each_framework() {
        let text = "\
            [utils.py:822:see_memory_usage] before forward 1\n\
            [utils.py:827:see_memory_usage] MA 4.5 GB         Max_MA 5.25 GB         CA 6.5 GB \
                Max_CA 7 GB\n\
            [utils.py:832:see_memory_usage] CPU Virtual Memory:  used = 50.5 GB, percent = 40.2%\n\
            [Rank 2] (after 20 iterations) memory (MB) | allocated: 3270.5 | max allocated: 5670.25 \
                | reserved: 6406.0 | max reserved: 6410.0\n\
            Step 7 | loss:0.55 lr:2e-05 peak_memory_active:47.5 peak_memory_alloc:52.25 \
                peak_memory_reserved:53.0\n\
            dev1, iter3 : max_reserved:9.50, max_allocated:8.25, utilization:86.84%\n\
            {'loss': 75.1, 'step_peak_memory_allocated_MB': 26279.25, \
                'total_peak_memory_allocated_MB': 2.0, 'step_peak_memory_reserved_MB': 47172.0}\n\
            global_step=110, CurrSamplesPerSec=1.9, MemAllocated=17.5GB, MaxMemAllocated=54.25GB";
        let curves = read_step_logs(text);
        let frameworks: Vec<Framework> = curves.iter().map(|curve| curve.framework).collect();
        let expected = [
            Framework::Deepspeed,
            Framework::Megatron,
            Framework::Torchtune,
            Framework::Stalloc,
            Framework::Liger,
            Framework::DeepspeedTimer,
        ];
        assert_eq!(frameworks, expected);
        let rows: Vec<&CurveRow> = curves.iter().map(|curve| &curve.rows[0]).collect();
        assert_eq!(rows[0].label.as_deref(), Some("before forward 1"));
        assert_eq!(bytes(rows[0].allocated), 9 * GIB / 2);
        assert_eq!(bytes(rows[0].reserved), 13 * GIB / 2);
        assert_eq!(rows[0].reserved_peak, Some(Amount { bytes: 7 * GIB, error_bytes: GIB / 2 }));
        assert_eq!((curves[1].rank, rows[1].step), (Some(2), Some(20)));
        assert_eq!(bytes(rows[1].allocated_peak), 5670 * MIB + MIB / 4);
        assert_eq!(bytes(rows[1].reserved), 6406 * MIB);
        assert_eq!((rows[2].step, bytes(rows[2].active_peak)), (Some(7), 95 * GIB / 2));
        assert_eq!((curves[3].rank, rows[3].step), (Some(1), Some(3)));
        assert_eq!(bytes(rows[4].reserved_peak), 47_172 * MIB);
        assert_eq!((rows[5].step, bytes(rows[5].allocated)), (Some(110), 35 * GIB / 2));
    }

    #[test]
    fn figures_in_lines_of_their_own_make_one_report() {
        let text = "\
Max CUDA memory allocated was 18 GB
Max CUDA memory reserved was 28 GB
Peak active CUDA memory was 18 GB
Cuda Malloc retires : 0
Max CUDA memory allocated was 19 GB
Max CUDA memory reserved was 28 GB";
        let curves = read_step_logs(text);
        assert_eq!((curves.len(), curves[0].rows.len()), (1, 2));
        assert_eq!(curves[0].rows[0].reserved_peak.expect("told").error_bytes, GIB);
        assert_eq!(bytes(curves[0].rows[1].allocated_peak), 19 * GIB);
        assert_eq!(curves[0].rows[1].active_peak, None);
    }

    #[test]
    fn other_lines_are_no_reports() {
        let text = "MAX 3 Max_MA\nmemory (MB) | x: 1\nmax_reserved:1\nmemory_alloc: 3\n\
                    peak_memory_alloc:99999999999999999999999";
        assert!(read_step_logs(text).is_empty());
    }
}
