//! Figures as SVG.
//!
//! [`packing_svg`] draws a packing, [`experiment_svg`] what an experiment found. The one design
//! decision of the latter: a figure is drawn in tenths of a millimetre at the size at which it is
//! printed, with fonts that every printer has and letters whose widths are known here, so that
//! nothing overlaps and the same rows give the same bytes everywhere.
//!
//! ```text
//!   Rows, FigureSpec ──select──> places with numbers ──> bars | xy | fields ──canvas──> SVG
//! ```

mod bars;
mod canvas;
mod fields;
mod legend;
mod packing;
mod scale;
mod xy;

pub use packing::{PackingLabels, packing_svg};
pub(super) use scale::{nice_step, round_marks};

use super::select::{self, Points, SelectError};
use crate::experiment::{FigureKind, FigureSpec, Rows, Shown, Value};
use canvas::SERIES;

/// A figure could not be drawn.
#[derive(Debug, thiserror::Error)]
pub enum FigureError {
    /// The drawing library refused.
    #[error("the figure could not be drawn: {0}")]
    Drawing(String),
    /// The rows do not make this figure.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// There is too much for one figure.
    #[error("{0}")]
    TooMuch(String),
}

impl FigureError {
    pub(super) fn new(error: impl std::fmt::Display) -> FigureError {
        FigureError::Drawing(error.to_string())
    }
}

/// The rows of a figure whose places are a name and, perhaps, a group that has a colour.
struct Grouped<'a> {
    shown: &'a Shown,
    /// The rows that pass the figure's filters.
    passing: Vec<&'a [Value]>,
    points: Points,
    /// Names of the groups in the order of the rows; one without a name if there are none.
    groups: Vec<String>,
}

/// Selects what a figure shows. `what` says what its colours stand for.
///
/// # Errors
/// If no row is left, several stand at one place, or there are more groups than colours.
fn grouped<'a>(
    spec: &'a FigureSpec,
    rows: &'a Rows,
    what: &str,
) -> Result<Grouped<'a>, FigureError> {
    let nothing = || SelectError::Nothing(spec.name.clone());
    let shown = spec.value.as_ref().ok_or_else(nothing)?;
    let passing = select::passing(rows, &spec.filters);
    if passing.is_empty() {
        return Err(nothing().into());
    }
    let places: Vec<&str> = [&spec.x].into_iter().chain(&spec.group).map(String::as_str).collect();
    let points = Points::new(rows, &passing, &places, shown)?;
    let groups = match &spec.group {
        Some(group) => select::names(rows, &passing, group),
        None => vec![String::new()],
    };
    if groups.len() > SERIES.len() {
        return Err(FigureError::TooMuch(format!(
            "figure {}: {} {what}, but no more than {} colours can be told apart: add a filter",
            spec.name,
            groups.len(),
            SERIES.len()
        )));
    }
    Ok(Grouped { shown, passing, points, groups })
}

/// Draws a figure of an experiment.
///
/// # Errors
/// If no row is left for it, several rows fall on one place, or there is more than a figure can
/// show.
pub fn experiment_svg(spec: &FigureSpec, rows: &Rows) -> Result<String, FigureError> {
    match spec.kind {
        FigureKind::Bars => bars::draw(spec, rows),
        FigureKind::Lines | FigureKind::Scatter => xy::draw(spec, rows),
        FigureKind::Heatmap => fields::heatmap(spec, rows),
        FigureKind::Frontier => fields::frontier(spec, rows),
    }
}
