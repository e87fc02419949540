//! The files of STAlloc's tool chain: plan, time windows, spare addresses, lists of its planner.
//!
//! All are lines of fields with blanks between. What a plan says of memory:
//!
//! ```text
//!   bytes
//!   reserved ┌──────────────────────────────┐ static_reserved_bytes
//!            │ activations: planned offsets │      ┌ spare in window moe-B-3
//!            ├──────────────────────────────┤      │
//!            │ optimizer states             │ never spare
//!            ├──────────────────────────────┤
//!          0 │ weights and gradients        │ never spare
//!            └──────────────────────────────┘
//! ```
//!
//! Numbers are checked when they are read, and none of them sizes anything: what a reader holds
//! grows with the lines that are really there.

use std::fmt::Write as _;
use std::ops::Range;

use crate::plan::BYTES_MAX;

/// Every size is rounded up to a multiple of this many bytes, and offsets are multiples of it.
pub const ALIGNMENT_BYTES: u64 = 512;

/// A file is wrong at a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {found}; expected {expected}")]
pub struct FileError {
    /// Line in the file, from 1.
    pub line: u64,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: &'static str,
}

/// One static request in a plan, in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRequest {
    /// Where it lies, from the base of the static pool; nothing (-1 in the file) if it was not
    /// planned, as for requests of the third iteration.
    pub offset_bytes: Option<u64>,
    /// Bytes as requested, before rounding: a request at run time must have this very size.
    pub size_bytes: u64,
}

/// STAlloc's plan, `output/plan/dev_<D>.txt`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanFile {
    /// Requests that are never freed although they were made in the first iteration, as numbers of
    /// mallocs of more than 512 bytes, counted from 0. They are left to the caching allocator.
    pub unreleased: Vec<u64>,
    /// Peak of all static requests, each rounded up to 512 bytes.
    pub static_max_allocated_bytes: u64,
    /// Size of the static pool.
    pub static_reserved_bytes: u64,
    /// Static requests of the program's beginning and its first iteration (n0).
    pub first_requests: u64,
    /// Static requests of the second iteration, which stands for all later ones (n1).
    pub steady_requests: u64,
    /// Peak of the requests of at most 512 bytes, each counted as 512.
    pub var_peak_bytes: u64,
    /// A line a static request; those after the first n0 + n1 are not read at run time.
    pub requests: Vec<PlannedRequest>,
}

impl PlanFile {
    /// Reads a plan.
    ///
    /// # Errors
    /// The first wrong line: a number missing or too large, an offset that is no multiple of 512 or
    /// ends outside the static pool, fewer requests than the counts say.
    pub fn parse(text: &str) -> Result<PlanFile, FileError> {
        let mut lines = Lines::new(text);
        let mut plan = PlanFile::default();
        let expected = "numbers of mallocs with blanks between, or an empty line";
        let first = lines.next().ok_or_else(|| lines.end(expected))?;
        for field in first.fields() {
            plan.unreleased.push(first.number(field, u64::MAX, expected)?);
        }
        let expected = "max_allocated reserved n0 n1 var_peak, five numbers of less than 2^60";
        let second = lines.next().ok_or_else(|| lines.end(expected))?;
        let [max_allocated, reserved, first_requests, steady_requests, var_peak] =
            second.numbers(BYTES_MAX, expected)?;
        plan.static_max_allocated_bytes = max_allocated;
        plan.static_reserved_bytes = reserved;
        plan.first_requests = first_requests;
        plan.steady_requests = steady_requests;
        plan.var_peak_bytes = var_peak;
        for line in &mut lines {
            plan.requests.push(planned_request(&line, reserved)?);
        }
        if (plan.requests.len() as u64) < first_requests + steady_requests {
            return Err(lines.end("a line `offset size` for each of the n0 + n1 requests"));
        }
        Ok(plan)
    }

    /// The plan as a file holds it.
    pub fn to_text(&self) -> String {
        let ids: Vec<String> = self.unreleased.iter().map(u64::to_string).collect();
        let mut text = ids.join(" ");
        let numbers = [
            self.static_max_allocated_bytes,
            self.static_reserved_bytes,
            self.first_requests,
            self.steady_requests,
            self.var_peak_bytes,
        ];
        let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
        text.push('\n');
        text.push_str(&numbers.join(" "));
        text.push('\n');
        for request in &self.requests {
            match request.offset_bytes {
                Some(offset_bytes) => line(&mut text, &[offset_bytes, request.size_bytes]),
                None => {
                    text.push_str("-1 ");
                    line(&mut text, &[request.size_bytes]);
                }
            }
        }
        text
    }
}

