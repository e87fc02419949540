//! PatrickStar's chunk manager against the figures of specs/patrickstar.md, section 8.
//!
//! Figures marked [run] there came from the published control code, with its surprises: a test
//! says which of them its case needs, and where a mended manager gives the same, tests that too.

mod budgets;
mod distributed;
mod published;
mod quirks;
pub(crate) mod scenario;
mod shapes;
mod single;
