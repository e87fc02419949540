//! One trace through one allocator or several, as a page for a browser.
//!
//! The page is one file: it asks no network and opens from a disk. Whatever a reader must know
//! stands in it as text, tables and SVG; a script adds a memory map to walk about in, a time line
//! that follows it, and tables that sort.
//!
//! ```text
//!   Page ──┬─ sections ─> headline, tables, split, pins   HTML, every string escaped
//!          ├─ figures ──> time line, comparison, map      SVG: in the page, and beside it for print
//!          ├─ data ─────> columns of numbers, packed      JSON in the page; read by
//!          └─ script/*.js, page.css                       the one script that the page may run
//! ```
//!
//! The one design decision: names in a trace may come from anybody, so they are never trusted twice.
//! They are escaped where they stand, and the page's own policy forbids to load anything and to run
//! any script but the one whose hash it names ([`sha256`]).
//!
//! Nothing that a clock measured is in a page: the same traces give the same bytes.

mod data;
mod figures;
mod pack;
mod sections;
mod sha256;
mod tables;
mod unused;

use std::borrow::Cow;

use self::data::Data;
use self::figures::Medium;
use super::figure::FigureError;
use super::text::printable;
use crate::engine::{Compared, Observed};
use crate::metrics::Moment;
use crate::trace::Trace;
use crate::units::Bytes;

const STYLE: &str = include_str!("page.css");
/// Files of one script, in a function of their own.
const SCRIPT: &str = concat!(
    "(() => {\n",
    include_str!("script/data.js"),
    include_str!("script/view.js"),
    include_str!("script/draw.js"),
    include_str!("script/map.js"),
    include_str!("script/act.js"),
    "})();\n"
);

/// Most blocks that a map draws one by one: more make a browser slow.
const MAP_BLOCKS_MAX: usize = 120_000;
/// The same of all maps of a page together, each of which is about twenty bytes of it.
const PAGE_BLOCKS_MAX: usize = 200_000;
/// Fewest that each map has.
const MAP_BLOCKS_MIN: usize = 12_000;

/// How many blocks each map of a page with so many maps may keep ([`Observe::map_blocks`]).
///
/// [`Observe::map_blocks`]: crate::engine::Observe::map_blocks
pub fn blocks_per_map(maps: usize) -> usize {
    (PAGE_BLOCKS_MAX / maps.max(1)).clamp(MAP_BLOCKS_MIN, MAP_BLOCKS_MAX)
}

/// What a page is about.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// The settings string (`PYTORCH_CUDA_ALLOC_CONF`) in force, if any.
    pub settings: Option<&'a str>,
    /// The allocators, in the order in which to show them.
    pub cells: &'a [Cell<'a>],
    /// Which of them is shown at the beginning.
    pub shown: usize,
}

/// One allocator of a page.
#[derive(Clone, Debug)]
pub struct Cell<'a> {
    /// What to call it: its name, with the capacity where there are several.
    pub label: String,
    /// Its result, with envelope, steps and map if they were kept.
    pub observed: &'a Observed,
    /// What it held at the moment that its split is about.
    pub moment: Option<Moment>,
    /// What shows only beside others, for `compare`.
    pub compared: Option<&'a Compared>,
}

impl Cell<'_> {
    /// Events that its figures go over. Those of `chunk` are what its manager asked for, not those
    /// of the trace.
    fn events(&self, trace: &Trace) -> u64 {
        let map = self.observed.map.as_ref();
        map.map_or(trace.events.len() as u64, |map| map.events)
    }
}

/// A page and its figures.
#[derive(Clone, Debug)]
pub struct PageFiles {
    /// The page.
    pub html: String,
    /// The time line of the allocator shown, 180 mm wide.
    pub timeline_svg: String,
    /// A bar an allocator, 180 mm wide; if there are several.
    pub comparison_svg: Option<String>,
    /// The largest blocks of that allocator's map, 180 mm wide; if it has a map.
    pub map_svg: Option<String>,
}