fn planned_request(line: &Line<'_>, reserved_bytes: u64) -> Result<PlannedRequest, FileError> {
    let expected = "offset and size in bytes; -1 for an offset that was not planned";
    let [offset, size] = line.exactly(expected)?;
    let size_bytes = line.number(size, BYTES_MAX, expected)?;
    if size_bytes == 0 {
        return Err(line.wrong("a size of at least 1 byte"));
    }
    if offset == "-1" {
        return Ok(PlannedRequest { offset_bytes: None, size_bytes });
    }
    let offset_bytes = line.number(offset, BYTES_MAX, expected)?;
    if !offset_bytes.is_multiple_of(ALIGNMENT_BYTES) {
        return Err(line.wrong("an offset that is a multiple of 512"));
    }
    if offset_bytes + size_bytes > reserved_bytes {
        return Err(line.wrong("a request that ends inside the static pool"));
    }
    Ok(PlannedRequest { offset_bytes: Some(offset_bytes), size_bytes })
}

/// What is free throughout a time window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpareWindow {
    /// Layer that opens the window, as `mlp-F-3`.
    pub label: String,
    /// Free addresses from the base of the static pool, ascending and disjoint; may be none.
    pub free_bytes: Vec<Range<u64>>,
}

/// Spare addresses of the static pool, `dev<D>_cross_spare_addr.txt` or `dev<D>_intra_spare_addr.txt`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpareFile {
    /// First line of the cross file: `mlp` labels of iteration 0 and of iteration 1. The intra file
    /// has none, but for the bogus one that a window without a label leaves there.
    pub layers: Option<(u64, u64)>,
    /// The windows, a line each.
    pub windows: Vec<SpareWindow>,
}

impl SpareFile {
    /// Reads spare addresses. Two numbers on the first line are the counts of layers.
    ///
    /// # Errors
    /// The first wrong line.
    pub fn parse(text: &str) -> Result<SpareFile, FileError> {
        let mut file = SpareFile::default();
        for line in Lines::new(text).filter(|line| !line.is_empty()) {
            match line.layers()? {
                Some(layers) => file.layers = Some(layers),
                None => file.windows.push(spare_window(&line)?),
            }
        }
        Ok(file)
    }

    /// The file's text.
    pub fn to_text(&self) -> String {
        let mut text = layers_line(self.layers);
        for window in &self.windows {
            text.push_str(&window.label);
            for range in &window.free_bytes {
                // Writing to a string cannot fail.
                let _ = write!(text, " ({},{})", range.start, range.end);
            }
            text.push('\n');
        }
        text
    }
}

fn spare_window(line: &Line<'_>) -> Result<SpareWindow, FileError> {
    let expected = "a label and ranges (start,end) of bytes, ascending and disjoint";
    // The tool's own writer may leave a blank inside the brackets.
    let (label, ranges) =
        line.text.trim().split_once(char::is_whitespace).unwrap_or((line.text.trim(), ""));
    let mut window = SpareWindow { label: label.to_owned(), free_bytes: Vec::new() };
    let mut rest = ranges.trim();
    while !rest.is_empty() {
        let inside = rest.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        let (range, after) = inside.ok_or_else(|| line.wrong(expected))?;
        let (start, end) = range.split_once(',').ok_or_else(|| line.wrong(expected))?;
        let start = line.number(start.trim(), BYTES_MAX, expected)?;
        let end = line.number(end.trim(), BYTES_MAX, expected)?;
        let before = window.free_bytes.last().map_or(0, |range| range.end);
        if start < before || end < start {
            return Err(line.wrong(expected));
        }
        window.free_bytes.push(start..end);
        rest = after.trim_start();
    }
    Ok(window)
}

/// A window of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interval {
    /// Layer that opens it. Empty for requests outside any layer (intra file only).
    pub label: String,
    /// In the cross file the layer of the backward pass that closes it.
    pub backward_label: Option<String>,
    /// First event of it, counted in mallocs and frees.
    pub start: u64,
    /// Its last event. A layer with one request keeps 0 here, which says that the window is empty.
    pub end: u64,
}

