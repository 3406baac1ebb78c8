//! Reads files of other workflow systems, and writes workflows of BAFS.
//!
//! ```text
//! WfFormat, DAGMan, Makeflow --one reader each--> TaskGraph --workflow_text--> text, trace
//! ```
//!
//! A [`TaskGraph`] has tasks, the files that they read and write, and what was lost on the way
//! (`remarks`). The role of a file follows from its use: many readers (batch), from one task to
//! others (pipeline), or the first input and last output of one task (endpoint).
//!
//! The readers run nothing, and read other files only through [`Sources`]. A construct that BAFS
//! cannot run as it was meant is refused with its reason ([`ImportError`]). One that changes
//! nothing but comfort becomes a remark.

mod dag_file;
mod dagman;
mod makeflow;
mod sources;
mod submit_file;
mod task_graph;
mod wfformat;
mod words;
mod workflow_text;

pub use dagman::read_dagman;
pub use makeflow::read_makeflow;
pub use sources::{ImportError, Sources};
pub use task_graph::{FileRole, RoleTotal, TaskGraph};
pub use wfformat::read_wfformat;
pub use workflow_text::{ImportedWorkflow, TextOptions, write_workflow};
