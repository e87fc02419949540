//! STAlloc's planners and files (EuroSys '26), rebuilt from a description of its published tool.
//!
//! Its files are kept to the letter, so that plans can be exchanged and compared with the tool's:
//!
//! ```text
//!   trace ──synthesis──> requests ──size_classes | group──> offsets
//!                          │ ^                                │
//!                 dev_0.txt│ │planner's lists                 └──> plan, spare addresses  (files)
//! ```

pub mod files;
pub mod group;
pub mod size_classes;