/// Windows of time, `dev<D>_cross_interval.txt` or `dev<D>_intra_interval.txt`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntervalFile {
    /// First line of the cross file: `mlp` labels of iteration 0 and of iteration 1.
    pub layers: Option<(u64, u64)>,
    /// The windows, a line each.
    pub intervals: Vec<Interval>,
}

impl IntervalFile {
    /// Reads windows. Two numbers are the counts of layers on the first line, and a window without
    /// a label below it.
    ///
    /// # Errors
    /// The first wrong line.
    pub fn parse(text: &str) -> Result<IntervalFile, FileError> {
        let mut file = IntervalFile::default();
        for line in Lines::new(text).filter(|line| !line.is_empty()) {
            match line.layers()? {
                // The nameless line begins with the blank that follows its label.
                Some(layers) if !line.text.starts_with(' ') => file.layers = Some(layers),
                _ => file.intervals.push(interval(&line)?),
            }
        }
        Ok(file)
    }

    /// The file's text.
    pub fn to_text(&self) -> String {
        let mut text = layers_line(self.layers);
        for interval in &self.intervals {
            text.push_str(&interval.label);
            text.push(' ');
            if let Some(backward) = &interval.backward_label {
                text.push_str(backward);
                text.push(' ');
            }
            line(&mut text, &[interval.start, interval.end]);
        }
        text
    }
}

fn interval(line: &Line<'_>) -> Result<Interval, FileError> {
    let expected = "one or two labels, then start and end";
    let fields: Vec<&str> = line.fields().collect();
    let (labels, start, end) = match fields.as_slice() {
        [labels @ .., start, end] if labels.len() <= 2 => (labels, *start, *end),
        _ => return Err(line.wrong(expected)),
    };
    Ok(Interval {
        label: labels.first().map_or_else(String::new, |&label| label.to_owned()),
        backward_label: labels.get(1).map(|&label| label.to_owned()),
        start: line.number(start, u64::MAX, expected)?,
        end: line.number(end, u64::MAX, expected)?,
    })
}

/// A request as the planner program `allocator.py` gets it: `start end size`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListedRequest {
    /// Event of its malloc.
    pub start: u64,
    /// Event of its free.
    pub end: u64,
    /// Bytes as requested.
    pub size_bytes: u64,
}

/// The planner's input, a request a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestFile {
    /// Requests in order.
    pub requests: Vec<ListedRequest>,
}

impl RequestFile {
    /// Reads the planner's input.
    ///
    /// # Errors
    /// The first wrong line.
    pub fn parse(text: &str) -> Result<RequestFile, FileError> {
        let expected = "start, end and size, with the end after the start and at least 1 byte";
        let lines = Lines::new(text).filter(|line| !line.is_empty());
        let requests = lines.map(|line| {
            let [start, end, size_bytes] = line.numbers(BYTES_MAX, expected)?;
            listed(&line, ListedRequest { start, end, size_bytes }, expected)
        });
        Ok(RequestFile { requests: requests.collect::<Result<_, _>>()? })
    }

    /// The file's text.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for request in &self.requests {
            line(&mut text, &[request.start, request.end, request.size_bytes]);
        }
        text
    }
}

/// The planner's output: the peak, then `start end size offset` a request, sorted by start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementFile {
    /// End of the highest request, from the first activation's place.
    pub peak_bytes: u64,
    /// Requests with their offsets from the same place.
    pub placed: Vec<(ListedRequest, u64)>,
}

impl PlacementFile {
    /// Reads the planner's output.
    ///
    /// # Errors
    /// The first wrong line, or a request that ends above the peak.
    pub fn parse(text: &str) -> Result<PlacementFile, FileError> {
        let mut lines = Lines::new(text);
        let expected = "the peak in bytes";
        let first = lines.next().ok_or_else(|| lines.end(expected))?;
        let [peak_bytes] = first.numbers(BYTES_MAX, expected)?;
        let mut file = PlacementFile { peak_bytes, placed: Vec::new() };
        let expected = "start, end, size and offset, which ends at most at the peak";
        for line in lines.filter(|line| !line.is_empty()) {
            let [start, end, size_bytes, offset_bytes] = line.numbers(BYTES_MAX, expected)?;
            let request = listed(&line, ListedRequest { start, end, size_bytes }, expected)?;
            if offset_bytes + size_bytes > peak_bytes {
                return Err(line.wrong(expected));
            }
            file.placed.push((request, offset_bytes));
        }
        Ok(file)
    }