/// A page could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// There is nothing to show.
    #[error("no allocator could be replayed, so there is nothing to report")]
    Empty,
    /// A figure could not be drawn.
    #[error(transparent)]
    Figure(#[from] FigureError),
    /// The data could not be written; plain data always can.
    #[error("the data of the page: {0}")]
    Data(#[from] serde_json::Error),
}

/// Makes a page.
///
/// # Errors
/// If it has no cells, or the drawing library refuses.
pub fn page(page: &Page<'_>) -> Result<PageFiles, PageError> {
    let shown = page.cells.get(page.shown).ok_or(PageError::Empty)?;
    let map = shown.observed.map.as_ref();
    let comparison = |medium| match page.cells {
        [_] => Ok(None),
        cells => figures::comparison(cells, medium).map(Some),
    };
    let statics = sections::Figures {
        timeline: figures::timeline(page.trace, shown, Medium::Page)?,
        comparison: comparison(Medium::Page)?,
        map: map.map(|map| figures::map(map, Medium::Page)).transpose()?,
    };
    Ok(PageFiles {
        html: document(&sections::title(page), &sections::body(page, &statics), page)?,
        timeline_svg: figures::timeline(page.trace, shown, Medium::Paper)?,
        comparison_svg: comparison(Medium::Paper)?,
        map_svg: map.map(|map| figures::map(map, Medium::Paper)).transpose()?,
    })
}

fn document(title: &str, body: &str, page: &Page<'_>) -> Result<String, PageError> {
    let data = Data::of(page).json()?;
    let hash = pack::base64(&sha256::sha256(SCRIPT.as_bytes()));
    Ok(format!(
        "{}<body>\n{body}<script type=\"application/json\" id=\"data\">{data}</script>\n\
         <script>{SCRIPT}</script>\n</body>\n</html>\n",
        head(title, &format!("script-src 'sha256-{hash}'; "))
    ))
}

/// All before the body. `scripts` is the part of the policy that is about them.
fn head(title: &str, scripts: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; {scripts}\
         style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n\
         <meta name=\"generator\" content=\"fraglab {}\">\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n",
        env!("CARGO_PKG_VERSION"),
        escaped(title)
    )
}

/// One page of several, for their index.
#[derive(Clone, Debug)]
pub struct IndexEntry {
    /// Address of the page, relative to the index.
    pub href: String,
    /// What the trace is called.
    pub name: String,
    /// The results: one an allocator.
    pub results: Vec<crate::engine::RunResult>,
}

/// A page that leads to the pages of several traces.
pub fn index(entries: &[IndexEntry]) -> String {
    let body = sections::index(entries);
    format!("{}<body>\n{body}</body>\n</html>\n", head("fraglab", ""))
}

/// Text from a file as text of a figure: no control characters, and none that XML does not allow.
fn text_of(text: &str) -> Cow<'_, str> {
    let text = printable(text);
    if text.contains(['\u{fffe}', '\u{ffff}']) {
        return Cow::Owned(text.replace(['\u{fffe}', '\u{ffff}'], ""));
    }
    text
}

/// Text from a file as text of a page, or as the value of an attribute between quotes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            _ => out.push(c),
        }
    }
    out
}

/// A size with its exact bytes behind it: `72.69 GiB`, and 78,052,851,712 bytes under the pointer.
fn size(bytes: u64) -> String {
    let exact = crate::report::text::grouped(bytes);
    format!("<span title=\"{exact} bytes\">{}</span>", Bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_trace_is_no_markup() {
        let hostile = "<img src=x onerror='alert(1)'>\"&\u{202e}";
        let shown = "&lt;img src=x onerror=&#39;alert(1)&#39;&gt;&quot;&amp;";
        assert_eq!(escaped(hostile), shown);
    }

    #[test]
    fn a_page_runs_one_script_only() {
        let head = head("a </title> b", "");
        assert!(
            head.contains("default-src 'none'") && head.contains("a &lt;/title&gt; b"),
            "{head}"
        );
        // The script stands between tags as it is.
        assert!(!SCRIPT.contains("</") && !STYLE.contains("</"));
    }
}