    /// The file's text.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        line(&mut text, &[self.peak_bytes]);
        for (request, offset_bytes) in &self.placed {
            line(&mut text, &[request.start, request.end, request.size_bytes, *offset_bytes]);
        }
        text
    }
}

fn listed(
    line: &Line<'_>,
    request: ListedRequest,
    expected: &'static str,
) -> Result<ListedRequest, FileError> {
    let good = request.start < request.end && request.size_bytes > 0;
    good.then_some(request).ok_or_else(|| line.wrong(expected))
}

/// Adds a line of numbers.
fn line(text: &mut String, numbers: &[u64]) {
    for (at, number) in numbers.iter().enumerate() {
        if at > 0 {
            text.push(' ');
        }
        // Writing to a string cannot fail.
        let _ = write!(text, "{number}");
    }
    text.push('\n');
}

fn layers_line(layers: Option<(u64, u64)>) -> String {
    layers.map_or_else(String::new, |(first, steady)| format!("{first} {steady}\n"))
}

/// Lines with their numbers.
struct Lines<'a> {
    lines: std::str::Lines<'a>,
    number: u64,
}

struct Line<'a> {
    text: &'a str,
    number: u64,
}

impl<'a> Lines<'a> {
    fn new(text: &'a str) -> Lines<'a> {
        Lines { lines: text.lines(), number: 0 }
    }

    /// The error of a file that ends too early.
    fn end(&self, expected: &'static str) -> FileError {
        FileError { line: self.number + 1, found: "the file ends".to_owned(), expected }
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = Line<'a>;

    fn next(&mut self) -> Option<Line<'a>> {
        let text = self.lines.next()?;
        self.number += 1;
        Some(Line { text, number: self.number })
    }
}

impl<'a> Line<'a> {
    fn is_empty(&self) -> bool {
        self.text.trim().is_empty()
    }

    fn fields(&self) -> std::str::SplitWhitespace<'a> {
        self.text.split_whitespace()
    }

    fn wrong(&self, expected: &'static str) -> FileError {
        let shown: String = self.text.chars().take(60).collect();
        FileError { line: self.number, found: format!("{shown:?}"), expected }
    }

    fn number(&self, field: &str, max: u64, expected: &'static str) -> Result<u64, FileError> {
        // `parse` alone would take a plus sign.
        let digits = field.bytes().all(|byte| byte.is_ascii_digit());
        let number = if digits { field.parse().ok() } else { None };
        number.filter(|&number: &u64| number <= max).ok_or_else(|| self.wrong(expected))
    }

    /// Exactly so many fields.
    fn exactly<const N: usize>(&self, expected: &'static str) -> Result<[&'a str; N], FileError> {
        let fields: Vec<&str> = self.fields().collect();
        fields.try_into().map_err(|_| self.wrong(expected))
    }

    /// Exactly so many numbers.
    fn numbers<const N: usize>(
        &self,
        max: u64,
        expected: &'static str,
    ) -> Result<[u64; N], FileError> {
        let fields: [&str; N] = self.exactly(expected)?;
        let mut numbers = [0; N];
        for (number, field) in numbers.iter_mut().zip(fields) {
            *number = self.number(field, max, expected)?;
        }
        Ok(numbers)
    }

    /// The counts of layers, if this is the first line and two numbers.
    fn layers(&self) -> Result<Option<(u64, u64)>, FileError> {
        let fields: Vec<&str> = self.fields().collect();
        let numbers =
            |field: &&str| !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit());
        if self.number != 1 || fields.len() != 2 || !fields.iter().all(numbers) {
            return Ok(None);
        }
        let [first, steady] = self.numbers(u64::MAX, "two counts of layers of less than 2^64")?;
        Ok(Some((first, steady)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The plan that the tool writes for golden vector E of its description.
    const PLAN_E: &str = include_str!("../../../tests/golden/stalloc_plan_e.txt");

    #[test]
    fn a_plan_is_read_and_written_to_the_letter() {
        let plan = PlanFile::parse(PLAN_E).expect("reads");
        assert_eq!((plan.first_requests, plan.steady_requests), (4, 3));
        assert_eq!(plan.requests[3].offset_bytes, Some(12288));
        assert_eq!(plan.requests[9], PlannedRequest { offset_bytes: None, size_bytes: 1024 });
        assert_eq!(plan.to_text(), PLAN_E);
        let with_ids = PLAN_E.replacen('\n', "3 17\n", 1);
        let plan = PlanFile::parse(&with_ids).expect("reads");
        assert_eq!(plan.unreleased, [3, 17]);
        assert_eq!(plan.to_text(), with_ids);
    }

    #[test]
    fn a_wrong_plan_names_its_line() {
        let error = |text: &str| PlanFile::parse(text).expect_err("must fail");
        assert_eq!(error("").line, 1);
        assert_eq!(error("\n").line, 2);
        assert_eq!(error("x\n0 0 0 0 0\n").line, 1);
        assert_eq!(error("\n1 2 3 4\n").line, 2);
        assert_eq!(error("\n512 512 1 0 0\n0 513\n").line, 3, "ends outside the pool");
        assert_eq!(error("\n1024 1024 1 0 0\n100 512\n").line, 3, "not aligned");
        assert_eq!(error("\n512 512 1 1 0\n0 512\n").line, 4, "one request too few");
        assert_eq!(error("\n512 512 1 0 0\n0 0\n").line, 3, "empty");
        assert_eq!(error("\n512 512 1 0 0\n-2 512\n").line, 3);
        assert_eq!(error("\n512 512 1 0 0\n+0 512\n").line, 3);
        let huge = format!("\n512 512 {0} {0} 0\n", BYTES_MAX);
        assert_eq!(error(&huge).line, 3, "counts size nothing");
        assert_eq!(error("\n99999999999999999999 1 1 1 0\n").line, 2);
    }

    #[test]
    fn spare_addresses_are_read_and_written_to_the_letter() {
        let text = "4 6\nmlp-F-0 (0,512) (1024,4096)\nmlp-F-1\n";
        let file = SpareFile::parse(text).expect("reads");
        assert_eq!(file.layers, Some((4, 6)));
        assert_eq!(file.windows[0].free_bytes, [0..512, 1024..4096]);
        assert_eq!(file.windows[1].free_bytes, Vec::<Range<u64>>::new());
        assert_eq!(file.to_text(), text);
        for bad in ["a (1,", "a (5,1)", "a (0,9) (5,12)", "a 1,2", "a (1;2)", "a (-1,2)"] {
            assert_eq!(SpareFile::parse(bad).expect_err(bad).line, 1, "{bad}");
        }
    }

    #[test]
    fn windows_are_read_and_written_to_the_letter() {
        let cross = "1 1\nmlp-F-0 mlp-B-1 10 90\nmlp-F-2 mlp-B-3 110 190\n";
        let file = IntervalFile::parse(cross).expect("reads");
        assert_eq!(file.intervals[1].backward_label.as_deref(), Some("mlp-B-3"));
        assert_eq!(file.to_text(), cross);
        let intra = " 3 40\nmoe-F-0 5 20\nmoe-F-1 7 0\n";
        let file = IntervalFile::parse(intra).expect("reads");
        assert_eq!(file.layers, None, "a window without a label is no count of layers");
        assert_eq!(file.intervals[0].label, "");
        assert_eq!(file.to_text(), intra);
        assert_eq!(IntervalFile::parse("1 1\na b c 1 2\n").expect_err("labels").line, 2);
    }

    #[test]
    fn the_planners_lists_are_read_and_written_to_the_letter() {
        let input = "1 20 4000\n2 9 2000\n";
        assert_eq!(RequestFile::parse(input).expect("reads").to_text(), input);
        let output = "6144\n1 20 4000 0\n2 9 2000 4096\n";
        assert_eq!(PlacementFile::parse(output).expect("reads").to_text(), output);
        assert_eq!(RequestFile::parse("1 1 8\n").expect_err("no life").line, 1);
        assert_eq!(RequestFile::parse("1 2 0\n").expect_err("no size").line, 1);
        assert_eq!(PlacementFile::parse("").expect_err("no peak").line, 1);
        assert_eq!(PlacementFile::parse("512\n1 2 512 512\n").expect_err("too high").line, 2);
    }
}
